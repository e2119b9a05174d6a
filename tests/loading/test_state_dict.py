import argparse
import collections
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import build
import models
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.errors import ArtifactError, LoadError, WeightsError
from torch_py_backend.loading import state_dict

State = Mapping[str, Any]
Writer = Callable[[State, Path], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Tied(nn.Module):
    """Uses one matrix for its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(x))
        return result


class Unusual(Net):
    """Holds a weight in a list and another one in a view, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 2)
        self.listed = [self.linear.weight]
        self.transposed = self.second.weight.t()
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.listed[0], self.linear.bias)
        return hidden @ self.transposed + self.second.bias


def _quantized() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    module: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    return module


class Renamed(Net):
    """Translates the keys of an earlier version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
        for key in [key for key in state if key.startswith("old.")]:
            state[key.replace("old.", "linear.")] = state.pop(key)


STATE = {
    "linear.weight": torch.arange(6.0).reshape(3, 2),
    "linear.bias": torch.tensor([10.0, 20.0, 30.0]),
}
X = torch.tensor([[1.0, 2.0]])
Y = torch.tensor([[12.0, 28.0, 44.0]])


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{key}": value for key, value in STATE.items()}


def zipped(state: State, path: Path) -> None:
    torch.save(state, path)


def legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def safe(state: State, path: Path) -> None:
    safetensors.torch.save_file(dict(state), path)


FORMATS = [
    pytest.param(zipped, "model.pt", id="pt"),
    pytest.param(legacy, "model.pth", id="legacy pth"),
    pytest.param(safe, "model.safetensors", id="safetensors"),
]


def artifact(folder: Path, name: str | None) -> Artifact:
    version = folder / "1"
    return Artifact(ArtifactType.MODULE, version / "model.py", version / name if name else None)


def load(folder: Path, name: str | None, module: nn.Module, **options: Any) -> nn.Module:
    """Return the module, filled from a file of its version folder."""
    state_dict.load_into(build.config(folder, **options), artifact(folder, name), module)
    return module.eval()


def filled(
    folder: Path,
    module: nn.Module,
    state: Any,
    write: Writer = zipped,
    name: str = "model.pt",
    **options: Any,
) -> nn.Module:
    """Return a module that was filled from a file with this state."""
    write(state, build.write(folder, name, ""))
    return load(folder, name, module, **options)


# --- what fits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "saved", "write", "name"),
    [
        (torch.float32, torch.float32, zipped, "model.pt"),
        (torch.float32, torch.bfloat16, safe, "model.safetensors"),
        (torch.float32, torch.float64, legacy, "model.pth"),
        (torch.bfloat16, torch.float32, zipped, "model.pt"),
    ],
)
def test_module_keeps_its_dtype(
    dtype: torch.dtype, saved: torch.dtype, write: Writer, name: str, tmp_path: Path
) -> None:
    """A file of any format fills a module; weights of another dtype are converted to its own."""
    state = collections.OrderedDict(STATE, **{"linear.bias": STATE["linear.bias"].to(saved)})
    module = filled(tmp_path, Net().to(dtype), state, write, name)
    assert {tensor.dtype for tensor in module.parameters()} == {dtype}
    assert torch.equal(module(X.to(dtype)), Y.to(dtype))


@pytest.mark.parametrize(
    ("names", "write", "name"),
    [
        (["embedding.weight", "head.weight"], zipped, "model.pt"),
        (["embedding.weight", "head.weight"], legacy, "model.pt"),
        (["embedding.weight"], safe, "model.safetensors"),
        (["head.weight"], safe, "model.safetensors"),
    ],
)
def test_tied_weights_stay_tied(names: list[str], write: Writer, name: str, tmp_path: Path) -> None:
    """Tied weights are one tensor after loading; a safetensors file has one of their names."""
    matrix = torch.arange(8.0).reshape(4, 2)
    module = filled(tmp_path, Tied(), dict.fromkeys(names, matrix), write, name)
    assert isinstance(module, Tied)
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.embedding.weight, matrix)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(lambda: nn.BatchNorm1d(3), torch.rand(2, 3), id="buffers"),
        pytest.param(lambda: nn.LSTM(2, 3), torch.rand(5, 2), id="LSTM"),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
            torch.rand(1, 3, 4),
            id="transformer",
        ),
        pytest.param(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            torch.rand(1, 2),
            id="parametrized",
        ),
        pytest.param(lambda: nn.LazyLinear(3), torch.rand(1, 2), id="lazy"),
        pytest.param(Unusual, X, id="list, view, buffer that is not saved"),
    ],
)
def test_module_computes_as_the_one_that_was_saved(
    make: Callable[[], nn.Module], x: Tensor, tmp_path: Path
) -> None:
    """A module computes like the saved one, however it holds its weights."""
    saved = make().eval()
    saved(x)
    for tensor in saved.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) + 0.5)
    expected = saved(x)
    for write, name in ((zipped, "model.pt"), (safe, "model.safetensors")):
        result = filled(tmp_path, make(), saved.state_dict(), write, name)(x)
        if isinstance(expected, tuple):
            assert torch.equal(result[0], expected[0])
        else:
            assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        # torch adds num_batches_tracked.
        (
            lambda: nn.BatchNorm1d(2, affine=False),
            {"running_mean": torch.tensor([1.0, 2.0]), "running_var": torch.tensor([3.0, 4.0])},
        ),
        (Renamed, {key.replace("linear.", "old."): tensor for key, tensor in STATE.items()}),
    ],
    ids=["added value", "translated keys"],
)
def test_old_checkpoint(
    make: Callable[[], nn.Module], state: dict[str, Tensor], tmp_path: Path
) -> None:
    """A module may add values to an old checkpoint, and translate its keys."""
    expected = make()
    expected.load_state_dict(dict(state))
    actual = filled(tmp_path, make(), state).state_dict()
    assert all(torch.equal(actual[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize(("write", "name"), FORMATS)
def test_file_may_change_while_it_is_served(write: Writer, name: str, tmp_path: Path) -> None:
    """Writing over a file does not change a model that has copied from it."""
    module = filled(tmp_path, Net(), STATE, write, name, enable_weight_sharing=False)
    path = tmp_path / "1" / name
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(module(X), Y)


@pytest.mark.filterwarnings("ignore")  # torch warns about its own quantized modules
@pytest.mark.parametrize(
    ("make", "saved"),
    [
        pytest.param(_quantized, _quantized, id="quantized"),
        pytest.param(
            lambda: nn.Sequential(models.Factor()),
            lambda: nn.Sequential(models.Factor(3.0)),
            id="extra state of a submodule",
        ),
        pytest.param(
            lambda: models.Factor(torch.ones(1)),
            lambda: models.Factor(torch.rand(4)),
            id="extra state that is a tensor of another size",
        ),
    ],
)
def test_entries_that_the_module_loads_itself(
    make: Callable[[], nn.Module], saved: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Entries that are no tensors, or extra states, are passed to a module that has them."""
    original, x = saved(), torch.rand(2, 4)
    module = filled(tmp_path, make(), original.state_dict())
    assert torch.equal(module(x), original(x))
    assert not torch.equal(make()(x), original(x))


