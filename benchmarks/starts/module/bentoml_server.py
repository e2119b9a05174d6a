import bentoml
import net
import numpy as np
import torch


@bentoml.service
class Service:
    def __init__(self):
        self.net = net.trained()

    @bentoml.api(batchable=True)
    def predict(self, image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.net(torch.from_numpy(image).float()).numpy()
