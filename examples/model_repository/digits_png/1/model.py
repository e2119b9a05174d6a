"""What runs around the network in model.pt2: an image file comes in, names of digits go out."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SIDE = 8
INK = 16.0


class Hooks:
    def __init__(self, folder: Path) -> None:
        self.labels = (folder / "labels.txt").read_text(encoding="utf-8").split()

    def preprocess(self, image: bytes) -> Tensor:
        """One file, dark on light paper, as the network knows digits: [1, 8, 8], ink 0 to 16."""
        # Without formats, Pillow would start Ghostscript for a file in PostScript.
        opened = Image.open(BytesIO(image), formats=["PNG", "JPEG"])
        paper = opened.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
        light = torch.from_numpy(np.array(paper, dtype=np.float32)) / 255.0
        return INK * (1.0 - light).unsqueeze(0)

    def postprocess(self, result: Tensor, parameters: Mapping[str, int]) -> dict[str, object]:
        """The likeliest digits of one image, as many as the request's parameter `top` says."""
        top = min(max(1, int(parameters.get("top", 1))), len(self.labels))
        probabilities, places = result.softmax(0).topk(top)
        return {
            "label": [self.labels[place] for place in places.tolist()],
            "probability": probabilities,
        }


def example_inputs() -> dict[str, list[list[bytes]]]:
    """What the model is warmed up with: an empty page."""
    file = BytesIO()
    Image.new("L", (SIDE, SIDE), color=255).save(file, format="PNG")
    return {"image": [[file.getvalue()]]}
