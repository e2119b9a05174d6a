import net
import torch

import torch_py_backend

torch_py_backend.save_model(net.trained(), "models/net", example_inputs=torch.ones(1, 3, 64, 64))
with torch_py_backend.serve("models") as server:
    print(server.infer("net", torch.ones(1, 3, 64, 64)))