# --- what does not fit -----------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    """A module with weights or buffers and without a file is refused; one without any is not."""
    for module, count in ((Net(), 2), (nn.BatchNorm1d(2, affine=False), 3)):
        with pytest.raises(ArtifactError, match=f"has {count} weights, and there is no weights"):
            load(tmp_path, None, module)
    load(tmp_path, None, nn.ReLU())


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (
            Net(),
            {"linear.bias": None, "linear.weight": None, "module.linear.weight": torch.ones(1)},
            "missing keys (2): linear.weight, linear.bias; unexpected keys (1): module.linear.weig",
        ),
        (
            Net(),
            {"linear.bias": None, "linear.weight": torch.ones(5), "more": torch.ones(1)},
            "missing keys (1): linear.bias; unexpected keys (1): more; wrong shapes (1): linear.w",
        ),
        (nn.Identity(), {}, "unexpected keys (2): linear.weight, linear.bias"),
        # A lazy module, whose shapes come from the file, needs every key.
        (
            nn.LazyLinear(3),
            {"weight": torch.ones(3, 2), **dict.fromkeys(STATE)},
            "missing keys (1): bias",
        ),
        # The other name of a tied weight is not missing.
        (
            Tied(),
            {"head.weight": torch.ones(3), **dict.fromkeys(STATE)},
            "wrong shapes (1): head.weight [3] instead of [4, 2]",
        ),
    ],
)
def test_weights_of_another_module(
    module: nn.Module, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """One message names all missing and unexpected keys and other shapes."""
    changed = {**STATE, **changes}
    state = {key: tensor for key, tensor in changed.items() if tensor is not None}
    with pytest.raises(WeightsError) as raised:
        filled(tmp_path, module, state)
    assert isinstance(raised.value, LoadError)
    start = "model 'digits': the weights in model.pt do not fit the module: "
    assert str(raised.value).startswith(start + message)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_weights_of_a_wrapped_module(prefix: str, tmp_path: Path) -> None:
    """The error names what DataParallel and torch.compile put before all keys."""
    with pytest.raises(WeightsError, match=f"Save them without '{prefix}' before their keys"):
        filled(tmp_path, Net(), prefixed(prefix))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"state_dict": STATE, "epoch": 3},
            "that is not a state_dict: 'state_dict' is a dict; expected tensors by name. Save its",
        ),
        ({"optimizer": {}, "model_state_dict": STATE}, "Save its entry 'model_state_dict' alone."),
        ({"ema": {0: torch.ones(1)}, "model": STATE}, "Save its entry 'model' alone."),
        (
            {"epoch": 3, "state_dict": prefixed("model.") | {"loss._extra_state": {}}},
            "Save its entry 'state_dict' alone, without 'model.' before its keys.",
        ),
        ({"epoch": np.float64(3), "state_dict": STATE}, ".multiarray.scalar, which weights_only"),
        (
            {"args": argparse.Namespace(lr=1), "model": STATE},
            "hold argparse.Namespace, which weights_only refuses to load; expected a state_dict",
        ),
        ({**STATE, "epoch": 3}, "hold a dict that is not a state_dict: 'epoch' is an int"),
        ({0: torch.ones(3)}, "hold a dict that is not a state_dict"),
        (torch.ones(3), "hold a Tensor that is not a state_dict"),
    ],
)
def test_file_without_a_state_dict(state: object, message: str, tmp_path: Path) -> None:
    """A file without tensors by name is an error that names the entry to save."""
    with pytest.raises(ArtifactError) as raised:
        filled(tmp_path, Net(), state)
    assert "model 'digits': the weights model.pt " in str(raised.value)
    assert message in str(raised.value)


