import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Kind
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, BindingError, LoadError, WarmupError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.binding import Argument, Passing, Signature, Takes
from torch_py_backend.startup import warmup


def engine(config: ModelConfig, forward: Callable[..., Any], **takes: Takes) -> Engine:
    """An engine without a file: forward() takes the config's inputs by name, mostly tensors."""
    arguments = [
        Argument(
            spec.name,
            not spec.optional,
            Passing.POSITIONAL,
            takes.get(spec.name, Takes.TENSOR),
            spec.name,
        )
        for spec in config.inputs
    ]
    surroundings = runtime.surround(config.options, torch.device("cpu"), [])
    loaded = Loaded(Kind.MODULE, forward, Signature(tuple(arguments)))
    return Engine(config, loaded, surroundings, build.artifact())


def batches(config: ModelConfig) -> list[Item]:
    return list(warmup.batches(engine(config, lambda x: x)))


def shapes(config: ModelConfig) -> list[list[int]]:
    return [list(item["x"].shape) for item in batches(config)]


def test_a_model_that_takes_a_number() -> None:
    """Made-up values are one for all rows, where the model takes one."""
    config = build.config(inputs=(build.spec("x"), build.spec("scale", dims=(1,))))
    made = engine(config, lambda x, scale: x * scale, scale=Takes.FLOAT)

    warmup.run(made)

    assert made.counts.rows


def test_a_long_warm_up_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says when it begins, and now and then how far it is."""
    caplog.set_level("INFO", "torch_py_backend")
    clock = iter([0.0, 4.0, 11.0, 20.9, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    items: list[Item] = [{"x": torch.zeros(rows, 4)} for rows in (4, 3, 2, 1)]

    assert list(warmup._reported("digits", iter(items))) == items

    assert [record.getMessage() for record in caplog.records] == [
        "model 'digits': 1 batches of the warm-up took 11 s; the next one is x [3, 4].",
        "model 'digits': 3 batches of the warm-up took 21 s; the next one is x [1, 4].",
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("dynamo")
def test_the_begin_of_a_warm_up_is_reported(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the only line for minutes, where torch.compile has one graph to make."""
    caplog.set_level("INFO", "torch_py_backend")
    parameters = {"backend": "eager"} if compiled else None
    config = build.config(torch_compile_optional_parameters=parameters)

    warmup.run(engine(config, lambda x: x))

    (line, *_) = [record.getMessage() for record in caplog.records]
    more = "; torch.compile may take minutes" if compiled else ""
    assert line == f"model 'digits': the warm-up begins{more}."


@pytest.mark.parametrize("writes", [True, False])
def test_models_that_write_into_their_inputs_are_noticed(writes: bool) -> None:
    """A model that computes in its inputs must not be given them a second time."""
    made = engine(build.config(), lambda x: x.add_(1) if writes else x + 1)

    warmup.run(made)

    assert made.purity.writes_inputs() == writes


def test_what_the_warm_up_reports_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A failure is told to the log, with its traceback, and to nobody later."""

    def forward(x: Tensor) -> Tensor:
        raise ValueError("no")

    made = engine(build.config(), forward)
    with pytest.raises(WarmupError):
        warmup.run(made)

    assert "Traceback" in caplog.text
    assert not made.recovery.reports


@pytest.fixture(autouse=True)
def restored(dynamo: None) -> None:
    """Compiled models change torch's limits."""


@pytest.mark.parametrize(
    ("rows", "dims", "expected"),
    [
        pytest.param(0, (4,), [[4]], id="no batches"),
        pytest.param(0, (), [[]], id="no batches, no dimension"),
        pytest.param(1, (4,), [[1, 4]], id="one row"),
        pytest.param(2, (4,), [[2, 4], [1, 4]], id="two rows"),
        pytest.param(8, (3, 4), [[8, 3, 4], [7, 3, 4], [1, 3, 4]], id="eight rows"),
        pytest.param(8, (), [[8], [7], [1]], id="rows alone"),
        pytest.param(0, (-1, 3), [[8, 3], [6, 3]], id="no batches, variable"),
        pytest.param(
            4,
            (-1, 3),
            [[4, 8, 3], [4, 6, 3], [3, 8, 3], [3, 6, 3], [1, 8, 3], [1, 6, 3]],
            id="variable",
        ),
    ],
)
def test_samples_cover_the_batches_that_will_come(
    rows: int, dims: tuple[int, ...], expected: list[list[int]]
) -> None:
    """The largest batch, the next and one row are tried, with two sizes where size varies."""
    config = build.config(max_batch_size=rows, inputs=(build.spec("x", dims=dims),))

    assert shapes(config) == expected


