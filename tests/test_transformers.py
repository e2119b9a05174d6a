"""Models of an installed package, transformers, whose `from_pretrained` reads the folder.

On a real server, tests/deploy/test_walkthroughs.py has some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_triton
import numpy as np
import pytest
import torch
from scenarios import Scenario, assert_close, both, config, tensor, text

from torch_py_backend.adapter import TritonPythonModel

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

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


def test_generate_takes_its_settings_as_inputs(tmp_path: Path, process: None) -> None:
    """Of what goes into generate()'s **kwargs, settings are numbers and masks are tensors."""
    shape = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    gpt2 = _random(transformers.GPT2LMHeadModel, shape)
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
    scenario = Scenario("gpt2", gpt2.save_pretrained, _GENERATOR)
    (outputs,) = _answers(tmp_path, scenario, given | settings)
    assert outputs["sequences"].tolist() == made.tolist()


_HOOKS = """
from transformers import AutoTokenizer


class Hooks:
    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def preprocess_batch(self, text: list[str]):
        return self.tokenizer(text, padding=True, return_tensors="pt")

    def postprocess(self, result):
        return {"shares": result.logits.softmax(0)}
"""


def test_texts_that_its_tokenizer_pads_have_the_answers_of_eager_pytorch(
    tmp_path: Path, process: None, imports: None
) -> None:
    numbers = {"[PAD]": 0, "[UNK]": 1, "dull": 2, "fine": 3, "film": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    shape = transformers.BertConfig(
        vocab_size=len(numbers), num_labels=3, initializer_range=1.0, hidden_size=16,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    )  # fmt: skip
    classifier = _random(transformers.BertForSequenceClassification, shape)
    files = both(classifier.save_pretrained, tokenizer.save_pretrained, text(_HOOKS, "hooks.py"))
    parameters = {"MODEL_FACTORY": "transformers:AutoModelForSequenceClassification"}
    settings = config({}, {"shares": [3]}, parameters=parameters)
    scenario = Scenario("texts", files, settings + tensor("input", "text", [1], "STRING"))
    texts = ["fine film", "dull", "dull film and dull plot"]
    requests = [{"text": np.array([[one.encode()]], dtype=np.object_)} for one in texts]
    for one, outputs in zip(texts, _answers(tmp_path, scenario, *requests), strict=True):
        with torch.inference_mode():
            shares = classifier(**tokenizer([one], return_tensors="pt")).logits.softmax(1)
        assert_close(outputs["shares"], shares.numpy())


def _random(kind: Any, shape: Any) -> Any:
    """A network with random weights, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(shape).eval()


def _answers(folder: Path, scenario: Scenario, *batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of each request of a batch."""
    model = TritonPythonModel()
    arguments = fake_triton.completed(model, fake_triton.arguments(scenario.lay_out(folder)))
    model.initialize(arguments)
    document, turn = json.loads(arguments["model_config"]), fake_triton.Turn(0)
    requests = [fake_triton.request(inputs, document, "", turn) for inputs in batch]
    answers = []
    for response in model.execute(requests):
        assert response.error() is None, response.error().message()
        answers.append({one.name(): one.as_numpy() for one in response.output_tensors()})
    return answers
