"""Hooks of a transformers model that takes text. `save_model` writes this file as hooks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


class Hooks:
    """Tokenizes the texts of a batch, padded to the longest."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def preprocess_batch(self, text: list[str]) -> dict[str, Any]:
        return dict(self.tokenizer(text, padding=True, truncation=True, return_tensors="pt"))