@pytest.mark.parametrize(
    ("parameters", "counts"),
    [
        pytest.param({"dynamic": False}, [5, 4, 2, 1], id="static"),
        pytest.param({"dynamic": False, "disable": True}, [5, 4, 1], id="static, disabled"),
        pytest.param({"dynamic": True}, [5, 4, 3, 2, 1], id="dynamic"),
        pytest.param({}, [5, 4, 3, 2, 1], id="automatic"),
    ],
)
def test_every_row_count_is_tried_where_each_has_a_graph(
    parameters: dict[str, Any], counts: list[int]
) -> None:
    """A compiled model meets every batch size that it will have before READY."""
    config = build.config(max_batch_size=5, torch_compile_optional_parameters=parameters)

    assert [rows for rows, _ in shapes(config)] == counts


@pytest.mark.parametrize(
    ("dynamic", "rows", "counts"),
    [
        pytest.param(False, 40, list(range(40, 0, -1)), id="static"),
        pytest.param(None, 100, [100, 64, *range(32, 0, -1)], id="automatic"),
    ],
)
def test_row_counts_without_buckets(dynamic: bool | None, rows: int, counts: list[int]) -> None:
    """Without buckets each static graph is made; of one for all, the guards are tried."""
    config = build.config(
        max_batch_size=rows,
        batch_buckets=(),
        torch_compile_optional_parameters={"dynamic": dynamic},
    )

    assert [rows for rows, _ in shapes(config)] == counts


def test_buckets_are_the_only_row_counts() -> None:
    """A model with buckets is tried with those and no others."""
    config = build.config(max_batch_size=8, batch_buckets=(2, 8))

    assert [rows for rows, _ in shapes(config)] == [8, 2]


def test_examples_beside_the_model_are_what_it_is_tried_with(tmp_path: Path) -> None:
    """Valid values are taken from the example; what does not fit its input is told and made up."""
    example = {"x": torch.arange(8.0).reshape(2, 4), "n": torch.zeros(1, 3)}
    (tmp_path / "1").mkdir()
    safetensors.torch.save_file(example, tmp_path / "1" / "example_inputs.safetensors")
    config = build.config(tmp_path, max_batch_size=3, inputs=(build.spec("x"), build.spec("n")))

    found = batches(config)

    assert [item["x"].tolist() for item in found[2:]] == [[[0.0, 1.0, 2.0, 3.0]]]
    assert found[0]["x"].shape == found[0]["n"].shape == (3, 4)


def test_every_pattern_of_optional_inputs_is_tried() -> None:
    """What requests may leave out, alone or together, is left out before READY."""
    optional = [dataclasses.replace(build.spec(name), optional=True) for name in ("m", "n")]
    config = build.config(max_batch_size=1, inputs=(build.spec("x"), *optional))

    assert [sorted(item) for item in batches(config)] == [
        ["m", "n", "x"],
        ["n", "x"],
        ["m", "x"],
        ["x"],
    ]


def test_inputs_of_a_sample_have_one_row_count() -> None:
    """All inputs of a sample agree in rows, and a fixed input is not stretched by another."""
    config = build.config(
        max_batch_size=3,
        inputs=(build.spec("x", dims=(-1,)), build.spec("n", "INT64", (1,))),
    )

    found = [(list(item["x"].shape), list(item["n"].shape)) for item in batches(config)]

    assert found[:3] == [([3, 8], [3, 1]), ([3, 6], [3, 1]), ([2, 8], [2, 1])]


def test_optional_inputs_are_there_and_left_out() -> None:
    """Each kind of batch is tried with the optional inputs and without them."""
    optional = dataclasses.replace(build.spec("n"), optional=True)
    config = build.config(max_batch_size=2, inputs=(build.spec("x"), optional))

    found = [(len(item["x"]), "n" in item) for item in batches(config)]

    assert found == [(2, True), (2, False), (1, True), (1, False)]