class Repeated(Net):
    """Has a buffer whose rows share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(3).expand(2, 3))


class Copying(Net):
    """Copies the weights itself, and returns nothing."""

    def load_state_dict(self, state_dict: State, *_: object, **__: object) -> None:
        for name, value in self.state_dict().items():
            value.copy_(state_dict[name])


def test_errors_of_torch(tmp_path: Path) -> None:
    """The message has the reason why torch does not load the weights."""
    with pytest.raises(ArtifactError, match=r"do not fit Repeated: .*parameter named \"rows\""):
        filled(tmp_path, Repeated(), {**STATE, "rows": torch.ones(2, 3)})


def test_load_state_dict_of_the_module(tmp_path: Path) -> None:
    """A module may load the weights itself; without its comparison, the keys are compared here."""
    assert torch.equal(filled(tmp_path, Copying(), STATE)(X), Y)
    with pytest.raises(WeightsError, match=r"unexpected keys \(1\): more"):
        filled(tmp_path, Copying(), {**STATE, "more": torch.ones(2)})


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A pickled module, or TorchScript, is not a file of weights."""
    with pytest.raises(ArtifactError, match="expected a state_dict"):
        filled(tmp_path, Net(), Net(), legacy)
    torch.jit.save(torch.jit.script(Net()), tmp_path / "1" / "model.pt")
    with pytest.raises(ArtifactError, match=r"the weights model\.pt are TorchScript"):
        load(tmp_path, "model.pt", Net())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02abc", id="start of a pickle"),
        pytest.param(b"\x80\x02}." * 5, id="empty pickles"),
        pytest.param(b"PK\x03\x04" + bytes(40), id="start of a zip"),
        pytest.param((2).to_bytes(8, "little") + b"{}" + b"rest", id="safetensors with a rest"),
        pytest.param((9).to_bytes(8, "little") + b'{"a": 1}}', id="safetensors without tensors"),
    ],
)
def test_damaged_weights(content: bytes, tmp_path: Path) -> None:
    """A damaged file fails the load with an error that names it."""
    for name in ("model.pt", "model.safetensors"):
        build.write(tmp_path, name, content)
        with pytest.raises(ArtifactError, match=f"model 'digits': (the weights )?{name} "):
            load(tmp_path, name, Net())


