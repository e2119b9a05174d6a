"""The warm-up: what a model is called with, what its failures mean, rows that depend on others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import build
import numpy as np
import pytest
import safetensors.torch
import torch
from models import double
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import runtime, warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ConfigError, ForwardError, LoadError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.arguments import Argument, Signature
from torch_py_backend.values import Item, Outcome

pytestmark = pytest.mark.usefixtures("dynamo")


def engine(
    config: ModelConfig, forward: Callable[..., Any], *, torchscript: bool = False
) -> Engine:
    """Return an engine; forward() takes the config's inputs."""
    arguments = tuple(Argument(spec.name, not spec.optional) for spec in config.inputs)
    loaded = Loaded(build.artifact(), forward, Signature(arguments, torchscript=torchscript))
    return Engine(config, loaded, torch.device("cpu"))


def batches(config: ModelConfig) -> list[Item]:
    model = engine(config, lambda x: x)
    return [item for item, _ in warmup.batches(model)]


def test_a_request_has_notes_on_large_values() -> None:
    config = build.config(inputs=(build.spec("x", "BYTES", (1,)),))
    model = engine(config, lambda x: x)
    large = bytes(20_000)
    for content, shown in ((large, "20000 bytes"), (b"\xff", {"base64": "/w=="}), (b"a", "a")):
        model.example = {"x": np.array([[content]], dtype=object)}
        assert [entry["data"] for entry in warmup.request(model)] == [[shown]]


@pytest.mark.parametrize(
    ("rows", "dims", "expected"),
    [
        (0, (), [[]]),
        (1, (4,), [[1, 4]]),
        (2, (4,), [[2, 4], [1, 4]]),
        (8, (), [[8], [2], [1]]),
        (0, (-1, 3), [[8, 3], [6, 3]]),
        (4, (-1,), [[4, 8], [4, 6], [2, 8], [2, 6], [1, 8], [1, 6]]),
    ],
)
def test_row_counts_and_sizes(rows: int, dims: tuple[int, ...], expected: list[list[int]]) -> None:
    config = build.config(max_batch_size=rows, inputs=(build.spec("x", dims=dims),))
    assert [list(item["x"].shape) for item in batches(config)] == expected


def guarded(x: Tensor) -> Tensor:
    y = x + 1 if x.shape[0] % 2 == 0 else x * 2
    return y * 3 if x.shape[0] > 16 else y


