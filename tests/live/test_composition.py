"""Models that call others, and ensembles of ours, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving
import tritonclient.grpc
from scenarios import config, tensor
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from torch_py_backend.server.tritonserver import ModelState

_CALLS = """\
import asyncio

import torch
from torch import Tensor, nn

from torch_py_backend.composition import model


"""
_DOUBLE = """\
class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
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
_SPOKEN = """\
class Spoken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Hooks:
    def postprocess(self, result: Tensor) -> str:
        return f"{int(result)} letters"
"""
_CALLER = """\
class Caller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return model("double")(x=x)["y"] + 1
"""
_TOGETHER = """\
class Together(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self.ask(x))

    async def ask(self, x: Tensor) -> Tensor:
        other = model("double", timeout=60)
        found = await asyncio.gather(*(other.asynchronously(x=x + one) for one in range(3)))
        return sum(one["y"] for one in found)
"""
_SPEAKER = """\
class Speaker(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Hooks:
    def preprocess(self, text: bytes) -> Tensor:
        found = model("lengths", timeout=60)(text=[[text]])["y"]
        return model("double")(x=found)["y"][0]

    def postprocess(self, result: Tensor) -> dict:
        return {"y": model("spoken")(x=result.unsqueeze(0))["y"].item()}
"""
_SLOW = """\
import time


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(x.max()))
        return x
"""
# A first call may take longer than half a second on a busy machine.
_IMPATIENT = _CALLER.replace(
    'model("double")', 'model("slow", timeout=0.5 if bool((x > 0).any()) else 60.0)'
)
_X_TO_Y = config({"x": [1]}, {"y": [1]}, more="dynamic_batching { }\n")
_TEXT = tensor("input", "text", [1], "STRING")
_WORDS = tensor("output", "y", [1], "STRING")
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 8
{_TEXT}{_WORDS}ensemble_scheduling {{
  step [
    {{ model_name: "lengths" model_version: -1
      input_map {{ key: "text" value: "text" }} output_map {{ key: "y" value: "length" }} }},
    {{ model_name: "double" model_version: -1
      input_map {{ key: "x" value: "length" }} output_map {{ key: "y" value: "doubled" }} }},
    {{ model_name: "spoken" model_version: -1
      input_map {{ key: "x" value: "doubled" }} output_map {{ key: "y" value: "y" }} }}
  ]
}}
"""
_MODELS = {
    "double": (_DOUBLE, _X_TO_Y),
    "lengths": (_LENGTHS, config({}, {"y": [1]}) + _TEXT),
    "spoken": (_SPOKEN, config({"x": [1]}, {}) + _WORDS),
    "caller": (_CALLER, _X_TO_Y),
    "together": (_TOGETHER, _X_TO_Y),
    "speaker": (_SPEAKER, config({}, {}) + _TEXT + _WORDS),
    "itself": (_CALLER.replace("double", "itself"), _X_TO_Y),
    "lonely": (_CALLER.replace("double", "absent"), _X_TO_Y),
    "slow": (_SLOW, config({"x": [1]}, {"y": [1]}, parameters={"WARMUP": "false"})),
    "impatient": (_IMPATIENT, config({"x": [1]}, {"y": [1]})),
    "ensemble": ("", _ENSEMBLE),
}


@dataclass(frozen=True)
class Asked:
    """A running server, and its client."""

    states: dict[str, ModelState]
    client: tritonclient.grpc.InferenceServerClient
    log: Path

    def infer(self, name: str, **inputs: Any) -> Any:
        """The output y."""
        sent = []
        for key, value in inputs.items():
            array = np.array(value, dtype=np.object_ if key == "text" else np.float32)
            one = tritonclient.grpc.InferInput(
                key, list(array.shape), np_to_triton_dtype(array.dtype)
            )
            one.set_data_from_numpy(array)
            sent.append(one)
        return self.client.infer(name, sent, client_timeout=60).as_numpy("y").tolist()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A server with models that call each other."""
    folder = tmp_path_factory.mktemp("composition")
    for name, (code, text) in _MODELS.items():
        (folder / "repository" / name / "1").mkdir(parents=True)
        (folder / "repository" / name / "config.pbtxt").write_text(text)
        if code:
            (folder / "repository" / name / "1" / "model.py").write_text(_CALLS + code)
    with serving.running(folder, ready=False) as server:
        states = {state.name: state for state in server.models()}
        client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield Asked(states, client, folder / "server.log")
        client.close()


def test_all_load(asked: Asked) -> None:
    """Models that call others load beside them, in whatever order."""
    assert {name: one.reason for name, one in asked.states.items() if not one.ready} == {}


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("caller", {"x": [[1.0], [2.0]]}, [[3.0], [5.0]]),
        ("together", {"x": [[1.0]]}, [[12.0]]),
        ("speaker", {"text": [["four"], ["seven"]]}, [[b"8 letters"], [b"10 letters"]]),
        ("ensemble", {"text": [["four"], ["seven"]]}, [[b"8 letters"], [b"10 letters"]]),
        ("impatient", {"x": [[0.0]]}, [[1.0]]),
    ],
)
def test_answers(name: str, inputs: dict[str, Any], expected: Any, asked: Asked) -> None:
    """From forward(), from hooks, asynchronously, and as members of an ensemble."""
    for _ in range(3):
        assert asked.infer(name, **inputs) == expected


@pytest.mark.parametrize(
    ("name", "inputs", "code", "says"),
    [
        ("caller", {"x": [[-1.0]]}, "INTERNAL", "model 'double': it answers: model 'double'"),
        # Of a call, 24.10 does not pass the code on.
        ("speaker", {"text": [[""]]}, "IN", "ValueError: no letters"),
        ("ensemble", {"text": [[""]]}, "INVALID_ARGUMENT", "ValueError: no letters"),
        ("itself", {"x": [[1.0]]}, "INTERNAL", "the model calls itself"),
        ("lonely", {"x": [[1.0]]}, "INTERNAL", "model 'absent'"),
        ("impatient", {"x": [[2.0]]}, "UNAVAILABLE", "no answer came within 0.5 seconds"),
    ],
)
def test_errors(name: str, inputs: dict[str, Any], code: str, says: str, asked: Asked) -> None:
    """The error of who was called, with the code that it means for the client."""
    with pytest.raises(InferenceServerException) as refusal:
        asked.infer(name, **inputs)
    assert says in refusal.value.message()
    assert code in refusal.value.status()
    assert "Traceback" not in refusal.value.message()


def test_after_a_timeout(asked: Asked) -> None:
    """An answer that nobody waits for any more harms neither the caller nor who gives it."""
    with pytest.raises(InferenceServerException, match="no answer came within"):
        asked.infer("impatient", x=[[2.0]])
    assert asked.infer("slow", x=[[0.0]]) == [[0.0]]  # waits until it is done with the other
    assert asked.infer("impatient", x=[[0.0]]) == [[1.0]]
