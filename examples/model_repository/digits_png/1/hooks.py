"""Preprocessing and postprocessing for the network in model.pt2: image files in, labels out."""

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
        """Convert one file, dark on light paper, to the network's input: [1, 8, 8], ink 0 to 16."""
        # Without `formats`, Pillow starts Ghostscript for PostScript files.
        opened = Image.open(BytesIO(image), formats=["PNG", "JPEG"])
        paper = opened.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
        light = torch.from_numpy(np.array(paper, dtype=np.float32)) / 255.0
        return INK * (1.0 - light).unsqueeze(0)

    def postprocess(self, result: Tensor, parameters: Mapping[str, int]) -> dict[str, object]:
        """Return the most likely digits; the request parameter `top` sets their number."""
        top = min(max(1, int(parameters.get("top", 1))), len(self.labels))
        probabilities, places = result.softmax(0).topk(top)
        return {
            "label": [self.labels[place] for place in places.tolist()],
            "probability": probabilities,
        }


def example_inputs() -> dict[str, list[list[bytes]]]:
    """Return the input for the warm-up: an empty page."""
    file = BytesIO()
    Image.new("L", (SIDE, SIDE), color=255).save(file, format="PNG")
    return {"image": [[file.getvalue()]]}
