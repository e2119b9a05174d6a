import net
import numpy as np
import torch
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

module = net.trained()


@batch
def infer(image):
    with torch.inference_mode():
        return [module(torch.from_numpy(image)).numpy()]


with Triton() as triton:
    triton.bind(
        model_name="net",
        infer_func=infer,
        inputs=[Tensor(name="image", dtype=np.float32, shape=(3, 64, 64))],
        outputs=[Tensor(name="scores", dtype=np.float32, shape=(10,))],
        config=ModelConfig(max_batch_size=8),
    )
    triton.run()
    with ModelClient("localhost", "net") as client:
        print(client.infer_batch(np.ones((1, 3, 64, 64), dtype=np.float32))["scores"])
