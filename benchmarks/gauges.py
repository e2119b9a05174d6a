"""The models of `benchmarks.execute`: their folders, requests of one row, and right answers.

A feature is added to the model `add` or `mlp`; `lstm` is served with and without sequences.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import models, stubs
from benchmarks.models import MODELS, SEED, Step

Arrays: TypeAlias = dict[str, NDArray[Any]]

MOST = 32
"""The most requests in a call."""
BY_HAND = "by hand"
PLAIN = "plain"
SEQUENCE = "sequence"
LSTM = "lstm"
_BUCKETS = "1,8,32"
_PLAIN_BACKEND = stubs.GAUGE.with_name("plain.py")
_DELAY = "max_queue_delay_microseconds: 10000"
_BATCHES = f"dynamic_batching {{ {_DELAY} }}"
_STATE = (
    '{{ input_name: "{0}" output_name: "new_{0}" data_type: TYPE_FP32 dims: [{1}]'
    ' initial_state {{ name: "zeros" data_type: TYPE_FP32 dims: [{1}] zero_data: true }} }}'
)
_PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
_LABELLED = """

class Labelled({base}):
    def forward(self, {inputs}, label: list[str]) -> dict[str, Tensor | list[str]]:
        return {{"{output}": super().forward({inputs}), "echo": label}}
"""
# Its arguments are not called as the inputs are: without its hooks it does not load.
_HOOKED = """

class Hooked({base}):
    def forward(self, {prepared}):
        return super().forward({prepared})
"""
_HOOKS = """

class Hooks:
    def preprocess{ending}(self, {inputs}):
        return ({inputs},)

    def postprocess{ending}(self, result):
        return {{"{output}": result}}
"""


@dataclass(frozen=True)
class Tensor:
    """An input or output of a config, without the batch dimension."""

    name: str
    dim: int
    dtype: str = "FP32"
    more: str = ""

    def text(self, role: str) -> str:
        """Return its lines in config.pbtxt."""
        words = f'name: "{self.name}" data_type: TYPE_{self.dtype} dims: [{self.dim}] {self.more}'
        return f"{role} [{{ {words} }}]\n"


@dataclass(frozen=True)
class Case:
    """A model folder, and what is sent to it.

    Attributes:
        base: the model without any feature.
        feature: what is added, or PLAIN; BY_HAND for a backend that serves only this model.
        inputs: the inputs of its config.
        outputs: the outputs of its config.
        definition: the name of the class in model.py.
        state: the weights.
        requests: MOST requests of one row.
        answers: those of each request; of a sequence, those of its first requests.
        source: what model.py has besides the networks.
        hooks: the text of hooks.py.
        parameters: the parameters of its config.
        scheduler: the scheduler of its config.
    """

    base: str
    feature: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    definition: str
    state: Mapping[str, torch.Tensor]
    requests: Sequence[Arrays]
    answers: Sequence[Sequence[Arrays]]
    source: str = ""
    hooks: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = _BATCHES

    def write(self, folder: Path, backend: str, checkout: Path) -> None:
        """Write the model folder for the backend of that name, which is a checkout's."""
        version = folder / "1"
        version.mkdir(parents=True)
        by_hand = self.feature == BY_HAND
        (folder / "config.pbtxt").write_text(self._config("python" if by_hand else backend))
        source, hooks = inspect.getsource(models) + self.source, self.hooks
        if by_hand:
            (version / "network.py").write_text(source)
            (version / "base.py").write_text(_PLAIN_BACKEND.read_text())
            source = stubs.GAUGE.read_text()
        elif hooks and _reads_hooks_in_source(checkout):
            source, hooks = source + hooks, ""
        (version / "model.py").write_text(source)
        if hooks:
            (version / "hooks.py").write_text(hooks)
        if self.state:
            safetensors.torch.save_file(dict(self.state), version / "model.safetensors")

    def _config(self, backend: str) -> str:
        parameters = {"MODEL_CLASS": self.definition, "NUM_THREADS": "1", **self.parameters}
        return "".join(
            [
                f'backend: "{backend}"\nmax_batch_size: {MOST}\n{self.scheduler}\n',
                *(tensor.text("input") for tensor in self.inputs),
                *(tensor.text("output") for tensor in self.outputs),
                "instance_group [{ kind: KIND_CPU count: 1 }]\n",
                *(
                    _PARAMETER.format(key, value.replace('"', '\\"'))
                    for key, value in parameters.items()
                ),
            ]
        )


def _reads_hooks_in_source(checkout: Path) -> bool:
    """Return whether a checkout is older than hooks.py: hooks are a class in model.py."""
    source = checkout / "src" / "torch_py_backend" / "artifacts" / "discovery.py"
    return source.exists() and "HOOKS_CLASS" in source.read_text()


def cases(base: str) -> list[Case]:
    """Return the cases of a model, the plain one and the one by hand first."""
    return _lstm() if base == LSTM else _features(base)