@pytest.mark.parametrize(("write", "name"), FORMATS)
def test_truncated_weights(write: Writer, name: str, tmp_path: Path) -> None:
    """A truncated file fails the load with an error that names it."""
    path = build.write(tmp_path, name, "")
    write(STATE, path)
    content = path.read_bytes()
    for share in (0.05, 0.4, 0.6, 0.95):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ArtifactError, match=f"model 'digits': (the weights )?{name} "):
            load(tmp_path, name, Net())


# --- sharded safetensors ---------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def store_shards(folder: Path, shards: Mapping[str, State], **changes: Any) -> None:
    """Write shards with the index of Hugging Face's libraries."""
    for name, state in shards.items():
        safe(state, build.write(folder, name, ""))
    keys = {key: name for name, state in shards.items() for key in state}
    index = {"metadata": {"total_size": 36}, "weight_map": keys} | changes
    build.write(folder, INDEX, json.dumps(index))


def test_shards_are_put_together(tmp_path: Path) -> None:
    """Weights in several files, also of other folders, are loaded like those of one file."""
    names = ["shards/a.safetensors", "../b.safetensors"]
    shards = {name: {key: STATE[key]} for name, key in zip(names, STATE, strict=True)}
    store_shards(tmp_path / "digits", shards)
    assert torch.equal(load(tmp_path / "digits", INDEX, Net())(X), Y)


def test_weight_in_two_shards(tmp_path: Path) -> None:
    """A weight comes from the file that the index names for it."""
    stale = {"linear.weight": torch.zeros(3, 2)}
    first, last = ({key: STATE[key]} for key in STATE)
    shards = {"a.safetensors": first, "b.safetensors": last | stale}
    names = {key: name for name, key in zip(shards, STATE, strict=True)}
    store_shards(tmp_path, shards, weight_map=names)
    assert torch.equal(load(tmp_path, INDEX, Net())(X), Y)


def test_linked_index_has_linked_shards(tmp_path: Path) -> None:
    """Shards may be beside the target of a linked index, as in Hugging Face's cache."""
    store_shards(tmp_path / "elsewhere", {"a.safetensors": STATE})
    (tmp_path / "digits" / "1").mkdir(parents=True)
    for name in (INDEX, "a.safetensors"):
        (tmp_path / "digits" / "1" / name).symlink_to(tmp_path / "elsewhere" / "1" / name)
    assert torch.equal(load(tmp_path / "digits", INDEX, Net())(X), Y)


def test_keys_of_shards(tmp_path: Path) -> None:
    """A key that is in no shard is missing; a damaged shard is named."""
    store_shards(tmp_path, {"a.safetensors": {"linear.weight": STATE["linear.weight"]}})
    with pytest.raises(WeightsError, match=rf"in {INDEX} do not fit.*\(1\): linear\.bias"):
        load(tmp_path, INDEX, Net())
    path = tmp_path / "1" / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=r"a\.safetensors is not valid safeten"):
        load(tmp_path, INDEX, Net())


@pytest.mark.parametrize("name", ["../../secret.safetensors", "gone.safetensors", ".", ""])
def test_missing_shard(name: str, tmp_path: Path) -> None:
    """A missing shard, or one outside of the folder, is refused; see test_security, too."""
    safe(STATE, tmp_path / "secret.safetensors")
    store_shards(tmp_path / "digits", {}, weight_map=dict.fromkeys(STATE, name))
    with pytest.raises(ArtifactError) as raised:
        load(tmp_path / "digits", INDEX, Net())
    message = f"'digits': the weights {INDEX} name {name}; expected a file beside the index"
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": {"a": "b", "c": 3}}', b"\xff\xfe\x00"]
)
def test_damaged_index(content: bytes, tmp_path: Path) -> None:
    """A damaged index fails the load with an error that names it."""
    build.write(tmp_path, INDEX, content)
    with pytest.raises(ArtifactError, match=f"{INDEX} are not an index of safetensors"):
        load(tmp_path, INDEX, Net())


