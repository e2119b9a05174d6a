"""The pages of the documentation, followed, with real servers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import documentation
import pytest
import walkthrough

from torch_py_backend import local_server

pytestmark = pytest.mark.server

_PAGES = [page for page in documentation.PAGES if walkthrough.followed(page)]


@pytest.fixture(autouse=True)
def _here(here: None, imports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that commands try and that code serves are loaded in this process."""
    monkeypatch.setattr(local_server, "serve", walkthrough.ServedHere)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path) -> None:
    """A page, followed in an empty folder, ends with the answers that it promises."""
    walkthrough.follow(page, tmp_path)


def test_readme(tmp_path: Path) -> None:
    """README's first example prints what it says, with a model of the same class and no network."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "film": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]"
    )
    tokenizer.save_pretrained(tmp_path / "local")
    settings = transformers.DistilBertConfig(
        vocab_size=3, dim=16, hidden_dim=32, n_heads=2, n_layers=1
    )
    model = transformers.DistilBertForSequenceClassification(settings)
    model.save_pretrained(tmp_path / "local")
    name = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
    walkthrough.follow(documentation.ROOT / "README.md", tmp_path, {name: "local"})
