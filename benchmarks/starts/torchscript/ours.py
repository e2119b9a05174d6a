import torch

import torch_py_backend

with torch_py_backend.serve("models") as server:
    print(server.infer("net", torch.ones(1, 3, 64, 64)))
