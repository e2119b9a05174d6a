import argparse
import collections
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import exported, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.weights import AliasOnCopy

State = Mapping[str, Any]
Make = Callable[[], nn.Module]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


class Unusual(nn.Linear):
    """Holds a weight in a list and another one in a view, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.second = nn.Linear(3, 2)
        self.listed = [self.weight]
        self.transposed = self.second.weight.t()
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.listed[0], self.bias)
        return hidden @ self.transposed + self.second.bias


def _quantized() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear})  # type: ignore[no-any-return]


class Copying(nn.Linear):
    def load_state_dict(self, state_dict: State, *_: object, **__: object) -> None:
        for name, value in self.state_dict().items():
            value.copy_(state_dict[name])


INDEX = "model.safetensors.index.json"
STATE = {"weight": torch.arange(6.0).reshape(3, 2), "bias": torch.tensor([10.0, 20.0, 30.0])}
X = torch.tensor([[1.0, 2.0]])
Y = torch.tensor([[12.0, 28.0, 44.0]])
LEGACY = "model.pth"  # as torch before 1.6 writes it


def save(state: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(dict(state), path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=path.name != LEGACY)


def net() -> nn.Linear:
    return nn.Linear(2, 3)


def load(folder: Path, name: str, module: nn.Module | None = None) -> nn.Module:
    module = module or net()
    artifact = Artifact(ArtifactType.MODULE, folder / "1" / "model.py", folder / "1" / name)
    weights.load_into(build.config(folder), artifact, module)
    return module.eval()


def filled(folder: Path, module: nn.Module, state: Any, name: str = "model.pt") -> nn.Module:
    save(state, build.write(folder, name, ""))
    return load(folder, name, module)


@pytest.mark.parametrize(
    ("dtype", "saved", "name"),
    [
        (torch.float32, torch.bfloat16, "model.safetensors"),
        (torch.float32, torch.float64, LEGACY),
        (torch.bfloat16, torch.float32, "model.pt"),
    ],
)
def test_file_of_any_format_and_dtype_fills_a_module_in_its_own(
    dtype: torch.dtype, saved: torch.dtype, name: str, tmp_path: Path
) -> None:
    state = collections.OrderedDict(STATE, bias=STATE["bias"].to(saved))
    module = filled(tmp_path, net().to(dtype), state, name)
    assert {tensor.dtype for tensor in module.parameters()} == {dtype}
    assert torch.equal(module(X.to(dtype)), Y.to(dtype))


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["embedding.weight", "head.weight"], "model.pt"),
        (["embedding.weight"], "model.safetensors"),
        (["head.weight"], "model.safetensors"),
    ],
)
def test_tied_weights_stay_tied(names: list[str], name: str, tmp_path: Path) -> None:
    matrix, tied = torch.arange(8.0).reshape(4, 2), Tied()
    filled(tmp_path, tied, dict.fromkeys(names, matrix), name)
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied.embedding.weight, matrix)


@pytest.mark.filterwarnings("ignore")  # torch warns about its own quantized modules
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.TransformerEncoderLayer(4, 2), torch.rand(1, 3, 4)),
        (lambda: nn.LazyLinear(3), X),
        (Unusual, X),
        (lambda: Copying(2, 3), X),
        (_quantized, torch.rand(1, 4)),  # some entries are no tensors
    ],
)
def test_module_computes_as_the_one_that_was_saved(make: Make, x: Tensor, tmp_path: Path) -> None:
    original = make().eval()
    original(x)  # a lazy module gets its shapes
    for tensor in (*original.parameters(), *original.buffers()):
        tensor.data.copy_(torch.rand(tensor.shape) + 0.5)
    module, fresh = filled(tmp_path, make(), original.state_dict()), make().eval()
    (expected, *_), (actual, *_), (other, *_) = original(x), module(x), fresh(x)
    assert torch.equal(actual, expected)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize(
    ("make", "state", "reason"),
    [
        (Tied, {"head.weight": torch.ones(3)}, "size mismatch for embedding.weight: "),
        (net, {"_orig_mod.weight": torch.ones(3, 2)}, '"_orig_mod.weight"'),
        (lambda: Copying(2, 3), {}, "KeyError: 'weight'"),
        (net, {**STATE, "epoch": 3}, 'Unexpected key(s) in state_dict: "epoch"'),
    ],
)
def test_weights_of_another_module(make: Make, state: State, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"model.pt do not fit .*{re.escape(reason)}.* Set "):
        filled(tmp_path, make(), state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"args": argparse.Namespace(lr=1), "model": STATE}, "holds argparse.Namespace, which"),
        ({0: torch.ones(3)}, "holds a dict that is not a state_dict"),
        (torch.ones(3), "holds a Tensor that is not a state_dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(state: Any, message: str, tmp_path: Path) -> None:
    for name in ("model.pt", LEGACY):
        with pytest.raises(ArtifactError, match=f"{name} .*{re.escape(message)}"):
            filled(tmp_path, net(), state, name)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("model.pt", [b"", b"\x80\x02abc", b"\x80\x02}." * 5, b"PK\x03\x04" + bytes(40)]),
        (
            "model.safetensors",
            [b"", (2).to_bytes(8, "little") + b"{}rest", (9).to_bytes(8, "little") + b'{"a": 1}}'],
        ),
        (INDEX, [b"{", b"[]", b"{}", b'{"weight_map": {"a": "b", "c": 3}}', b"\xff\xfe\x00"]),
        *((name, None) for name in ("model.pt", LEGACY, "model.safetensors")),
    ],
)
def test_damaged_weights(name: str, contents: list[bytes] | None, tmp_path: Path) -> None:
    path = build.write(tmp_path, name, "")
    if contents is None:
        save(STATE, path)
        whole = path.read_bytes()
        contents = [whole[: int(len(whole) * share)] for share in (0.05, 0.4, 0.6, 0.95)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=f"{name} "):
            load(tmp_path, name)


def store_shards(folder: Path, shards: Mapping[str, State]) -> None:
    for name, state in shards.items():
        save(state, build.write(folder, name, ""))
    keys = {key: name for name, state in shards.items() for key in state}
    build.write(folder, INDEX, json.dumps({"metadata": {}, "weight_map": keys}))


def test_shards_may_be_anywhere_in_the_folder_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    first, last = ({key: STATE[key]} for key in STATE)
    store_shards(tmp_path / "digits", {"../a.safetensors": first, "shards/b.safetensors": last})
    module = load(tmp_path / "digits", INDEX)
    assert torch.equal(module(X), Y)
    mapped = weights.measure(module.parameters())
    assert mapped.shared == mapped.total
    path = tmp_path / "digits" / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=r"a\.safetensors cannot be read: SafetensorErr"):
        load(tmp_path / "digits", INDEX)


def test_linked_index_has_linked_shards_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    store_shards(tmp_path / "elsewhere", {"a.safetensors": STATE})
    (tmp_path / "digits" / "1").mkdir(parents=True)
    for name in (INDEX, "a.safetensors"):
        (tmp_path / "digits" / "1" / name).symlink_to(tmp_path / "elsewhere" / "1" / name)
    assert torch.equal(load(tmp_path / "digits", INDEX)(X), Y)


class Constructed(nn.Module):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        exec(code, {"self": self, "nn": nn, "torch": torch})


_ENCODER = """
layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
"""
_TIED = "self.head = nn.Linear(3, 3, bias=False); self.head.weight = self.linear.weight"
_TRUNCATED = "self.scale = nn.Parameter(nn.init.trunc_normal_(torch.empty(4), std=0.02))"


@pytest.mark.parametrize("code", [_ENCODER, _TIED, _TRUNCATED])
def test_weights_that_a_file_will_fill_are_not_drawn(code: str) -> None:
    construct = mock.Mock(side_effect=lambda: Constructed(code))
    saved = Constructed(code).state_dict()
    before = torch.random.get_rng_state()
    weights.build_uninitialized(construct, lambda: saved)
    construct.assert_called_once()
    assert torch.equal(torch.random.get_rng_state(), before)


_CAUGHT = """
try:
    self.noise = self.linear.weight.detach().abs()
