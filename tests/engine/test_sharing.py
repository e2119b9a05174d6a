"""Weights of which processes share one copy: pages of files, or a GPU's memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import build
import engines
import models
import pytest
import scenarios
import torch
from scenarios import Writer
from sharers import Sharer
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import sharing, warmup
from torch_py_backend.engine.sharing import SharedWeights
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import discovery, registry, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.weights import Mapped
from torch_py_backend.signature import introspection


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x)
        return result


# With a buffer that no file has.
SOURCE = models.source(Net).replace(
    "nn.Conv2d(3, 8, 3)",
    "nn.Conv2d(3, 8, 3)\n        self.register_buffer('steps', torch.arange(5), persistent=False)",
)
NET = Net().eval()
STATE = NET.state_dict()
BYTES = sum(tensor.nbytes for tensor in STATE.values())


def _exported(folder: Path) -> None:
    program = torch.export.export(NET, (torch.ones(2, 3, 8, 8),))
    torch.export.save(program, folder / "model.pt2")


def measured(folder: Path, write: Writer, **options: Any) -> Mapped:
    (folder / "1").mkdir(exist_ok=True)
    if write not in (_SCRIPT, _exported):
        build.write(folder, "model.py", SOURCE)
    write(folder / "1")
    config: ModelConfig = build.config(folder, **options)
    artifact = discovery.find(config)
    loaded = registry.load(artifact, config, torch.device("cpu"))
    registry.optimize(config, loaded)
    return sharing.mapped(config, loaded)


_SAVED, _SCRIPT = scenarios.saved(STATE), scenarios.script(NET)
_LEGACY = scenarios.saved(STATE, _use_new_zipfile_serialization=False)
_HALF = scenarios.saved({key: tensor.half() for key, tensor in STATE.items()})


@pytest.mark.parametrize("write", [_SAVED, _SCRIPT, _exported])
def test_instances_share_the_weights_of_a_file(write: Writer, tmp_path: Path) -> None:
    """Unless ENABLE_WEIGHT_SHARING is false."""
    shared = measured(tmp_path, write, enable_weight_sharing=True)
    assert shared == (BYTES, BYTES)
    for kind in ("CPU", "GPU"):
        copied = measured(tmp_path, write, enable_weight_sharing=False, kind=kind)
        assert copied.shared == 0


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (_LEGACY, {}),
        (_HALF, {}),
        (_SAVED, {"optimize": ("channels_last",)}),
        (_SAVED, {"optimize": ("bf16",)}),
        (_SCRIPT, {"optimize": ("freeze",)}),
        (lambda folder: None, {"weights": "none"}),
    ],
    ids=["legacy", "converted", "channels_last", "16 bits", "frozen", "none"],
)
def test_weights_that_are_not_shared(
    write: Writer, options: dict[str, Any], tmp_path: Path
) -> None:
    """They are copied, which fails the load if sharing is required."""
    frozen = "freeze" in options.get("optimize", ())
    assert frozen or measured(tmp_path, write, **options).shared < BYTES
    for kind in ("CPU", "GPU") if frozen else ("CPU", "MODEL"):
        with pytest.raises(ConfigError, match="ENABLE_WEIGHT_SHARING is true, and the weights"):
            measured(tmp_path, write, enable_weight_sharing=True, kind=kind, **options)


# torch 2.13 no longer likes them; files that hold some are there all the same.
_QUANTISED = pytest.mark.filterwarnings(
    "ignore:.*quantize:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)
# torch 2.14 says that it checks each that it reads.
_SPARSE = pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")


def _odd() -> nn.Module:
    """A module with state that is not a plain tensor: a sparse, a quantized and an empty one."""
    module = nn.Linear(4, 4)
    module.register_buffer("nothing", torch.empty(0))
    module.register_buffer("sparse", torch.eye(4).to_sparse())
    module.register_buffer("small", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    return module


@_QUANTISED
@_SPARSE
def test_unusual_tensors(tmp_path: Path) -> None:
    """Tensors of a file that are not plain are copied, beside the shared ones, and not measured."""
    saved, module = _odd(), _odd()
    path = build.write(tmp_path, "model.pt", b"")
    torch.save(saved.state_dict(), path)
    artifact = Artifact(ArtifactType.MODULE, path.with_suffix(".py"), path)
    weights.load_into(build.config(tmp_path), artifact, module)
    assert torch.equal(module.get_parameter("weight"), saved.get_parameter("weight"))
    for name, tensor in saved.named_buffers():
        filled: Any = module.get_buffer(name)
        dense = filled.dequantize() if filled.is_quantized else filled.to_dense()
        assert torch.equal(dense, tensor.dequantize() if tensor.is_quantized else tensor.to_dense())
    size = sum(parameter.nbytes for parameter in module.parameters())
    loaded = Loaded(artifact, module, introspection.from_function(module.forward), module)
    assert sharing.mapped(build.config(tmp_path), loaded) == (size, size)


Join: TypeAlias = "Callable[[nn.Module | None], SharedWeights]"


def _begin(folder: Path, names: str) -> list[Sharer]:
    """Start instances together; return the owner of the weights first."""
    instances = [Sharer(folder, name) for name in names]
    roles = [instance.pipe.recv() for instance in instances]
    assert sorted(roles) == ["maps"] * (len(names) - 1) + ["owns"]
    return [instances.pop(roles.index("owns")), *instances]


def test_instances_have_one_copy(tmp_path: Path) -> None:
    """What the owner writes into the weights, the others read; without it they refuse requests.

    Triton loads a model again before it unloads it: that load has an owner of its own, while the
    instances of the first serve. An instance whose owner was killed before it came is one, too.
    """
    model = scenarios.affine()
    (tmp_path / "1").mkdir()
    for write in (scenarios.python(models.Affine), scenarios.safe(model.state_dict())):
        write(tmp_path / "1")
    expected = model(torch.ones(1, 4))
    first, (owner, sharer) = _begin(tmp_path, "ab"), _begin(tmp_path, "ab")
    assert owner.ask() == sharer.ask() == expected.tolist()
    for instance in first:
        assert instance.end() == 0
    assert owner.ask("double") == sharer.ask() == (2 * expected).tolist()
    owner.process.kill()
    owner.process.join()
    assert [sharer.ask(), sharer.ask()] == ["UNAVAILABLE"] * 2
    (third,) = _begin(tmp_path, "c")
    assert third.ask() == expected.tolist()
    assert sharer.end() == third.end() == 0


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Sharers in this process that share the weights of a module; the first one owns them.

    No offer stays in the temporary folder.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    joined: list[SharedWeights] = []

    def join(module: nn.Module | None) -> SharedWeights:
        settings = build.config(tmp_path, instance=f"digits_0_{len(joined)}")
        joined.append(SharedWeights(settings, torch.device("cpu")))
        joined[-1].share(module)
        return joined[-1]

    yield join
    for shared in joined:
        shared.close()
    torch.multiprocessing.set_sharing_strategy(strategy)
    assert not any(tmp_path.glob("torch-py-backend-*/servers/*"))


class Tied(nn.Module):
    """A parameter with two names, a buffer that is not saved, and an LSTM, which copies weights."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.lstm = nn.LSTM(4, 3)
        self.register_buffer("count", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lstm(self.second(self.first(x)))[0] + self.count
        return y


@pytest.mark.parametrize(
    "make",
    [
        Tied,
        lambda: torch.jit.script(nn.BatchNorm1d(4).eval()),
        lambda: torch.export.export(nn.BatchNorm1d(4).eval(), (torch.ones(2, 4),)).module(),
    ],
    ids=["module", "TorchScript", "exported"],
)
def test_values_of_the_owner(make: Callable[[], nn.Module], join: Join) -> None:
    owner, sharer = make(), make()
    assert join(owner).owns
    assert not join(sharer).owns
    x = torch.rand(2, 4)
    with torch.inference_mode():
        for weight in sharing.named(owner).values():
            weight.add_(1)
        assert torch.equal(sharer(x), owner(x))
    values = sharing.named(sharer)
    for name, weight in sharing.named(owner).items():
        assert torch.equal(values[name], weight)


def test_a_sharer_frees_the_memory_that_a_graph_was_loaded_into(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = mock.Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", freed)
    join(nn.Linear(4, 3))
    freed.assert_not_called()
    join(nn.Linear(4, 3))
    freed.assert_called_once_with()


class Unexported(torch.Tensor):
    """As memory of an allocator that does not export it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not supported")


def test_no_weights_or_memory_that_cannot_be_exported_is_the_reason_of_a_refusal(
    join: Join,
) -> None:
    with pytest.raises(ConfigError, match="the model exposes none"):
        join(None)
    module = nn.Linear(4, 3)
    module.register_buffer("table", torch.ones(3).as_subclass(Unexported))
    with pytest.raises(ConfigError, match="cannot be shared: RuntimeError: not supported"):
        join(module)


def test_the_owner_of_a_later_load_ends(join: Join) -> None:
    """The owner of an earlier load has removed the socket of the same name."""
    owner = join(nn.Linear(4, 3))
    owner._socket.unlink()
    owner.close()


def test_a_model_that_changes_its_weights_or_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other instances share its buffers, and it cannot be built again."""
    monkeypatch.setattr(sharing, "requested", lambda config: True)
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1))

    def forward(x: torch.Tensor) -> torch.Tensor:
        module.get_buffer("count").add_(1)
        module.steps = 1  # type: ignore[assignment]
        return x

    model = engines.engine(forward, owner=module)
    with pytest.raises(ConfigError, match=r"forward\(\) changes count, steps of the model"):
        warmup.run(model)


def test_requested() -> None:
    """Weights on a GPU are shared on request only, and not those that a model places itself."""
    assert sharing.requested(build.config(kind="GPU", enable_weight_sharing=True))
    assert not sharing.requested(build.config(kind="GPU"))
    for kind in ("CPU", "MODEL"):
        assert not sharing.requested(build.config(kind=kind, enable_weight_sharing=True))
