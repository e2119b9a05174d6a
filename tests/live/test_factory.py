"""Models of an installed package: transformers that `from_pretrained` reads, without a network.

What is served has to be what eager PyTorch answers.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest
import scenarios
import torch
from scenarios import Call, Refused, config, tensor
from serving import Serving, asked

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

# generate() takes its settings by **kwargs, as numbers.
_GENERATOR = (
    config(
        {},
        {},
        parameters={"METHOD": "generate", "MODEL_FACTORY": "transformers:AutoModelForCausalLM"},
    )
    + tensor("input", "input_ids", [-1], "INT64")
    + tensor("input", "attention_mask", [-1], "INT64")
    + tensor("input", "max_new_tokens", [1], "INT32")
    + tensor("input", "do_sample", [1], "BOOL", more="optional: true")
    + tensor("output", "sequences", [-1], "INT64")
)

# A classifier of texts, with its tokenizer and hooks in one folder.
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
    config(
        {},
        {"share": [1]},
        parameters={"MODEL_FACTORY": "transformers:AutoModelForSequenceClassification"},
        more="dynamic_batching { max_queue_delay_microseconds: 20000 }\n",
    )
    + tensor("input", "text", [1], "STRING")
    + tensor("output", "label", [1], "STRING")
)


class _Hub(BaseHTTPRequestHandler):
    """Stands for the Hugging Face Hub, and keeps what it is asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        """Not into the tests' output."""


@pytest.fixture(scope="module")
def hub() -> Iterator[None]:
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # What a Python started from here on, the model's too, takes for the Hub.
        patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        # The backend, not the environment of the tests, keeps models from asking.
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.delenv(name, raising=False)
        yield
        server.shutdown()


def _seeded(make: Any, settings: Any) -> Any:
    """Return a network with random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(settings).eval()


@pytest.fixture(scope="module")
def gpt2() -> Any:
    settings = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return _seeded(transformers.GPT2LMHeadModel, settings)


@pytest.fixture(scope="module")
def classifier() -> Any:
    settings = transformers.BertConfig(
        vocab_size=len(_WORDS), num_labels=len(_LABELS), initializer_range=1.0, hidden_size=16,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return _seeded(transformers.BertForSequenceClassification, settings)


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
    gpt2: Any,
    classifier: Any,
    tokenizer: Any,
    hub: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("factory")
    repository = folder / "repository"
    scenarios.Scenario("gpt2", gpt2.save_pretrained, _GENERATOR).lay_out(repository)
    writers = scenarios.both(
        classifier.save_pretrained, tokenizer.save_pretrained, scenarios.text(_CODE, "hooks.py")
    )
    scenarios.Scenario("texts", writers, _CONFIG).lay_out(repository)
    with asked(folder) as running:
        assert [state.reason for state in running.states.values() if not state.ready] == []
        yield running


def test_generate_takes_its_settings_as_inputs(serving: Serving, gpt2: Any) -> None:
    """Of what goes into generate()'s **kwargs, settings are numbers and masks are tensors."""
    ids = np.random.default_rng(5).integers(2, 40, (2, 6))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with torch.inference_mode():
        made = gpt2.generate(
            **{name: torch.from_numpy(value) for name, value in given.items()},
            max_new_tokens=5,
            do_sample=False,
        )
    settings = {
        "max_new_tokens": np.full((2, 1), 5, dtype=np.int32),
        "do_sample": np.zeros((2, 1), dtype=bool),
    }
    serving.check("http", "gpt2", Call(given | settings, {"sequences": made.numpy()}))


def _column(*values: str | bytes) -> np.ndarray[Any, Any]:
    encoded = [value if isinstance(value, bytes) else value.encode() for value in values]
    return np.array([[value] for value in encoded], dtype=np.object_)


def _judged(classifier: Any, tokenizer: Any, *texts: str, label: str | None = None) -> Call:
    """Texts, and what eager PyTorch answers to each of them."""
    labels, shares = [], []
    for text in texts:
        with torch.inference_mode():
            found = classifier(**tokenizer([text], return_tensors="pt")).logits[0].softmax(0)
        best = int(found.argmax()) if label is None else _LABELS.index(label)
        labels.append(_LABELS[best])
        shares.append([float(found[best])])
    return Call(
        {"text": _column(*texts)},
        {"label": _column(*labels), "share": np.array(shares, dtype=np.float32)},
        {} if label is None else {"label": label},
    )


def test_texts(serving: Serving, classifier: Any, tokenizer: Any) -> None:
    """A tokenizer from the folder, batches padded by it, labels and shares as in eager."""
    calls = [
        _judged(classifier, tokenizer, "the film was fine"),
        _judged(classifier, tokenizer, "dull", "the film was long and dull and long"),
        _judged(classifier, tokenizer, "the plot was fine", label="bad"),
    ]
    for call in calls:
        serving.check("http", "texts", call)
    unreadable = Call({"text": _column(b"\xff")}, Refused(400, ("input 'text' is not UTF-8",)))
    serving.check_together("texts", [*calls, unreadable])


@pytest.mark.usefixtures("serving")
def test_the_hub_is_not_asked_for_anything() -> None:
    """Loading and answering, by the tests above, used what lies in the folder."""
    assert not _Hub.asked
    ask = "import huggingface_hub; huggingface_hub.model_info('nobody/nothing')"
    subprocess.run([sys.executable, "-c", ask], check=False, capture_output=True, timeout=60)
    assert "/api/models/nobody/nothing" in _Hub.asked  # it would have been