def test_optional_inputs_are_left_out_of_calls() -> None:
    """forward() is called without an optional input before READY, too."""
    seen = []

    def forward(x: Tensor, n: Tensor | None = None) -> Tensor:
        seen.append(n is None)
        return x

    optional = dataclasses.replace(build.spec("n"), optional=True)
    warmup.run(engine(build.config(max_batch_size=1, inputs=(build.spec("x"), optional)), forward))

    assert seen == [False] * 3 + [True] * 3


def test_each_sample_is_run_until_torchscript_has_optimised() -> None:
    """Every kind of batch is called three times, the largest first."""
    rows = []

    def forward(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x

    warmup.run(engine(build.config(max_batch_size=4), forward))

    assert rows == [4, 4, 4, 3, 3, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        pytest.param(
            lambda x: x @ torch.ones(3, 3),
            "forward() raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            id="forward fails",
        ),
        pytest.param(lambda x: x.double(), "output 'y' is float64 [8, 4]", id="wrong type"),
        pytest.param(lambda x: x[:, :2], "output 'y' is float32 [8, 2]", id="wrong shape"),
        pytest.param(lambda x: x[:1], "output 'y' has 1 rows for a batch of 8", id="wrong rows"),
        pytest.param(lambda x: None, "output 'y' is a NoneType", id="nothing returned"),
    ],
)
def test_model_that_fails_its_warm_up_fails_the_load(
    forward: Callable[..., Any], said: str
) -> None:
    """A model that cannot serve its own config is refused before READY, with what was tried."""
    with pytest.raises(WarmupError) as raised:
        warmup.run(engine(build.config(), forward))

    text = str(raised.value)
    assert isinstance(raised.value, LoadError)
    assert text.startswith("model 'digits': the warm-up with x [8, 4] failed: ")
    assert said in text
    assert 'set the parameter WARMUP to "false"' in text


def test_failure_names_all_inputs() -> None:
    """A refusal shows the shape of every input that was tried."""
    config = build.config(inputs=(build.spec("x"), build.spec("n", "INT64", (1,))))

    with pytest.raises(WarmupError, match=r"the warm-up with x \[8, 4\], n \[8, 1\] failed"):
        warmup.run(engine(config, lambda x, n: x.missing))


def test_failure_of_a_smaller_batch_is_noticed() -> None:
    """A model that only takes full batches is found out before READY."""

    def forward(x: Tensor) -> Tensor:
        return x.reshape(8, 4)

    with pytest.raises(WarmupError, match=r"the warm-up with x \[7, 4\] failed"):
        warmup.run(engine(build.config(), forward))


def test_outputs_that_cannot_be_bound_keep_their_message() -> None:
    """A wrong output name is told as such, not as a failed warm-up."""
    config = build.config(outputs=(build.spec("mean"), build.spec("variance")))

    with pytest.raises(BindingError, match="the outputs mean, variance do not fit"):
        warmup.run(engine(config, lambda x: {"mean": x, "deviation": x}))


# --- samples that may fail -------------------------------------------------------------------


class Parser(nn.Module):
    """Takes texts that are numbers, which the made-up ones are not."""

    def forward(self, x: list[str]) -> Tensor:
        return torch.tensor([[float(text)] for text in x])


class Window(nn.Module):
    """Takes rows of at least 10 values, which made-up ones do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolution(x[:, None]).amax(-1)
        return y


class Once(nn.Module):
    """Counts its calls, and takes no second one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("once")
        return x[:, :1]


ROWS = build.config(outputs=(build.spec("y", dims=(1,)),))
TEXTS = dataclasses.replace(ROWS, inputs=(build.spec("x", "BYTES", (1,)),))
LENGTHS = dataclasses.replace(ROWS, inputs=(build.spec("x", dims=(-1,)),))


