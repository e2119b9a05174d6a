"""Image preprocessing of ImageNet's models, without torchvision."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.errors import InputError, PlatformError
from torch_py_backend.torchserve.context import settings

_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
# Formats that Pillow decodes itself: for EPS it would start Ghostscript on the client's bytes.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# For images that are not resized: as floats, 12 bytes per pixel or 300 MB in all.
_MOST_PIXELS_AS_FLOATS = 25_000_000


def pillow() -> Any:
    """Return Pillow's module Image.

    Raises:
        PlatformError: it is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415  only models with images need it
    except ImportError as error:
        config = settings.get(None)
        raise PlatformError(
            config.name if config is not None else "",
            f"its handler reads images: {error}",
            cure="pip install 'torch-py-backend[torchserve]' where the server's Python runs.",
        ) from None
    return Image


def opened(file: bytes | bytearray, processing: Any) -> Any:
    """Return an image that is not decoded yet.

    Pillow's `Image.MAX_IMAGE_PIXELS` limits its size; handlers may raise it, or set it to None.

    Args:
        file: the bytes of the file.
        processing: the transform for the image.

    Raises:
        PIL.UnidentifiedImageError: it has none of FORMATS.
        InputError: it has too many pixels.
    """
    image = pillow().open(io.BytesIO(file), formats=FORMATS)
    most = pillow().MAX_IMAGE_PIXELS
    if most is not None and isinstance(processing, ImageNetTransform) and processing.side is None:
        most = min(most, _MOST_PIXELS_AS_FLOATS)
    width, height = image.size
    if most is not None and width * height > most:
        raise InputError(
            settings.get().name,
            f"the image has {width} x {height} pixels",
            expected=f"at most {most} pixels in all",
        )
    return image


@dataclass(frozen=True, slots=True)
class ImageNetTransform:
    """The transforms Resize(256), CenterCrop(224), ToTensor and Normalize of torchvision.

    Attributes:
        side: the size of the shorter side after resizing; None: neither resize, crop nor normalize.
        crop: the side of the square in the middle.
    """

    side: int | None = 256
    crop: int = 224

    def __call__(self, image: Any) -> Tensor:
        """Return a Pillow image as a tensor [3, height, width]."""
        image = image.convert("RGB")  # mean and deviation are of three channels
        if self.side is None:
            return to_tensor(image)
        image = _cropped(_resized(image, self.side), self.crop)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _DEVIATION))
        return (to_tensor(image) - mean) / deviation


def to_tensor(image: Any) -> Tensor:
    """Return bytes from 0 to 255 as floats from 0 to 1, channels first."""
    array = np.array(image, dtype=np.uint8)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)


def _resized(image: Any, side: int) -> Any:
    width, height = image.size
    short, long = sorted((width, height))
    if short == side:
        return image
    other = int(side * long / short)
    size = (side, other) if width <= height else (other, side)
    return image.resize(size, pillow().Resampling.BILINEAR)


def _cropped(image: Any, side: int) -> Any:
    width, height = image.size
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))
