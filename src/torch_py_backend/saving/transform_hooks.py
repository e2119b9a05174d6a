"""Hooks of a torchvision or timm model. `save_model` writes this file into model.py."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image


class Hooks:
    """Decodes the bytes of a JPEG or PNG file, and prepares the image as transform.json says."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "transform.json").read_text(encoding="utf-8"))
        self.size, self.crop = settings["resize"], settings["crop"]
        self.resampling = Image.Resampling[settings["interpolation"].upper()]
        self.mean = torch.tensor(settings["mean"])[:, None, None]
        self.std = torch.tensor(settings["std"])[:, None, None]

    def preprocess(self, image: bytes) -> torch.Tensor:
        with Image.open(BytesIO(image), formats=["JPEG", "PNG"]) as opened:
            picture = opened.convert("RGB")
        short, long = sorted(picture.size)
        sizes = (self.size, int(self.size * long / short))
        width, height = sizes if picture.width <= picture.height else reversed(sizes)
        if width * height > (Image.MAX_IMAGE_PIXELS or width * height):
            raise ValueError(
                f"an image of {picture.width} x {picture.height} is too long to resize"
            )
        picture = picture.resize((width, height), self.resampling)
        left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
        picture = picture.crop((left, top, left + self.crop, top + self.crop))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return (pixels / 255 - self.mean) / self.std
