import requests
import torch

image = torch.ones(3, 64, 64).tolist()
print(requests.post("http://127.0.0.1:8000/predict", json={"image": image}).json()["scores"])