def divided(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 3 if y.shape[0] == 3 else y


@pytest.mark.parametrize(
    ("forward", "parameters", "rows", "buckets", "called", "eager"),
    [
        (double, {}, 10, None, [10, 8, 4, 3, 2, 1], 0),
        (double, {}, 1, None, [1], 0),
        (double, {"dynamic": False}, 5, None, [5, 4, 2, 1], 0),
        (double, {"dynamic": False}, 5, (), [5, 4, 3, 2, 1], 0),
        (double, {"disable": True}, 5, None, [5, 2, 1], 0),
        # Its graphs for odd numbers above 16 are missing.
        (guarded, {}, 32, None, [32, 16, 8, 4, 3, 2, 1], 8),
        (divided, {}, 18, None, [18, 16, 8, 4, 3, 2, 1], 0),
    ],
    ids=["one graph", "one row", "static buckets", "static", "disabled", "guards", "graph break"],
)
def test_a_compiled_model_is_called_with_rows_that_may_need_a_graph(
    forward: Callable[[Tensor], Tensor],
    parameters: dict[str, Any],
    rows: int,
    buckets: Any,
    called: list[int],
    eager: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {"backend": "eager", **parameters}
    config = build.config(
        max_batch_size=rows, batch_buckets=buckets, torch_compile_optional_parameters=parameters
    )
    model = engine(config, forward)
    assert [len(item["x"]) for item, _ in warmup.batches(model)] == called
    with runtime.mode(config.options):
        warmup.run(model)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for count in range(1, rows + 1):
            (outcome,) = model.run([{"x": torch.ones(count, 4)}])
            assert isinstance(outcome, dict)
            assert torch.equal(torch.as_tensor(outcome["y"]), forward(torch.ones(count, 4)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model.counts.compiled_graphs == (0 if "disable" in parameters else graphs)
    assert model.counts.eager_calls == eager
    assert caplog.text.count("[[17, 4]] were not met in the warm-up") == (eager > 0)
    assert caplog.text.count("were not met in the warm-up") == (eager > 0)


def _write_example(folder: Path, **tensors: Tensor) -> None:
    safetensors.torch.save_file(tensors, build.write(folder, "example_inputs.safetensors", ""))


def test_samples_use_the_example_where_it_fits_the_config(tmp_path: Path) -> None:
    _write_example(tmp_path, x=torch.arange(8.0).reshape(2, 4), n=torch.zeros(1, 3))
    config = build.config(tmp_path, max_batch_size=3, inputs=(build.spec("x"), build.spec("n")))
    items = batches(config)
    assert [item["x"].tolist() for item in items[2:]] == [[[0.0, 1.0, 2.0, 3.0]]]
    assert items[0]["x"].shape == items[0]["n"].shape == (3, 4)


def test_samples_have_all_optional_inputs_or_none() -> None:
    optional = [dataclasses.replace(build.spec(name), optional=True) for name in ("m", "n")]
    config = build.config(max_batch_size=1, inputs=(build.spec("x"), *optional))
    assert [sorted(item) for item in batches(config)] == [["m", "n", "x"], ["x"]]


@pytest.mark.parametrize("torchscript", [False, True])
def test_calls_with_each_sample(torchscript: bool) -> None:
    """One, or three, until TorchScript has optimized, with the same values; the largest first."""
    samples: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        samples.append(x.clone())
        return x.add_(1)  # it writes to its input

    warmup.run(engine(build.config(max_batch_size=4), forward, torchscript=torchscript))
    repeats = 3 if torchscript else 1
    assert [len(sample) for sample in samples] == [4] * repeats + [2] * repeats + [1] * repeats
    for place, sample in enumerate(samples):
        assert torch.equal(sample, samples[place // repeats * repeats])


@pytest.mark.parametrize(
    ("forward", "message", "of_values"),
    [
        (lambda x: x @ torch.ones(3, 3), "forward() raised RuntimeError: ", True),
        (lambda x: x.double(), "data_type: TYPE_FP64 dims: [ 4 ].", False),
    ],
)
def test_a_failed_warm_up_fails_the_load(
    forward: Callable[..., Any], message: str, of_values: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for serving in (False,) if of_values else (True, False):
        with pytest.raises(LoadError, match=r"^the warm-up with x \[8, 4\] failed: ") as raised:
            warmup.run(engine(build.config(), forward), serving=serving)
    assert message in str(raised.value)
    assert ('set the parameter WARMUP to "false"' in str(raised.value)) is of_values
    assert ("Traceback" in caplog.text) is of_values


@pytest.mark.parametrize(
    "options",
    [{"warmup": True}, {"kind": "GPU", "enable_weight_sharing": True}, {}],
    ids=["required", "shared", "example"],
)
def test_failures_that_fail_the_load_when_serving(options: dict[str, Any], tmp_path: Path) -> None:
    if not options:
        _write_example(tmp_path, x=torch.zeros(1, 4))
    model = engine(build.config(tmp_path, **options), mock.Mock(side_effect=ValueError("x")))
    with pytest.raises(LoadError, match=r"the warm-up with x \[8, 4\] failed"):
        warmup.run(model, serving=True)


@pytest.mark.parametrize(("size", "other"), [(96, 48), (5, 2), (3, 2), (2, 1)])
def test_a_model_may_not_take_other_sizes_than_its_example_s(
    size: int, other: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_example(tmp_path, x=torch.zeros(1, size))
    config = build.config(tmp_path, max_batch_size=1, inputs=(build.spec("x", dims=(-1,)),))
    warmup.run(engine(config, lambda x: x.reshape(1, size)[:, :1].expand(1, 4)))
    assert f"the warm-up with x [1, {other}] failed: " in caplog.text


def test_a_made_up_sample_that_fails_when_serving_is_one_warning_and_its_graphs_run_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is compiled after it: later calls run eagerly from its first graph on, once."""
    calls = []

    def forward(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        calls.append(len(x))
        if bool(y.sum() < 100):
            raise ValueError("too small")
        return y

    settings = build.config(torch_compile_optional_parameters={"backend": "eager"})
    model = engine(settings, forward)
    warmup.run(model, serving=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    calls.clear()
    (outcome,) = model.run([{"x": torch.full((2, 4), 100.0)}])
    assert isinstance(outcome, dict)
    assert torch.equal(torch.as_tensor(outcome["y"]), torch.full((2, 4), 101.0))
    assert calls == [2]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    (record,) = (
        record
        for record in caplog.records
        if record.name == warmup.log.name and record.levelno == logging.WARNING
    )
    cure, eager = "example_inputs", "run eagerly where a compiled graph is missing"
    for part in ("ValueError: too small", cure, "served anyway", eager, "Traceback"):
        assert part in record.getMessage()


def test_an_example_of_one_row_does_not_hide_a_dependence(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('backend: "pytorch_py"')
    _write_example(tmp_path, x=torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    with pytest.raises(ConfigError, match="for a row alone"):
        warmup.run(engine(build.config(tmp_path), lambda x: x - x.mean(0)))


_RNN = nn.GRU(4, 4)  # its first dimension is the time
_GAPS = 'backend: "pytorch_py"\n# max_batch_size: 8\nmax_batch_size: 0\n'
_WRITTEN = 'backend: "pytorch_py"\nmax_batch_size: 8\n'
_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "sum": lambda x: x.cumsum(0),
    "last": lambda x: x + x[-1:],
    "one value": lambda x: x[:, 0] - x[:, 0].mean(),
    "recurrent": lambda x: _RNN(x[:, None])[0][:, 0],
    "infinite": lambda x: x / (x.shape[0] > 1),
}
_INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x.softmax(-1),
    "random": lambda x: x + torch.rand(x.shape),
    "rounded": lambda x: x.bfloat16().sigmoid().float() + 1e-3 * x.shape[0],
    "integers": lambda x: (x > x.mean(0)).long(),
    "a mask, some of whose values jump": lambda x: (x + 1e-3 * x.shape[0] > 0.5).float(),
    "empty": lambda x: x[:, :0],
    "padded": lambda x: torch.nn.functional.pad(x, (0, x.shape[0])),
    "writes into its inputs": lambda x: x.add_(1),
    "refuses other sizes": lambda x: x if x.shape[0] > 1 else x[5],
}


def _call(forward: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return what computes the outputs of one item, as an engine does."""

    def call(items: Sequence[Item]) -> Sequence[Outcome]:
        try:
            with torch.no_grad():
                return [{"y": forward(torch.as_tensor(items[0]["x"]))}]
        except IndexError as error:
            return [ForwardError(error)]

    return call


@pytest.mark.parametrize("name", _DEPENDENT)
@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_that_depend_on_each_other(
    name: str, dynamic: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No load if auto-completion chose the batch; a warning for dynamic batching; else nothing."""
    (tmp_path / "config.pbtxt").write_text(_GAPS)
    config = build.config(tmp_path, dynamic_batching=dynamic)
    with pytest.raises(ConfigError, match=r"'y' for a row alone .* or max_batch_size: 8"):
        warmup.check_rows(config, _call(_DEPENDENT[name]), {}, 7)
    (tmp_path / "config.pbtxt").write_text(_WRITTEN)
    caplog.clear()
    warmup.check_rows(config, _call(_DEPENDENT[name]), {}, 7)
    assert ["Triton batches those of all clients" in text for text in caplog.messages] == (
        [True] if dynamic else []
    )


@pytest.mark.parametrize("name", _INDEPENDENT)
def test_rows_that_may_be_batched(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.pbtxt").write_text(_GAPS)
    config = build.config(tmp_path, inputs=(build.spec("x", dims=(1000,)),))
    warmup.check_rows(config, _call(_INDEPENDENT[name]), {}, 7)
    assert not caplog.messages
