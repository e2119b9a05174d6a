import bentoml
import numpy as np

with bentoml.SyncHTTPClient("http://localhost:3000") as client:
    print(client.predict(image=np.ones((1, 3, 64, 64), dtype=np.float32)))
