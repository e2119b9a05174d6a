"""Models of an installed package, transformers, whose `from_pretrained` reads the folder.

tests/deploy/test_walkthroughs.py has others, with their tokenizers, on a real server.
"""

from __future__ import annotations

from pathlib import Path

import command_line
import numpy as np
import pytest
import torch
from instances import Served
from scenarios import Scenario, config

from torch_py_backend.config import pbtxt

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

_GENERATOR = config(
    {
        "input_ids": ["INT64", -1],
        "attention_mask": ["INT64", -1],
        "max_new_tokens": ["INT32", 1],
        "do_sample": ["BOOL", 1, "optional: true"],
    },
    {"sequences": ["INT64", -1]},
    parameters={"METHOD": "generate", "MODEL_FACTORY": "transformers:AutoModelForCausalLM"},
)


def test_generate_takes_its_settings_as_inputs(tmp_path: Path, process: None) -> None:
    """Of what goes into generate()'s **kwargs, settings are numbers and masks are tensors."""
    shape = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt2 = transformers.GPT2LMHeadModel(shape).eval()
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
    served = Served(tmp_path, Scenario("gpt2", gpt2.save_pretrained, _GENERATOR))
    ((response,),) = served.send(served.request(given | settings))
    assert response.error() is None, response.error().message()
    assert response.output_tensors()[0].as_numpy().tolist() == made.tolist()


@pytest.mark.parametrize(
    ("flags", "inputs"),
    [
        ((), ["text"]),
        (("--tensors",), ["input_ids", "attention_mask", "token_type_ids"]),
    ],
)
def test_init_gives_a_classifier_texts_or_padded_tokens_and_its_labels(
    flags: tuple[str, ...],
    inputs: list[str],
    tmp_path: Path,
    here: None,
) -> None:
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "film": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]"
    )
    tokenizer.save_pretrained(tmp_path / "net")
    (tmp_path / "net" / ".env").write_text("HF_TOKEN=secret")
    settings = transformers.BertConfig(
        vocab_size=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, pad_token_id=0, id2label={0: "bad", 1: "so-so", 2: "good"},
    )  # fmt: skip
    transformers.BertForSequenceClassification(settings).save_pretrained(tmp_path / "net")
    done = command_line.run("init", "net", *flags, cwd=tmp_path)
    assert "serve models\n" in done.stdout, done.stderr
    folder = tmp_path / "models" / "net"
    document = pbtxt.read(folder)
    assert [entry["name"] for entry in document["input"]] == inputs
    assert (folder / "labels.txt").read_text() == "bad\nso-so\ngood\n"
    (output,) = document["output"]
    assert (output["name"], output["label_filename"]) == ("logits", "labels.txt")
    assert (folder / "1" / "hooks.py").exists() is not bool(flags)
    assert ("PAD" in document["parameters"]) is bool(flags)
    assert not (folder / "1" / ".env").exists()
