"""Whole pipelines in one folder, on a real server: files and texts in, labels out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import scenarios
import torch
from PIL import Image
from scenarios import Call, Refused, Scenario, tensor
from serving import Serving, asked

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

_EXAMPLES = Path(__file__).parents[2] / "examples" / "model_repository"
_LABELS = ("bad", "good", "so-so")
_WORDS = ("[PAD]", "[UNK]", "the", "film", "was", "dull", "fine", "and", "long")
_CODE = """\
import torch
from transformers import AutoTokenizer


class Hooks:
    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def preprocess_batch(self, text: list[str]):
        return self.tokenizer(text, padding=True, truncation=True, return_tensors="pt")

    def postprocess(self, result, parameters):
        shares = result.logits.softmax(0)
        wished = parameters.get("label")
        best = int(shares.argmax()) if wished is None else LABELS.index(wished)
        return {"label": LABELS[best], "share": shares[best]}


LABELS = ("bad", "good", "so-so")
"""
_CONFIG = (
    'backend: "pytorch_py"\nmax_batch_size: 8\n'
    + tensor("input", "text", [1], "STRING")
    + tensor("output", "label", [1], "STRING")
    + tensor("output", "share", [1])
    + "dynamic_batching { max_queue_delay_microseconds: 20000 }\n"
    + "instance_group [{ kind: KIND_CPU count: 1 }]\n"
    + 'parameters { key: "MODEL_FACTORY" value'
    + ' { string_value: "transformers:AutoModelForSequenceClassification" } }\n'
)


@pytest.fixture(scope="module")
def classifier() -> Any:
    """Random weights, the same in every run."""
    settings = transformers.BertConfig(
        vocab_size=len(_WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=len(_LABELS),
        initializer_range=1.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(settings).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One number a word."""
    numbers = {word: number for number, word in enumerate(_WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


@pytest.fixture(scope="module")
def serving(
    classifier: Any,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("pipelines")
    repository = folder / "repository"
    writers = scenarios.both(
        classifier.save_pretrained, tokenizer.save_pretrained, scenarios.text(_CODE, "hooks.py")
    )
    Scenario("texts", writers, _CONFIG).lay_out(repository)
    shutil.copytree(_EXAMPLES / "digits_png", repository / "digits_png")
    with asked(folder) as running:
        yield running


def column(*values: str | bytes) -> np.ndarray[Any, Any]:
    encoded = [one if isinstance(one, bytes) else one.encode() for one in values]
    return np.array([[one] for one in encoded], dtype=np.object_)


# --- texts -----------------------------------------------------------------------------------


def judged(classifier: Any, tokenizer: Any, *texts: str, label: str | None = None) -> Call:
    """Texts, and what eager PyTorch says of each by itself."""
    labels, shares = [], []
    for text in texts:
        with torch.inference_mode():
            found = classifier(**tokenizer([text], return_tensors="pt")).logits[0].softmax(0)
        best = int(found.argmax()) if label is None else _LABELS.index(label)
        labels.append(_LABELS[best])
        shares.append([float(found[best])])
    return Call(
        {"text": column(*texts)},
        {"label": column(*labels), "share": np.array(shares, dtype=np.float32)},
        {} if label is None else {"label": label},
    )


def test_texts(serving: Serving, classifier: Any, tokenizer: Any) -> None:
    """A tokenizer from the folder, batches padded by it, labels and shares as in eager."""
    assert serving.states["texts"].ready, serving.states["texts"].reason
    calls = [
        judged(classifier, tokenizer, "the film was fine"),
        judged(classifier, tokenizer, "dull", "the film was long and dull and long"),
        judged(classifier, tokenizer, "the plot was fine", label="bad"),
    ]
    for call in calls:
        for protocol in ("http", "grpc"):
            serving.check(protocol, "texts", call)
    unreadable = Call({"text": column(b"\xff")}, Refused(400, ("input 'text' is not UTF-8",)))
    serving.check_together("texts", [*calls, unreadable])


# --- images ----------------------------------------------------------------------------------


def drawn(kind: str, side: int = 8, stroke: int = 4) -> bytes:
    """A vertical stroke on white paper, as a file."""
    pixels = np.full((8, 8), 255, dtype=np.uint8)
    pixels[1:7, stroke] = 0
    image = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
    file = BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def named(*files: bytes, top: int = 1) -> Call:
    """Files, and what the network of the example `digits` says of their pixels."""
    source: dict[str, Any] = {}
    exec((_EXAMPLES / "digits" / "1" / "model.py").read_text(), source)
    network = source["DigitsCNN"]().eval()
    network.load_state_dict(
        safetensors.torch.load_file(_EXAMPLES / "digits" / "1" / "model.safetensors")
    )
    names = (_EXAMPLES / "digits_png" / "1" / "labels.txt").read_text().split()
    labels, shares = [], []
    for file in files:
        paper = Image.open(BytesIO(file)).convert("L").resize((8, 8), Image.Resampling.BOX)
        pixels = 16 * (1 - torch.from_numpy(np.array(paper, dtype=np.float32)) / 255)
        with torch.inference_mode():
            best = network(pixels[None, None]).softmax(1)[0].topk(top)
        labels.append([names[place].encode() for place in best.indices])
        shares.append(best.values.tolist())
    return Call(
        {"image": column(*files)},
        {
            "label": np.array(labels, dtype=np.object_),
            "probability": np.array(shares, dtype=np.float32),
        },
        {} if top == 1 else {"top": top},
    )


def test_images(serving: Serving) -> None:
    """The example: files of two kinds and sizes, what is no image, and the parameter `top`."""
    assert serving.states["digits_png"].ready, serving.states["digits_png"].reason
    refused = Refused(400, ("preprocess() refuses the input: UnidentifiedImageError",))
    calls = [
        named(drawn("PNG")),
        named(drawn("PNG", stroke=2), drawn("JPEG", side=64)),
        named(drawn("PNG", side=200), top=3),
        Call({"image": column(b"no image")}, refused),
        Call({"image": column(drawn("PNG"), drawn("PNG")[:60])}, Refused(400, ("preprocess()",))),
        Call(
            {"image": column(drawn("PNG"))},
            Refused(500, ("postprocess() raised ValueError",)),
            {"top": "many"},
        ),
    ]
    for call in calls:
        for protocol in ("http", "grpc"):
            serving.check(protocol, "digits_png", call)
    serving.check_together("digits_png", calls)
