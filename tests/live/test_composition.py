"""Models that call others, and ensembles of ours, on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import serving
import tritonclient.grpc
from scenarios import Scenario, config, hooked, strings, tensor
from tritonclient.utils import InferenceServerException

_CALLS = """\
import asyncio

import torch
from torch import Tensor, nn

from torch_py_backend.composition import model


"""
_DOUBLE = """\
class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x >= 100).any()):
            raise ValueError("too long")
        return 2 * x
"""
# Takes text, counts its letters.
_LENGTHS = """\
class Lengths(nn.Module):
    def forward(self, lengths: Tensor) -> Tensor:
        return lengths


class Hooks:
    def preprocess(self, text: str) -> Tensor:
        if not text:
            raise ValueError("no letters")
        return torch.tensor([float(len(text))])
"""
# Calls others in its hooks and, several at once, in forward().
_CALLER = """\
class Caller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self.ask(x))

    async def ask(self, x: Tensor) -> Tensor:
        double = model("double")
        answers = await asyncio.gather(*(asyncio.to_thread(double, x=x + one) for one in range(3)))
        return sum(answer["y"] for answer in answers)


class Hooks:
    def preprocess(self, text: bytes) -> Tensor:
        return model("lengths")(text=[[text]])["y"][0]

    def postprocess(self, result: Tensor) -> Tensor:
        return model("double")(x=result.unsqueeze(0))["y"][0]
"""
_TEXT_TO_Y = config({"text": ["STRING", 1]}, {"y": [1]})
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 8
{tensor("input", "text", [1], "STRING")}{tensor("output", "y", [1])}ensemble_scheduling {{
  step [
    {{ model_name: "lengths" model_version: -1
      input_map {{ key: "text" value: "text" }} output_map {{ key: "y" value: "length" }} }},
    {{ model_name: "double" model_version: -1
      input_map {{ key: "x" value: "length" }} output_map {{ key: "y" value: "y" }} }}
  ]
}}
"""
_MODELS = {
    "double": (_DOUBLE, config({"x": [1]}, {"y": [1]}, more="dynamic_batching { }\n")),
    "lengths": (_LENGTHS, _TEXT_TO_Y),
    "caller": (_CALLER, _TEXT_TO_Y),
    "ensemble": ("", _ENSEMBLE),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return the output y of a model, on a server with models that call each other."""
    folder = tmp_path_factory.mktemp("composition")
    for name, (code, text) in _MODELS.items():
        Scenario(name, hooked(_CALLS + code), text).lay_out(folder / "repository")

    def ask(name: str, *texts: str) -> Any:
        sent = serving.infer_inputs(tritonclient.grpc, {"text": strings(*([one] for one in texts))})
        return client.infer(name, sent, client_timeout=60).as_numpy("y").tolist()

    # Models whose warm-up calls others load beside them, in whatever order.
    with serving.running(folder) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield ask
        client.close()


@pytest.mark.parametrize(
    ("name", "expected"), [("caller", [[60.0], [72.0]]), ("ensemble", [[8.0], [10.0]])]
)
def test_models_answer_each_other(name: str, expected: Any, ask: Callable[..., Any]) -> None:
    for _ in range(3):
        assert ask(name, "four", "seven") == expected


@pytest.mark.parametrize(
    ("name", "text", "code", "says"),
    [
        ("caller", 100 * "x", "INTERNAL", "'double': it answers: model 'd"),
        ("ensemble", "", "INVALID_ARGUMENT", "ValueError: no letters"),
    ],
)
def test_the_client_gets_the_error_of_who_was_called_and_later_calls_are_answered(
    name: str, text: str, code: str, says: str, ask: Callable[..., Any]
) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        ask(name, text)
    assert says in refusal.value.message()
    assert code in refusal.value.status()
    assert "Traceback" not in refusal.value.message()
    assert ask("caller", "four") == [[60.0]]
