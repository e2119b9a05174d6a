"""One copy of the weights on a GPU for many processes, with a CPU twin of the GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import build
import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch
import twin
from children import Start
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, ConfigError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection
from torch_py_backend.startup import builder, warmup
from torch_py_backend.weights import gpu_sharing
from torch_py_backend.weights.cuda_ipc import NotShared
from torch_py_backend.weights.gpu_sharing import SharedWeights, named
from torch_py_backend.weights.owner_election import Sharer

# A complete instance on the twin of a GPU: for each line it prints the output for ones.
_INSTANCE = """
import os, sys, time
from pathlib import Path
import build, numpy, twin, torch
from torch_py_backend.startup import builder
from torch_py_backend.weights import gpu_sharing
from torch_py_backend.loading import registry
from torch_py_backend.weights import owner_election
from torch_py_backend.startup import warmup
from torch_py_backend.config.threads import Threads

def die(*_):
    os.kill(os.getpid(), 9)
    time.sleep(60)

owner_election._TIMEOUT_S = 60.0
gpu_sharing.CudaMemory = lambda device: twin.Twin()
gpu_sharing.requested = lambda config: True
exec("".join(sys.argv[3:]))
outputs = (build.spec("y", dims=(3,)),)
config = build.config(Path(sys.argv[1]), instance=sys.argv[2], outputs=outputs)
engine = builder.build(config, Threads(1, 1))
warmup.run(engine)
print("ready", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        if line == "leave\\n":
            engine.close()
            print("left", flush=True)
            continue
        (outcome,) = engine.run([{"x": numpy.ones((1, 4), numpy.float32)}])
        print(outcome["y"].tolist() if isinstance(outcome, dict) else outcome.code, flush=True)
"""

Join: TypeAlias = "Callable[..., SharedWeights]"


def _forward(x: Tensor) -> Tensor:
    return x


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin in place of a GPU, and a temporary folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_sharing, "CudaMemory", lambda device: twin.Twin())
    monkeypatch.setattr(gpu_sharing, "requested", lambda config: True)


@pytest.fixture
def join(gpu: None, tmp_path: Path) -> Iterator[Join]:
    """Instances in this process that share the weights of a module; the first one owns them."""
    joined: list[SharedWeights] = []

    def join(
        module: nn.Module | None, reload: Callable[[], nn.Module | None] = lambda: None
    ) -> SharedWeights:
        settings = build.config(tmp_path, instance=f"digits_0_{len(joined)}")
        artifact = Artifact(ArtifactType.MODULE, tmp_path / "model.py")
        shared = SharedWeights(settings, artifact, torch.device("cpu"), reload)
        joined.append(shared)
        shared.share(Loaded(artifact, _forward, introspection.from_function(_forward), module))
        return shared

    yield join
    for shared in reversed(joined):
        shared.close()
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))


def _lay_out(folder: Path) -> str:
    """Write a model into a folder, and return its answer to ones."""
    affine = scenarios.affine()
    (folder / "1").mkdir()
    scenarios.python(models.Affine)(folder / "1")
    scenarios.safe(affine.state_dict())(folder / "1")
    return str(affine(torch.ones(1, 4)).tolist())


# --- instances that are processes ------------------------------------------------------------


def test_a_life_of_three_instances(start: Start, tmp_path: Path) -> None:
    """Sharers map the owner's memory, and elect another owner when it closes or is killed.

    No batch is wrong. Closing leaves no file, no memory and no process.
    """
    expected = _lay_out(tmp_path)
    owner = start(_INSTANCE, tmp_path, "a")
    assert owner.hear() == "ready"
    sharers = [start(_INSTANCE, tmp_path, name) for name in "bc"]
    assert [sharer.hear() for sharer in sharers] == ["ready", "ready"]
    assert [bool(twin.mapped(child.pid)) for child in (owner, *sharers)] == [False, True, True]
    assert [child.ask() for child in (owner, *sharers)] == [expected] * 3
    assert owner.ask("leave") == "left"
    assert [twin.mapped(sharer.pid) for sharer in sharers] == [0, 0]
    assert [sharer.ask() for sharer in sharers] == [expected] * 2
    # One of them owns the weights now.
    killed, last = sorted(sharers, key=lambda sharer: twin.mapped(sharer.pid))
    assert [bool(twin.mapped(child.pid)) for child in (killed, last)] == [False, True]
    killed.kill()
    answers = [last.ask() for _ in range(3)]
    assert set(answers) <= {expected, "UNAVAILABLE"}
    assert answers[-1] == expected
    assert last.ask("leave") == "left"
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))
    assert [owner.end(), last.end()] == [0, 0]


def test_owners_killed_at_start(start: Start, gpu: None, tmp_path: Path) -> None:
    """An instance starts wherever others die, and the next server removes what they left.

    See test_owner_election, too.
    """
    expected = _lay_out(tmp_path)
    killed = [start(_INSTANCE, tmp_path, "a", "registry.load = die")]
    while not list(tmp_path.glob("*/servers/*/weights-*/owner.lock")):
        pass
    killed.append(start(_INSTANCE, tmp_path, "b", "warmup.run = die"))
    assert [child.process.wait() for child in killed] == [-9, -9]
    last = start(_INSTANCE, tmp_path, "c")
    assert last.hear() == "ready"
    assert [last.ask() for _ in range(3)][-1] == expected
    last.kill()
    for child in (*killed, last):
        assert not any(Path("/dev/shm").glob(f"torch_{child.pid}_*"))
    _engine(tmp_path).close()
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))


# --- engines of this process -----------------------------------------------------------------


def _engine(folder: Path, name: str = "x", **overrides: Any) -> Engine:
    outputs = (build.spec("y", dims=(3,)),)
    settings = build.config(folder, instance=name, outputs=outputs, **overrides)
    return builder.build(settings, Threads(1, torch.get_num_interop_threads()))


def _answer(engine: Engine) -> str:
    with torch.inference_mode():
        (outcome,) = engine.run([{"x": np.ones((1, 4), np.float32)}])
    return outcome.code if isinstance(outcome, BackendError) else str(outcome["y"].tolist())


@pytest.fixture
def pair(gpu: None, process: None, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    _lay_out(tmp_path)
    owner, sharer = _engine(tmp_path, "owner"), _engine(tmp_path, "sharer")
    yield owner, sharer
    sharer.close()
    owner.close()


def test_lost_during_a_batch(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch during which the owner dies is answered with 503 for each item."""
    owner, sharer = pair
    expected = _answer(sharer)
    monkeypatch.setattr(Sharer, "alive", lambda self: False)
    items: list[Item] = [{"x": np.ones((1, 4), np.float32)}] * 3
    outcomes = sharer.run(items)
    assert [getattr(outcome, "code", None) for outcome in outcomes] == ["UNAVAILABLE"] * 3
    assert "Send it again" in str(outcomes[0])
    assert [getattr(outcome, "reported", False) for outcome in outcomes] == [True] * 3
    assert sharer.recovery.fatal is None
    monkeypatch.undo()
    assert _answer(sharer) == _answer(owner) == expected


def test_lost_during_the_warm_up(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of the warm-up are run again."""
    _, sharer = pair
    alive = iter([True, False, True, True])
    monkeypatch.setattr(Sharer, "alive", lambda self: next(alive, True))
    warmup.run(sharer)
    assert next(alive, None) is None


def test_lost_by_a_model_with_graphs(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance whose CUDA graphs contain the addresses answers 503 from then on."""
    _, sharer = pair
    assert sharer._shared is not None
    sharer._shared.final = True
    monkeypatch.setattr(Sharer, "alive", lambda self: False)
    assert _answer(sharer) == "UNAVAILABLE"
    assert sharer.recovery.fatal is not None
    monkeypatch.undo()
    assert _answer(sharer) == "UNAVAILABLE"


def test_missing_files(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Requests get 503 while the weights cannot be loaded again."""
    owner, sharer = pair
    expected = _answer(sharer)
    owner.close()
    (tmp_path / "1" / "model.safetensors").rename(tmp_path / "away")
    assert [_answer(sharer), _answer(sharer)] == ["UNAVAILABLE", "UNAVAILABLE"]
    (tmp_path / "away").rename(tmp_path / "1" / "model.safetensors")
    assert _answer(sharer) == expected


def test_closed_instance(pair: tuple[Engine, Engine]) -> None:
    """A closed instance does not compute, and loads nothing."""
    for engine in pair[::-1]:
        engine.close()
        engine.close()
    assert _answer(pair[1]) == "UNAVAILABLE"


def test_a_load_that_fails(gpu: None, process: None, tmp_path: Path) -> None:
    """An owner that cannot load leaves nothing."""
    _lay_out(tmp_path)
    (tmp_path / "1" / "model.safetensors").write_bytes(b"broken")
    for _ in range(2):
        with pytest.raises(BackendError, match="not valid safetensors"):
            _engine(tmp_path)
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))


class Counting(nn.Module):
    """Writes to a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x[:, :3] + self.count


def test_a_model_that_writes(gpu: None, process: None, tmp_path: Path) -> None:
    """A model that writes to its weights is refused: the others would read the values."""
    (tmp_path / "1").mkdir()
    scenarios.python(Counting)(tmp_path / "1")
    scenarios.safe({"count": torch.zeros(3)})(tmp_path / "1")
    engine = _engine(tmp_path)
    with pytest.raises(ConfigError, match="writes to its buffers"):
        warmup.run(engine)
    engine.close()


def test_finalize(gpu: None, process: None, tmp_path: Path) -> None:
    """finalize() closes the shared weights."""
    scenario = scenarios.Scenario(
        "affine",
        scenarios.both(
            scenarios.python(models.Affine), scenarios.safe(scenarios.affine().state_dict())
        ),
        scenarios.config({"x": [4]}, {"y": [3]}),
    )
    model = TritonPythonModel()
    model.initialize(fake_triton.arguments(scenario.lay_out(tmp_path)))
    assert any(tmp_path.glob("torch-py-backend-*/servers/*"))
    model.finalize()
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))


# --- modules ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """One tensor under several names, as parameter and as buffer, and one that is no weight."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("buffer", torch.rand(2))
        self.register_buffer("alias", self.buffer, persistent=False)
        self.also = [self.first.weight]


class Odd(nn.Module):
    """Rare dtypes, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        matrix = torch.rand(4, 6)
        self.part = nn.Parameter(matrix[1:3, 2:])
        self.turned = nn.Parameter(torch.rand(2, 3).T)
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("wide", torch.rand(1).expand(5))
        self.register_buffer("short", torch.rand(3).to(torch.bfloat16))


_MODULES: list[Callable[[], nn.Module]] = [
    scenarios.affine,
    Tied,
    Odd,
    lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    ),
    lambda: torch.jit.script(scenarios.affine()),
    lambda: torch.export.export(scenarios.affine(), (torch.ones(2, 4),)).module(),
]


@pytest.mark.parametrize("make", _MODULES)
def test_mapped_tensors(make: Callable[[], nn.Module], join: Join) -> None:
    """Mapped tensors have the owner's values and strides, also after a second mapping."""
    original, mapped, reloaded = make(), make(), make()
    owner = join(original)
    sharer = join(mapped, reload=lambda: reloaded)
    before = dict(named(mapped))
    _same(named(original), named(mapped))
    owner.close()
    assert {tensor.numel() for tensor in named(mapped).values()} == {0}
    with sharer.lock:
        assert sharer.ready() is None
    _same(named(reloaded), named(mapped))
    assert before.keys() == named(mapped).keys()
    assert all(before[name] is tensor for name, tensor in named(mapped).items())


def _same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
        assert actual[name].stride() == tensor.stride(), name
        assert actual[name].dtype == tensor.dtype, name


def test_memory_is_one(join: Join) -> None:
    """Two sharers have the same memory; tied weights stay one tensor, wherever they are held."""
    join(Tied())
    first, second = Tied(), Tied()
    join(first)
    join(second)
    assert first.first.weight is first.second.weight is first.also[0]
    assert first.buffer is first.alias
    with torch.no_grad():
        first.buffer.fill_(7)
    assert second.buffer.tolist() == [7.0, 7.0]


def _untied() -> nn.Module:
    module = Tied()
    module.second.weight = nn.Parameter(module.first.weight.clone())
    return module


@pytest.mark.parametrize(
    ("original", "other", "names"),
    [
        (scenarios.affine, lambda: models.Affine(out=5), "linear.bias, linear.weight, offset"),
        (scenarios.affine, lambda: scenarios.affine().double(), "linear.bias, linear.weight, off"),
        (scenarios.affine, lambda: nn.Linear(4, 3), "bias, linear.bias, linear.weight, offset"),
        (Tied, _untied, "second.weight"),
    ],
    ids=["sizes", "dtypes", "names", "untied"],
)
def test_other_modules_are_refused(
    original: Callable[[], nn.Module], other: Callable[[], nn.Module], names: str, join: Join
) -> None:
    """A module that differs from the owner's is refused with the differing names."""
    join(original())
    with pytest.raises(ConfigError, match=f"disagree about {names}"):
        join(other())


@pytest.mark.parametrize("module", [None, nn.ReLU()])
def test_nothing_to_share(module: nn.Module | None, join: Join) -> None:
    """A model without weights cannot share them."""
    with pytest.raises(ConfigError, match="the model exposes none"):
        join(module)


def test_error_of_the_driver(join: Join) -> None:
    """An error of the driver is the reason of the refusal."""
    error = NotShared("cuIpcGetMemHandle says CUDA_ERROR_NOT_SUPPORTED")
    with (
        mock.patch.object(twin.Twin, "export", side_effect=error),
        pytest.raises(ConfigError, match="NOT_SUPPORTED"),
    ):
        join(scenarios.affine())


def test_owner_dies_while_it_is_mapped(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the owner dies during the mapping, the election is repeated."""
    owner = join(scenarios.affine())
    open_ = twin.Twin.open

    def gone(self: twin.Twin, block: str) -> Tensor:
        monkeypatch.setattr(twin.Twin, "open", open_)
        monkeypatch.setattr(Sharer, "alive", lambda self: False)
        owner.close()
        raise NotShared("gone")

    monkeypatch.setattr(twin.Twin, "open", gone)
    other = scenarios.affine()
    expected = {name: tensor.clone() for name, tensor in named(other).items()}
    shared = join(other)
    assert shared.owns
    _same(expected, named(other))


# --- what can be shared ----------------------------------------------------------------------


def test_refused_packages(gpu: None, tmp_path: Path) -> None:
    """A package is refused: it contains its weights."""
    artifact = Artifact(ArtifactType.AOTI, tmp_path / "model.pt2")
    shared = SharedWeights(build.config(tmp_path), artifact, torch.device("cpu"), lambda: None)
    with pytest.raises(ConfigError, match="the AOTInductor package contains them"):
        shared.share(Loaded(artifact, _forward, introspection.from_function(_forward)))
    shared.close()


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        (ArtifactType.MODULE, {"kind": "MODEL"}, "places itself"),
        (ArtifactType.TORCHSCRIPT, {"optimize": ("freeze",)}, "freezing makes them"),
    ],
)
def test_refusals(
    kind: ArtifactType, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Weights that cannot be shared are refused with a reason."""
    settings = build.config(tmp_path, **({"kind": "GPU"} | overrides))
    with pytest.raises(ConfigError, match=reason):
        SharedWeights(settings, Artifact(kind, tmp_path), torch.device("cpu"), lambda: None)


def test_requested() -> None:
    """Weights on a GPU are shared on request only; those on a CPU are shared by mapped files."""
    cases = [("GPU", True, True), ("GPU", None, False), ("MODEL", True, True), ("CPU", True, False)]
    for kind, option, expected in cases:
        settings = build.config(kind=kind, enable_weight_sharing=option)
        assert gpu_sharing.requested(settings) is expected


def _rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "overrides", "device", "same"),
    [
        (None, {"instance": "other", "max_batch_size": 99}, "GPU-1", True),
        (None, {}, "GPU-2", False),
        (None, {"model_kwargs": {"width": 5}}, "GPU-1", False),
        (None, {"optimize": ("channels_last",)}, "GPU-1", False),
        (_rewrite, {}, "GPU-1", False),
        (_replace, {}, "GPU-1", False),
    ],
    ids=["same file", "device", "arguments", "format", "written", "replaced"],
)
def test_keys(
    change: Callable[[Path], None] | None,
    overrides: dict[str, Any],
    device: str,
    same: bool,
    tmp_path: Path,
) -> None:
    """Instances with the same files, also behind links, and tensor options on one device share."""
    path, weights = (build.write(tmp_path, name, "x = 1") for name in ("model.py", "model.pt"))
    link = tmp_path / "link.pt"
    link.symlink_to(weights)
    artifact, linked = (Artifact(ArtifactType.MODULE, path, file) for file in (weights, link))
    before = gpu_sharing.key(build.config(tmp_path), artifact, "GPU-1")
    if change is not None:
        change(weights)
    after = gpu_sharing.key(build.config(tmp_path, **overrides), linked, device)
    assert (before == after) is same