# --- modules without random values -----------------------------------------------------------


class Constructed(nn.Module):
    """A module with a layer, whose constructor runs more code."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        exec(code, {"self": self, "nn": nn, "torch": torch})


_NOISE = "self.register_buffer('noise', {}, persistent={})"
_UNUSED = {
    "embedding": "self.embedding = nn.Embedding(5, 4, padding_idx=0)",
    "copied layers": "layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)\n"
    "self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)",
    "truncated": "self.positions = nn.Parameter(torch.empty(4))\n"
    "nn.init.trunc_normal_(self.positions, std=0.02)",
    "through data": "self.linear.weight.data.normal_(0, 0.02)",
    "own generator": _NOISE.format(
        "torch.randn(3, generator=torch.Generator().manual_seed(1))", False
    ),
    "saved buffer": _NOISE.format("torch.empty(3).normal_()", True),
    "freed": "torch.empty(3).normal_()",
    "tied": "self.head = nn.Linear(3, 3, bias=False)\nself.head.weight = self.linear.weight",
}


@pytest.mark.parametrize("code", _UNUSED.values(), ids=_UNUSED)
def test_weights_that_a_file_will_fill_are_not_drawn(code: str) -> None:
    """The module is built once, and its weights are uninitialized."""
    construct = mock.Mock(side_effect=lambda: Constructed(code))
    keys = Constructed(code).state_dict().keys()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    state_dict.build_uninitialized(construct, lambda: keys)
    assert construct.call_count == 1
    assert torch.equal(torch.random.get_rng_state(), before)


_USED = {
    "unsaved buffer": _NOISE.format("torch.empty(3).normal_()", False),
    "drawn later": _NOISE.format("torch.randn(3)", False),
    "plain tensor": "self.noise = torch.empty(3).uniform_()",
    "list": "self.noise = torch.tensor(torch.empty(3).uniform_().tolist())",
    "array": "self.noise = torch.from_numpy(torch.empty(3).uniform_().numpy().copy())",
    "array of a weight": "import numpy\n"
    "self.noise = torch.from_numpy(numpy.abs(numpy.asarray(self.linear.weight.detach())))",
    "DLPack": "import numpy\n"
    "self.noise = torch.from_numpy(numpy.from_dlpack(torch.empty(3).uniform_()).copy())",
    "computed": _NOISE.format("self.linear.weight.sum()", False),
    "converted": "self.half = self.linear.weight.to(torch.float64)",
    "compared": "assert self.linear.weight.abs().max() <= 1",
    "fails without": "with torch.no_grad():\n"
    "    self.linear.weight.copy_(torch.full((3, 3), float('nan')))\n"
    "    self.linear.weight.normal_()\n"
    "assert not torch.isnan(self.linear.weight).any()",
}


@pytest.mark.parametrize("code", _USED.values(), ids=_USED)
def test_a_module_that_uses_its_random_values_has_them(code: str) -> None:
    """A module that uses its random values is built with them."""
    torch.manual_seed(0)
    expected = Constructed(code)
    torch.manual_seed(0)
    built = state_dict.build_uninitialized(lambda: Constructed(code), expected.state_dict)
    tensors = [name for name, value in vars(expected).items() if isinstance(value, Tensor)]
    buffers = [name for name, _ in expected.named_buffers()]
    for name in (*tensors, *buffers):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name
    assert torch.equal(built.linear.weight, expected.linear.weight)


def test_error_of_a_constructor() -> None:
    """The error of the constructor is raised."""
    with pytest.raises(ValueError, match="no such size"):
        state_dict.build_uninitialized(
            lambda: Constructed("raise ValueError('no such size')"), dict
        )


def test_function_keeps_its_random_values() -> None:
    """No file fills the tensors of a closure."""

    def construct() -> Callable[[], Tensor]:
        drawn = torch.empty(3).normal_()
        return lambda: drawn

    torch.manual_seed(0)
    expected = construct()()
    torch.manual_seed(0)
    assert torch.equal(state_dict.build_uninitialized(construct, dict)(), expected)