@pytest.mark.parametrize(
    ("model", "config", "takes", "said"),
    [
        pytest.param(Parser(), TEXTS, Takes.STRINGS, "could not convert string", id="texts"),
        pytest.param(Window(), LENGTHS, Takes.TENSOR, "Kernel size can't be greater", id="size"),
        pytest.param(Once(), ROWS, Takes.TENSOR, "RuntimeError: once", id="counter"),
    ],
)
def test_made_up_samples_may_fail_where_the_model_is_served(
    model: nn.Module,
    config: ModelConfig,
    takes: Takes,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning says what failed and how to give an example; requests are answered."""
    made = engine(config, model, x=takes)

    warmup.run(made, serving=True)

    (warning,) = (one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)
    assert "the warm-up with x [8," in warning
    assert said in warning
    assert "example_inputs.safetensors" in warning
    assert "It is served all the same" in warning
    assert "Traceback" in warning
    assert not made.recovery.reports
    value = np.array([[b"1"]], dtype=object) if takes is Takes.STRINGS else torch.ones(1, 12)
    (outcome,) = made.run([{"x": value}])
    assert not isinstance(outcome, BackendError)


def test_other_samples_are_run_all_the_same() -> None:
    """A row count that fails leaves no request of another one to pay for a first call."""
    rows = []

    def forward(x: Tensor) -> Tensor:
        rows.append(len(x))
        if len(x) == 8:
            raise ValueError("too many")
        return x

    made = engine(build.config(), forward)
    warmup.run(made, serving=True)

    assert rows == [8, 7, 7, 7, 1, 1, 1]
    assert not made.purity.writes_inputs()


@pytest.mark.parametrize(
    ("options", "forward"),
    [
        pytest.param({"warmup": True}, lambda x: x.missing, id="asked for"),
        pytest.param(
            {"torch_compile_optional_parameters": {"backend": "eager"}, "compile_required": True},
            lambda x: x.missing,
            id="must be compiled",
        ),
        pytest.param(
            {"torch_compile_optional_parameters": {"backend": "eager", "fullgraph": True}},
            lambda x: x.missing,
            id="must be one graph",
        ),
        pytest.param({"optimize": ("cuda_graphs",)}, lambda x: x.missing, id="captured"),
        pytest.param(
            {"kind": "GPU", "enable_weight_sharing": True}, lambda x: x.missing, id="shared"
        ),
        pytest.param({}, lambda x: x[:, :2], id="contradicts the config"),
        pytest.param({}, lambda x: x[:1], id="other rows"),
    ],
)
def test_failures_that_keep_a_model_from_being_served(
    options: dict[str, Any], forward: Callable[..., Any]
) -> None:
    """What was asked for, what depends on the warm-up, and what no values excuse."""
    with pytest.raises(WarmupError, match=r"the warm-up with x \[8, 4\] failed"):
        warmup.run(engine(build.config(**options), forward), serving=True)


def test_a_handler_that_compiles_its_model_needs_its_warm_up() -> None:
    """What TorchServe's handlers compile is not sealed, so it would be compiled for requests."""
    parameters = {"backend": "eager"}
    made = engine(build.config(torch_compile_optional_parameters=parameters), lambda x: x.missing)
    made.kind = Kind.TORCHSERVE

    with pytest.raises(WarmupError):
        warmup.run(made, serving=True)


def test_an_example_that_fails_keeps_a_model_from_being_served(tmp_path: Path) -> None:
    """Values that somebody wrote are meant to work."""
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "example_inputs.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1, 4)}, path)

    with pytest.raises(WarmupError):
        warmup.run(engine(build.config(tmp_path), lambda x: x.missing), serving=True)


def test_nothing_is_compiled_after_samples_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model whose sample failed behind its first graph goes on eagerly there, and is run once."""
    calls = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            calls.append(len(x))
            if bool(y.sum() < 100):
                raise ValueError("too small")
            return y

    settings = build.config(torch_compile_optional_parameters={"backend": "aot_eager"})
    made = engine(settings, Net())
    warmup.run(made, serving=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    calls.clear()

    (outcome,) = made.run([{"x": torch.full((2, 4), 100.0)}])

    assert isinstance(outcome, dict)
    assert torch.equal(torch.as_tensor(outcome["y"]), torch.full((2, 4), 101.0))
    assert calls == [2]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert "what needs another graph runs eagerly" in caplog.text