except BaseException:
    self.noise = torch.zeros(3, 3)
"""
_FAILS = """
with torch.no_grad():
    self.linear.weight.fill_(float("nan"))
    nn.init.uniform_(self.linear.weight)
assert not torch.isnan(self.linear.weight).any()
"""


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("self.register_buffer('noise', nn.init.normal_(torch.empty(3)), persistent=False)", {}),
        ("self.noise = torch.randn(3).tolist()", {}),
        ("self.noise = nn.init.ones_(self.linear.bias).tolist()", {}),
        (_CAUGHT, {}),
        (_FAILS, {}),
        ("", {"linear.bias": None}),
        ("", {"linear.bias": torch.ones(1)}),
        ("", {"linear.bias": "text"}),
    ],
    ids=[
        "unsaved buffer", "drawn later", "not drawn", "computed", "fails without",
        "not in the file", "another shape", "no tensor",
    ],
)  # fmt: skip
def test_module_has_random_values_that_it_uses_or_the_file_lacks(code: str, lacks: State) -> None:
    torch.manual_seed(0)
    expected = Constructed(code)
    torch.manual_seed(0)
    saved = {**expected.state_dict(), **lacks}
    built = weights.build_uninitialized(lambda: Constructed(code), lambda: saved)
    torch.testing.assert_close(getattr(built, "noise", 0), getattr(expected, "noise", 0))
    assert not lacks or torch.equal(built.linear.bias, expected.linear.bias)


def test_error_of_a_constructor_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        weights.build_uninitialized(lambda: Constructed("1 / 0"), dict)


def mapped(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    save(tensors, path)
    return weights.read(build.config(), path)


def shared(*tensors: Tensor) -> int:
    return weights.measure(tensors).shared


@pytest.fixture(params=["weights.pt", "weights.safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_loaded_parameter_is_the_same_object_in_the_memory_of_the_file(path: Path) -> None:
    state = mapped(nn.Linear(5, 3).state_dict(), path)
    before = path.read_bytes()
    linear = nn.Linear(5, 3)
    weight = linear.weight
    with AliasOnCopy(state.values()):
        linear.load_state_dict(state)
    assert linear.weight is weight
    assert weight.requires_grad
    assert weight.data_ptr() == state["weight"].data_ptr()
    assert shared(weight, linear.bias) == weight.nbytes + linear.bias.nbytes
    # What a model writes stays in its process.
    values = weight.detach().clone()
    weight.detach().add_(7)
    assert path.read_bytes() == before
    assert torch.equal(weights.read(build.config(), path)["weight"], values)


_BASE = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("weight", "other"),
    [(torch.zeros(4, 4).double(), None), (torch.zeros(4, 4).t(), None), (_BASE[:4], _BASE)],
    ids=["dtype", "layout", "view"],
)
def test_weight_that_cannot_be_mapped_is_copied(weight: Tensor, other: Any, path: Path) -> None:
    values = torch.arange(16.0).reshape(4, 4)
    state = mapped({"weight": values}, path)
    with AliasOnCopy(state.values()):
        weight.copy_(state["weight"])
    assert torch.equal(weight.float(), values)
    assert not shared(weight)
    if other is not None:
        assert torch.equal(other[:4], values)


def test_two_weights_of_one_record_stay_two_and_computed_values_are_copied(tmp_path: Path) -> None:
    zeros = torch.zeros(4)
    state = mapped({"a": zeros, "b": zeros}, tmp_path / "weights.pt")
    first, second, third, computed = torch.ones(4), torch.ones(4), torch.ones(4), state["a"] + 2
    with AliasOnCopy(state.values()):
        first.copy_(state["a"])
        second.copy_(state["b"])
        first.copy_(state["a"])
        third.copy_(computed)
    first.add_(1)
    computed.zero_()
    assert torch.equal(second, torch.zeros(4))
    assert torch.equal(third, torch.full((4,), 2.0))


def test_part_of_a_tensor_is_mapped(path: Path) -> None:
    state = mapped({"qkv": torch.arange(24.0).reshape(6, 4)}, path)
    parts = [torch.zeros(2, 4) for _ in range(3)]
    with AliasOnCopy(state.values()):
        for part, piece in zip(parts, state["qkv"].chunk(3), strict=True):
            part.copy_(piece)
    assert torch.equal(torch.cat(parts), state["qkv"])
    assert shared(*parts) == 24 * 4
    assert all(weights.has_no_other_views(part) for part in parts)


def tied() -> nn.Sequential:
    """Weights of equal sizes and values, buffers, and a layer in two places."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    nn.init.zeros_(first.bias)
    nn.init.zeros_(second.bias)
    layers = {"first": first, "second": second, "third": first, "norm": nn.BatchNorm1d(6)}
    return nn.Sequential(collections.OrderedDict(layers)).eval()


