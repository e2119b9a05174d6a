import numpy as np

import torch_py_backend

with torch_py_backend.serve("models") as server:
    print(server.infer("net", np.ones((1, 3, 64, 64), np.float32)))
