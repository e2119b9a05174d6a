import requests

answer = requests.post("http://127.0.0.1:8000/predict", json={"text": "a fine film"})
print(answer.json()["logits"])