def scripted(net: nn.Module, path: Path) -> Any:
    torch.jit.save(torch.jit.script(net), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.md", "added later")
    loaded = torch.jit.load(path)
    weights.share((*loaded.parameters(), *loaded.buffers()), path)
    return loaded


def save_program(net: nn.Module, path: Path) -> Any:
    torch.export.save(torch.export.export(net, (torch.ones(2, 6),)), path)
    artifact = Artifact(ArtifactType.EXPORTED, path)
    return exported.load(artifact, build.config(max_batch_size=0), None).module


@pytest.mark.parametrize("make", [scripted, save_program])
def test_weights_of_an_archive_are_mapped_and_written_privately(make: Any, tmp_path: Path) -> None:
    net = tied()
    path, x = tmp_path / "model.pt", torch.rand(2, 6)
    model = make(net, path)
    before = path.read_bytes()
    mapped = weights.measure(model.state_dict(keep_vars=True).values())
    assert mapped.shared == mapped.total > 0
    assert torch.equal(model(x), net(x))
    model.state_dict()["norm.bias"].add_(1)
    assert path.read_bytes() == before
    assert torch.allclose(model(x), net(x) + 1)
    # Of equal values, and two all the same.
    first, second = model.state_dict()["first.bias"], model.state_dict()["second.bias"]
    assert first.data_ptr() != second.data_ptr()


def test_weights_of_other_bytes_or_with_a_view_are_not_mapped(tmp_path: Path) -> None:
    net = torch.jit.script(tied())
    net.save(tmp_path / "model.pt")
    with torch.no_grad():
        net.first.weight[2, 5] += 1  # neither at the start nor at the end
    expected = net.first.weight.clone()
    view = net.second.weight.view(-1)
    weights.share(net.parameters(), tmp_path / "model.pt")
    assert torch.equal(net.first.weight, expected)
    assert not shared(net.first.weight, net.second.weight)
    assert view.data_ptr() == net.second.weight.data_ptr()
    assert shared(net.norm.weight)
