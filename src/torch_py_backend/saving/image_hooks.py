"""Hooks of a transformers model that takes images. `save_model` writes this file as hooks.py."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor


class Hooks:
    """Decodes the bytes of a JPEG or PNG file, and prepares the image."""

    def __init__(self, folder: Path) -> None:
        processors: Any = AutoImageProcessor
        self.processor = processors.from_pretrained(folder, local_files_only=True)

    def preprocess(self, image: bytes) -> dict[str, Any]:
        with Image.open(BytesIO(image), formats=["JPEG", "PNG"]) as opened:
            prepared = self.processor(opened.convert("RGB"), return_tensors="pt")
        return {name: value[0] for name, value in prepared.items()}
