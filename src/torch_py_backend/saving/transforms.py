"""The image transforms of torchvision and timm, as settings for `transform_hooks.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FILE = "transform.json"
_PRESET = ("crop_size", "resize_size", "mean", "std", "interpolation")
_DATA_CONFIG = ("input_size", "crop_pct", "mean", "std", "interpolation")
# Those of Pillow.
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


def settings(transform: Any) -> dict[str, Any] | None:
    """Return how a transform resizes the shorter side of an image, crops its center, normalizes it.

    Args:
        transform: torchvision's preset for classification (`weights.transforms()`), or timm's
            `resolve_model_data_config(model)`.

    Returns:
        The settings, or None: it is another object, or does something else.
    """
    if isinstance(transform, Mapping):
        if any(key not in transform for key in _DATA_CONFIG):
            return None
        if transform.get("crop_mode", "center") != "center":
            return None
        values = dict(transform)
        crop = list(values["input_size"][-2:])
        # As timm.data.create_transform does for square images.
        resize = [math.floor(crop[0] / values["crop_pct"])]
    else:
        if type(transform).__name__ != "ImageClassification":
            return None
        values = {name: getattr(transform, name) for name in _PRESET}
        crop, resize = list(values["crop_size"]), list(values["resize_size"])
    interpolation = str(getattr(values["interpolation"], "value", values["interpolation"]))
    if len({*crop}) != 1 or len(resize) != 1 or interpolation not in _INTERPOLATIONS:
        return None
    return {
        "resize": resize[0],
        "crop": crop[0],
        "mean": list(values["mean"]),
        "std": list(values["std"]),
        "interpolation": interpolation,
    }
