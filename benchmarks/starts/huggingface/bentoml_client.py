import bentoml

with bentoml.SyncHTTPClient("http://localhost:3000") as client:
    print(client.predict(texts=["a fine film"]))