def _features(base: str) -> list[Case]:
    model = MODELS[base]
    module = model.build()
    inputs = [Tensor(spec.name, spec.dims[0]) for spec in model.inputs]
    output = Tensor(model.output.name, model.output.dims[0])
    names = ", ".join(tensor.name for tensor in inputs)
    words = {"base": type(module).__name__, "inputs": names, "output": output.name}
    prepared = ", ".join(f"prepared_{name}" for name in names.split(", "))
    requests = _rows(inputs, [0] * MOST)
    answers = _answers(module, output.name, requests)

    def case(feature: str, **changes: Any) -> Case:
        usual: dict[str, Any] = {
            "inputs": inputs,
            "outputs": [output],
            "definition": words["base"],
            "state": module.state_dict(),
            "requests": requests,
            "answers": [answers],
        }
        return Case(base, feature, **usual | changes)

    def hooks(ending: str) -> dict[str, str]:
        source = _HOOKED.format(**words, prepared=prepared)
        return {
            "definition": "Hooked",
            "source": source,
            "hooks": _HOOKS.format(**words, ending=ending),
        }

    labels = [np.array([[f"request {place}"]], np.object_) for place in range(MOST)]
    return [
        case(PLAIN),
        case(BY_HAND),
        _padded(case, module, inputs, output),
        case(
            "strings",
            inputs=[*inputs, Tensor("label", 1, "STRING")],
            outputs=[output, Tensor("echo", 1, "STRING")],
            definition="Labelled",
            source=_LABELLED.format(**words),
            requests=[row | {"label": label} for row, label in zip(requests, labels, strict=True)],
            answers=[[row | {"echo": label} for row, label in zip(answers, labels, strict=True)]],
        ),
        case("CHECK_FINITE", parameters={"CHECK_FINITE": "true"}),
        case("BATCH_BUCKETS", parameters={"BATCH_BUCKETS": _BUCKETS}),
        case("batch hooks", **hooks("_batch")),
        case("row hooks", **hooks("")),
    ]


def _padded(case: Any, module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Case:
    """Return the case of inputs that are shorter than the longest, the first request's."""
    missing = [place % 8 for place in range(MOST)]
    requests = _rows(inputs, missing)
    full = [
        {name: np.pad(row, [(0, 0), (0, short)]) for name, row in request.items()}
        for request, short in zip(requests, missing, strict=True)
    ]
    answers = _answers(module, output.name, full)
    is_as_long = output.dim == inputs[0].dim
    if is_as_long:  # outputs are cut to the length of the request
        answers = [
            {output.name: answer[output.name][:, : output.dim - short]}
            for answer, short in zip(answers, missing, strict=True)
        ]
    cuts = [output.name] if is_as_long else []
    padded: Case = case(
        "PAD",
        inputs=[Tensor(tensor.name, -1, more="allow_ragged_batch: true") for tensor in inputs],
        outputs=[Tensor(output.name, -1 if is_as_long else output.dim)],
        # On a busy machine, a batch may lack the longest request.
        parameters={
            "PAD": json.dumps(
                {
                    tensor.name: {"multiple_of": tensor.dim, "outputs": cut}
                    for tensor, cut in zip(inputs, (cuts, []), strict=False)
                }
            )
        },
        requests=requests,
        answers=[answers],
    )
    return padded


def _rows(inputs: Sequence[Tensor], missing: Sequence[int]) -> list[Arrays]:
    """Return requests of random rows, each so much shorter than its input."""
    random = np.random.default_rng(SEED)
    return [
        {
            tensor.name: random.standard_normal((1, tensor.dim - short), np.float32)
            for tensor in inputs
        }
        for short in missing
    ]


@torch.inference_mode()
def _answers(module: nn.Module, output: str, requests: Sequence[Arrays]) -> list[Arrays]:
    columns = [
        torch.from_numpy(np.concatenate([row[name] for row in requests])) for name in requests[0]
    ]
    return [{output: row.numpy()} for row in module(*columns).split(1)]


def _lstm() -> list[Case]:
    """Return an LSTM of 128 whose states are kept, and one that gets no states."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        module = Step().eval()
    width = module.cell.hidden_size
    requests = _rows([Tensor("x", width)], [0] * MOST)
    x = torch.from_numpy(np.concatenate([row["x"] for row in requests]))
    steps: list[list[Arrays]] = []
    state: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for _ in range(3):
            result = module(x, **state)
            state = {name: result[f"new_{name}"] for name in ("hidden", "cell")}
            steps.append([{"y": row.numpy()} for row in result["y"].split(1)])
    states = ", ".join(_STATE.format(name, width) for name in ("hidden", "cell"))
    oldest = f"oldest {{ max_candidate_sequences: {MOST} {_DELAY} }}"
    kept = f"max_sequence_idle_microseconds: 600000000 state [{states}]"

    def case(feature: str, answers: Sequence[Sequence[Arrays]], scheduler: str) -> Case:
        io = [Tensor("x", width)], [Tensor("y", width)]
        state = module.state_dict()
        return Case(LSTM, feature, *io, "Step", state, requests, answers, scheduler=scheduler)

    return [
        case(PLAIN, steps[:1], _BATCHES),
        case(SEQUENCE, steps, f"sequence_batching {{ {oldest} {kept} }}"),
    ]
