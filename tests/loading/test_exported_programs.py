"""Programs of torch.export, and what packages of AOTInductor were built for."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, InputError
from torch_py_backend.loading import exported_programs
from torch_py_backend.loading.exported_programs import Program
from torch_py_backend.signature import binding

CPU = torch.device("cpu")
PACKAGE = Path(__file__).parents[2] / "examples/model_repository/digits_aoti/1/model.pt2"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.offset
        return found


class Nested(nn.Module):
    """Its keys stand in another order than an alphabet's."""

    def forward(self, x: Tensor, extra: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        total = x + 10 * extra["z"] + 100 * extra["a"][0] + 1000 * extra["a"][1]
        return {"total": total * scale, "parts": (x, [extra["z"]])}


class Power(nn.Module):
    def forward(self, x: Tensor, n: int, y: Tensor) -> Tensor:
        return x**n + y


class Total(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()


def config(folder: Path, *names: str, rows: int = 8) -> ModelConfig:
    return build.config(
        folder, max_batch_size=rows, inputs=tuple(build.spec(name, dims=(2,)) for name in names)
    )


def exported(
    folder: Path,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dims: Any = None,
) -> Path:
    path = build.write(folder, "model.pt2", "")
    program = torch.export.export(module.eval(), args, dict(kwargs or {}), dynamic_shapes=dims)
    torch.export.save(program, path)
    return path


def loaded(folder: Path, *names: str, device: torch.device | None = CPU, rows: int = 8) -> Program:
    settings = config(folder, *names, rows=rows)
    return exported_programs.load_exported(settings, folder / "1" / "model.pt2", device)


def weights(program: Program) -> list[Tensor]:
    assert program.owner is not None
    return [*program.owner.parameters(), *program.owner.buffers()]


def called(program: Program, columns: Mapping[str, Tensor]) -> Any:
    inputs = binding.bind_inputs(build.MODEL, list(columns), program.signature)
    return inputs.call(program.module, [columns[name] for name in inputs.names])


def dynamic(least: int | None = None, most: int | None = None) -> Any:
    return {0: torch.export.Dim("rows", min=least, max=most)}


# --- torch.export ----------------------------------------------------------------------------


def test_program_computes_what_was_exported(tmp_path: Path) -> None:
    """A program gives what its module gave, for another number of rows as well."""
    module = Net()
    exported(tmp_path, module, (torch.rand(4, 2),), dims=(dynamic(),))
    x = torch.rand(5, 2)

    program = loaded(tmp_path, "x")

    assert torch.equal(called(program, {"x": x}), module(x))
    assert sorted(tensor.shape for tensor in weights(program)) == [(3,), (3,), (3, 2)]


@pytest.mark.parametrize(("device", "found"), [(CPU, "cpu"), (torch.device("meta"), "meta")])
def test_program_is_moved_to_its_device(device: torch.device, found: str, tmp_path: Path) -> None:
    """A program goes where its instance runs, wherever it was exported."""
    exported(tmp_path, Net(), (torch.rand(4, 2),), dims=(dynamic(),))

    program = loaded(tmp_path, "x", device=device)

    assert {tensor.device.type for tensor in weights(program)} == {found}


def test_program_that_places_itself_stays_there(tmp_path: Path) -> None:
    """With KIND_MODEL a program stays where it was exported."""
    exported(tmp_path, Net(), (torch.rand(4, 2),), dims=(dynamic(),))

    assert {one.device.type for one in weights(loaded(tmp_path, "x", device=None))} == {"cpu"}


A, B, C, D, S = (torch.full((2, 2), number) for number in (1.0, 2.0, 3.0, 4.0, 0.5))


def nested(folder: Path) -> Program:
    sample = {"z": B.clone(), "a": [C.clone(), D.clone()]}
    exported(folder, Nested(), (A.clone(), sample), {"scale": S.clone()})
    return loaded(folder, "x", "z", "c", "d", "scale")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            {"scale": S, "ARGS[1][a][1]": D, "z": B, "ARGS[1][a][0]": C, "x": A}, id="names"
        ),
        pytest.param({f"INPUT__{n}": one for n, one in enumerate([A, B, C, D, S])}, id="numbers"),
        pytest.param(
            {
                "KWARGS[scale]": S,
                "ARGS[0]": A,
                "ARGS[1][a][0]": C,
                "ARGS[1][a][1]": D,
                "ARGS[1][z]": B,
            },
            id="paths",
        ),
    ],
)
def test_nested_inputs_reach_their_places(names: dict[str, Tensor], tmp_path: Path) -> None:
    """However inputs are named and ordered, each tensor stands where it stood at the export."""
    program = nested(tmp_path)

    found = called(program, names)

    assert str(program.signature) == "forward(x, extra, *, scale)"
    assert torch.equal(found["total"], (A + 10 * B + 100 * C + 1000 * D) * S)
    assert torch.equal(found["parts"][1][0], B)


@pytest.mark.parametrize(
    "names", [["x", "y"], ["INPUT__0", "INPUT__1"], ["ARGS[0]", "ARGS[2]"]], ids=" ".join
)
def test_constants_are_passed_as_exported(names: list[str], tmp_path: Path) -> None:
    """A number that was given at the export is no input, and is passed again."""
    exported(tmp_path, Power(), (torch.rand(2, 2), 3, torch.rand(2, 2)))

    program = loaded(tmp_path, "x", "y")

    assert program.signature.leaves == ("ARGS[0]", "ARGS[2]")
    assert torch.equal(called(program, dict(zip(names, (B, A), strict=True))), B**3 + A)


@pytest.mark.parametrize(
    ("dims", "rows"),
    [
        pytest.param((dynamic(),), Rows(1, None), id="dynamic"),
        pytest.param((dynamic(2, 16),), Rows(2, 16), id="bounds"),
        pytest.param((dynamic(None, 64),), Rows(1, 64), id="at most"),
        pytest.param(None, Rows(4, 4), id="fixed"),
        pytest.param(({1: torch.export.Dim("width")},), Rows(4, 4), id="other dimension dynamic"),
    ],
)
def test_rows_that_a_program_takes(dims: Any, rows: Rows, tmp_path: Path) -> None:
    """The sizes of dimension 0 that were exported are known."""

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    exported(tmp_path, Double(), (torch.rand(4, 2),), dims=dims)

    assert loaded(tmp_path, "x").rows == rows


def test_rows_do_not_count_without_a_batch(tmp_path: Path) -> None:
    """With max_batch_size 0 the first dimension is the model's own."""
    exported(tmp_path, Net(), (torch.rand(4, 2),))

    assert loaded(tmp_path, "x", rows=0).rows == ANY_ROWS


def test_inputs_that_share_no_rows(tmp_path: Path) -> None:
    """Where inputs differ in their first dimension nothing is known of rows."""
    exported(tmp_path, Total(), (torch.rand(4, 2), torch.rand(3)))

    assert loaded(tmp_path, "x", "y").rows == ANY_ROWS


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda name, content: None if "weights" in name else content, id="weights"),
        pytest.param(
            lambda name, content: b"{" if name.endswith("model.json") else content, id="program"
        ),
        pytest.param(
            lambda name, content: b"999" if name.endswith("version") else content, id="version"
        ),
    ],
)
def test_program_that_cannot_be_loaded_is_told(damage: Any, tmp_path: Path) -> None:
    """A damaged program, or another torch's, fails the load with torch's version."""
    path = exported(tmp_path, Net(), (torch.rand(4, 2),))
    with zipfile.ZipFile(path) as file:
        members = {name: damage(name, file.read(name)) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            if content is not None:
                file.writestr(name, content)

    with pytest.raises(ArtifactError) as raised:
        loaded(tmp_path, "x")

    text = str(raised.value)
    assert (
        f"model 'digits': model.pt2 is a torch.export program that torch {torch.__version__}"
        in text
    )
    assert "Write it again with torch.export.save" in text
    assert str(tmp_path) not in text


# --- what a program says of itself -----------------------------------------------------------


def test_program_describes_itself(tmp_path: Path) -> None:
    """Names, types and shapes of inputs and outputs are told without a call."""

    class Scores(nn.Module):
        def forward(self, image: Tensor, extra: dict[str, Tensor]) -> dict[str, Tensor]:
            scores = image.half() * extra["weight"]
            return {"scores": scores, "best": scores.argmax(dim=1)}

    args = (torch.ones(4, 3, dtype=torch.uint8), {"weight": torch.ones(4, 1).half()})
    rows = torch.export.Dim("rows")
    path = exported(tmp_path, Scores(), args, dims=({0: rows}, {"weight": {0: rows}}))

    found = exported_programs.describe_exported(config(tmp_path), path)

    assert found.inputs == [
        ("image", torch.uint8, (-1, 3)),
        ("weight", torch.float16, (-1, 1)),
    ]
    assert found.outputs == [
        ("scores", torch.float16, (-1, 3)),
        ("best", torch.int64, (-1,)),
    ]
    assert found.rows.most is None


@pytest.mark.parametrize(
    ("module", "args", "inputs", "outputs"),
    [
        pytest.param(Net(), (torch.ones(4, 2),), ["x"], ["OUTPUT__0"], id="tensor"),
        pytest.param(
            Power(),
            (torch.ones(4, 2), 3, torch.ones(4, 2)),
            ["x", "y"],
            ["OUTPUT__0"],
            id="constant",
        ),
    ],
)
def test_names_that_a_program_has(
    module: nn.Module, args: Any, inputs: list[str], outputs: list[str], tmp_path: Path
) -> None:
    """Inputs are called like the arguments, outputs without a name by their number."""
    path = exported(tmp_path, module, args)

    found = exported_programs.describe_exported(config(tmp_path), path)

    assert [name for name, _, _ in found.inputs] == inputs
    assert [name for name, _, _ in found.outputs] == outputs


def test_parts_of_a_result_that_are_no_tensors(tmp_path: Path) -> None:
    """None and numbers in a result are no outputs, and do not keep the others from being told."""

    class WithNone(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"none": None, "y": x * 2, "three": 3}

    path = exported(tmp_path, WithNone(), (torch.rand(4, 2),))

    found = exported_programs.describe_exported(config(tmp_path), path)

    assert found.outputs == [("y", torch.float32, (4, 2))]


def test_symbolic_number_does_not_break_the_load(tmp_path: Path) -> None:
    """A number that was exported as dynamic is served, or refused in a sentence."""

    class Times(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    dims = (dynamic(), torch.export.Dim.DYNAMIC)
    exported(tmp_path, Times(), (torch.rand(4, 2), 3), dims=dims)

    try:
        assert loaded(tmp_path, "x", "n").signature.leaves == ("ARGS[0]", "ARGS[1]")
    except ArtifactError as error:
        assert "ARGS[1]" in str(error)  # noqa: PT017


# --- AOTInductor -----------------------------------------------------------------------------

HERE = {
    "AOTI_DEVICE_KEY": "cpu",
    "AOTI_PLATFORM": "linux",
    "AOTI_MACHINE": "x86_64",
    "AOTI_CPU_ISA": "AVX2 AVX512",
    "AOTI_COMPUTE_CAPABILITY": "none",
    "torch_version": "2.9.1+cpu",
}


def package(folder: Path, metadata: Mapping[str, Any]) -> Path:
    path = build.write(folder, "model.pt2", "")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data/aotinductor/model/abc.wrapper.so", "")
        name = "model/data/aotinductor/model/abc_metadata.json"
        file.writestr(name, json.dumps(metadata))
    return path


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        pytest.param({}, "", id="says nothing"),
        pytest.param(HERE, "", id="this machine"),
        pytest.param({"AOTI_DEVICE_KEY": "cuda"}, "device cuda (here: cpu)", id="device"),
        pytest.param({"AOTI_PLATFORM": "darwin"}, "platform darwin (here: linux)", id="platform"),
        pytest.param(
            {"AOTI_MACHINE": "aarch64"}, "processor aarch64 (here: x86_64)", id="processor"
        ),
        pytest.param({"AOTI_CPU_ISA": "AVX2"}, "", id="fewer instructions"),
        pytest.param({"AOTI_CPU_ISA": "AVX512 AVX2"}, "", id="same instructions"),
        pytest.param(
            {"AOTI_CPU_ISA": "AVX512 AMX_TILE"},
            "instruction set AVX512 AMX_TILE (here: AVX2 AVX512)",
            id="more instructions",
        ),
        pytest.param({"AOTI_CPU_ISA": "SOMETHING_NEW"}, "", id="unheard-of instructions"),
        pytest.param({"AOTI_CPU_ISA": ""}, "", id="no instructions"),
        pytest.param(
            {"AOTI_COMPUTE_CAPABILITY": "90"}, "GPU architecture 90 (here: none)", id="GPU"
        ),
        pytest.param({"torch_version": "2.9.1+cu128"}, "", id="another build of torch"),
        pytest.param(
            {"torch_version": "2.10.0"}, "torch 2.10.0 (here: 2.9.1+cpu)", id="another torch"
        ),
        pytest.param(
            {"AOTI_PLATFORM": "win32", "AOTI_DEVICE_KEY": "cuda"},
            "device cuda (here: cpu), platform win32 (here: linux)",
            id="several",
        ),
        pytest.param({"AOTI_MODEL_NAME": "other"}, "", id="other facts"),
    ],
)
def test_package_for_another_machine_is_told(
    metadata: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a package was built for is compared with what is here, before it is loaded."""
    monkeypatch.setattr(exported_programs, "_machine", lambda device: HERE)

    assert exported_programs.misfit(package(tmp_path, metadata), CPU) == said


def test_machine_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine fits itself, on the CPU and on a GPU of the architecture it has."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    for device, found in ((None, "cpu"), (CPU, "cpu"), (torch.device("cuda", 0), "cuda")):
        here = exported_programs._machine(device)
        assert here["AOTI_DEVICE_KEY"] == found
        assert here["AOTI_COMPUTE_CAPABILITY"] == ("90" if found == "cuda" else "none")
        assert exported_programs.misfit(package(tmp_path, here), device) == ""


def test_instruction_sets_are_inductors(tmp_path: Path) -> None:
    """What this torch would write into a package for this machine fits here."""
    from torch._inductor import cpu_vec_isa

    built = str(cpu_vec_isa.pick_vec_isa()).upper()

    assert exported_programs.misfit(package(tmp_path, {"AOTI_CPU_ISA": built}), CPU) == ""


@pytest.mark.parametrize("content", ["", "PK\x03\x04", "hello"])
def test_package_that_cannot_be_loaded_is_told(content: str, tmp_path: Path) -> None:
    """Whatever is wrong with a package, the load fails with a sentence and its way out."""
    path = build.write(tmp_path, "model.pt2", content)

    with pytest.raises(ArtifactError) as raised:
        exported_programs.load_aoti(config(tmp_path, "x"), path, CPU)

    assert "'digits': model.pt2 is an AOTInductor package that torch" in str(raised.value)
    assert "with the parameter FALLBACK" in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


class Loader:
    """A package's loader, that runs a function on its leaves and refuses rows."""

    def __init__(self, refuses: str = "", least: int = 1) -> None:
        self.refuses, self.least = refuses, least
        self.calls: list[list[Tensor]] = []

    def get_call_spec(self) -> list[str]:
        spec = torch.utils._pytree
        x = torch.ones(1)
        tree = spec.tree_structure(((x, {"b": x, "a": x}), {}))
        return [spec.treespec_dumps(tree), spec.treespec_dumps(spec.tree_structure({"y": x}))]

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        self.calls.append(leaves)
        if self.refuses and leaves[0].shape[0] < self.least:
            raise RuntimeError(self.refuses)
        return [leaves[0] + 10 * leaves[1] + 100 * leaves[2]]


def aoti(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    loader: Loader,
    rows: int = 8,
    device: torch.device = CPU,
) -> Program:
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: loader)
    settings = config(folder, "arg0", "a", "b", rows=rows)
    return exported_programs.load_aoti(settings, folder / "model.pt2", device)


@pytest.mark.parametrize(
    ("metadata", "gpu", "device"),
    [
        ({"AOTI_DEVICE_KEY": "cuda"}, True, torch.device("cuda", 0)),
        ({"AOTI_DEVICE_KEY": "cuda"}, False, CPU),
        ({"AOTI_DEVICE_KEY": "cpu"}, True, CPU),
        ({}, True, CPU),
    ],
)
def test_where_a_package_is_tried(
    metadata: dict[str, str],
    gpu: bool,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package for CUDA is tried on the GPU, although completion has no device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    assert exported_programs.device_of(package(tmp_path, metadata)) == device


@pytest.mark.usefixtures("process")
def test_package_is_probed_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package refuses tensors of another device before it looks at their rows."""
    loader = Loader()

    aoti(tmp_path, monkeypatch, loader, device=torch.device("meta"))

    devices = {leaf.device.type for leaves in loader.calls for leaf in leaves}
    assert devices == {"meta"}


@pytest.mark.usefixtures("process")
def test_package_is_called_with_its_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package gets its tensors in its own order, and its result its own structure."""
    program = aoti(tmp_path, monkeypatch, Loader())

    found = called(program, {"a": C, "b": B, "arg0": A})

    assert torch.equal(found["y"], A + 10 * B + 100 * C)
    assert program.signature.leaves == ("ARGS[0]", "ARGS[1][b]", "ARGS[1][a]")


@pytest.mark.parametrize(
    ("refuses", "least", "rows"),
    [
        pytest.param("", 1, ANY_ROWS, id="any"),
        pytest.param(
            "input_handles[0]: dim value is too small at 0, expected it to be >= 2, but got: 1\n",
            2,
            Rows(2, None),
            id="at least two",
        ),
        pytest.param(
            "input_handles[0]: unmatched dim value at 0, expected: 4, but got: 1\n",
            4,
            Rows(4, 4),
            id="exactly four",
        ),
        pytest.param("CUDA error: something else", 9, ANY_ROWS, id="fails otherwise"),
    ],
)
@pytest.mark.usefixtures("process")
def test_rows_of_a_package_are_found_out(
    refuses: str, least: int, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package does not say how many rows it takes: it is asked with one."""
    loader = Loader(refuses, least)

    assert aoti(tmp_path, monkeypatch, loader).rows == rows
    assert [leaf.shape for leaf in loader.calls[0]] == [(1, 2)] * 3


class Loud(Loader):
    """Writes on standard error itself, as AOTInductor's runtime does, whatever it then raises."""

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        os.write(2, b"Error: what the runtime prints\n")
        return super().run(leaves)


@pytest.mark.parametrize(
    ("refuses", "heard"),
    [
        pytest.param("dim value is too small at 0, expected it to be >= 2", 1, id="refusal"),
        pytest.param("CUDA error: something else", 2, id="fails-otherwise"),
        pytest.param("", 2, id="takes-it"),
    ],
)
@pytest.mark.usefixtures("process")
def test_question_is_not_heard(
    refuses: str,
    heard: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What a package prints when it refuses rows is no error; anything else reaches the log."""
    aoti(tmp_path, monkeypatch, Loud(refuses, least=2))

    assert capfd.readouterr().err.count("Error: what the runtime prints\n") == heard
    os.write(2, b"open again\n")
    assert capfd.readouterr().err == "open again\n"


def test_question_without_standard_error(tmp_path: Path) -> None:
    """A process whose standard error is closed asks all the same."""
    code = f"""
import os, pathlib, pytest, sys
os.close(2)
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
from loading import test_exported_programs as tests
with pytest.MonkeyPatch.context() as patch:
    program = tests.aoti(pathlib.Path({str(tmp_path)!r}), patch, tests.Limited())
print(program.rows)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Rows(1, 5))


_LOADED_ALONE = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import torch
import build
from torch_py_backend.signature import binding
from torch_py_backend.loading import exported_programs

processes = []
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and processes.append(args))
config = build.config(inputs=(build.spec("x", dims=(1, 8, 8)),))
program = exported_programs.load_aoti(config, Path(sys.argv[2]), torch.device("cpu"))
inputs = binding.bind_inputs("digits", ["INPUT__0"], program.signature)
scores = inputs.call(program.module, [torch.zeros(2, 1, 8, 8)])
print(scores.shape[-1], processes, [name for name in sys.modules if "torch._dynamo" in name])
"""


def test_package_starts_without_the_compiler() -> None:
    """A package is loaded and run; no compiler is imported, no process looks what it could build.

    The library of an instruction set, built to see whether it runs, cost 2 to 10 s a load.
    """
    words = [sys.executable, "-c", _LOADED_ALONE, str(Path(__file__).parents[1]), str(PACKAGE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10 [] []"


class Limited(Loader):
    """Takes five rows at most, as a package whose kernels were chosen for small batches."""

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        if leaves[0].shape[0] > 5:
            raise RuntimeError(
                "input_handles[0]: dim value is too large at 0, expected to be <= 5, but got: 8\n"
            )
        return super().run(leaves)


@pytest.mark.usefixtures("process")
def test_most_rows_of_a_package_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that takes fewer rows than max_batch_size is run in pieces."""
    assert aoti(tmp_path, monkeypatch, Limited()).rows == Rows(1, 5)


@pytest.mark.usefixtures("process")
def test_package_without_a_batch_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With max_batch_size 0 there are no rows to find out."""
    loader = Loader()

    assert aoti(tmp_path, monkeypatch, loader, rows=0).rows == ANY_ROWS
    assert loader.calls == []


# --- sizes of 1 --------------------------------------------------------------------------------


class Checked:
    """A package with a dimension that varies, whose checks torch switches by the environment."""

    def __init__(self, compute: Callable[[Tensor, Tensor], list[Tensor]], least: int = 2) -> None:
        self.compute, self.least = compute, least
        self.checks: bool | None = None

    def get_call_spec(self) -> list[str]:
        tree = torch.utils._pytree
        x = torch.ones(1)
        inputs = tree.tree_structure(((x, x), {}))
        return [tree.treespec_dumps(inputs), tree.treespec_dumps(tree.tree_structure((x, x)))]

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        if self.checks is None:  # a library reads it once
            self.checks = os.environ["AOTI_RUNTIME_CHECK_INPUTS"] == "1"
        for number, leaf in enumerate(leaves if self.checks else []):
            if leaf.shape[1] < self.least:
                raise RuntimeError(
                    f"input_handles[{number}]: dim value is too small at 1, expected it to be >="
                    f" {self.least}, but got: {leaf.shape[1]}\n"
                )
            if leaf.stride()[-1] != 1:
                raise RuntimeError(
                    f"input_handles[{number}]: unmatched stride value at {leaf.ndim - 1},"
                    f" expected: 1, but got: {leaf.stride()[-1]}\n"
                )
        return self.compute(*leaves)


def varying(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: Callable[[], Checked]
) -> Program:
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: package())
    inputs = (build.spec("x", dims=(-1, 2)), build.spec("mask", dims=(-1,)))
    names = {"ARGS[0]": inputs[0], "ARGS[1]": inputs[1]}
    specs = tuple(dataclasses.replace(one, name=name) for name, one in names.items())
    settings = build.config(folder, inputs=specs)
    return exported_programs.load_aoti(settings, folder / "model.pt2", CPU)


def masked_mean(x: Tensor, mask: Tensor) -> list[Tensor]:
    weights = mask[..., None]
    return [x * weights, (x * weights).sum(1) / weights.sum(1)]


def mean(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x + mask[..., None], x.mean(1)]


def sums(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x.cumsum(1), (x * mask[..., None]).sum(1)]


def counting(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x * mask[..., None], x.sum(1) + x.shape[1]]


def wrong_for_one(x: Tensor, mask: Tensor) -> list[Tensor]:
    return mean(x, mask) if x.shape[1] > 1 else mean(x + 1, mask)


@pytest.mark.parametrize(
    ("compute", "served"),
    [
        pytest.param(masked_mean, True, id="masked mean"),
        pytest.param(mean, True, id="mean"),
        pytest.param(sums, True, id="sums"),
        pytest.param(counting, False, id="nothing to compare"),
        pytest.param(wrong_for_one, False, id="wrong"),
    ],
)
@pytest.mark.usefixtures("process")
def test_sizes_of_one_are_served_where_a_package_is_right(
    compute: Any,
    served: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What torch.export leaves out without need is tried at load, and else refused in words."""
    program = varying(tmp_path, monkeypatch, lambda: Checked(compute))
    x, mask = torch.rand(3, 1, 2), torch.rand(3, 1) + 1

    if served:
        assert all(map(torch.equal, program.module(x, mask), compute(x, mask)))
        assert not caplog.messages
    else:
        with pytest.raises(InputError, match=r"'ARGS\[0\]' is \[3, 1, 2\]; expected a size of at"):
            program.module(x, mask)
        assert "aot_inductor.check_lowerbound" in caplog.text
    larger = torch.rand(3, 5, 2), torch.rand(3, 5)
    assert all(map(torch.equal, program.module(*larger), compute(*larger)))
    assert os.environ["AOTI_RUNTIME_CHECK_INPUTS"] == "1"


@pytest.mark.parametrize(
    ("x", "mask"), [((3, 1, 2), (3, 5)), ((3, 5, 2), (3, 1)), ((3, 0, 2), (3, 0))], ids=str
)
@pytest.mark.usefixtures("process")
def test_sizes_that_were_not_tried_are_refused(
    x: tuple[int, ...],
    mask: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without checks, sizes that belong together would not be compared: 1 beside 5 is refused."""
    program = varying(tmp_path, monkeypatch, lambda: Checked(masked_mean))

    with pytest.raises(InputError, match="expected a size of at least 2 in dimension 1"):
        program.module(torch.rand(x), torch.rand(mask))


@pytest.mark.usefixtures("process")
def test_sizes_that_a_package_was_limited_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A least size that somebody has written is kept, and not warned about."""
    program = varying(tmp_path, monkeypatch, lambda: Checked(mean, least=4))

    with pytest.raises(InputError, match="expected a size of at least 4 in dimension 1"):
        program.module(torch.rand(3, 3, 2), torch.rand(3, 3))
    assert not caplog.messages


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * mask[..., None]
        return y, y.mean(1)


@pytest.mark.slow
@pytest.mark.usefixtures("process")
def test_sizes_of_one_of_a_real_package(tmp_path: Path) -> None:
    """A package that AOTInductor built answers for a size of 1 as the module does."""
    module = Pooled().eval()
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length")
    shapes = ({0: rows, 1: length}, {0: rows, 1: length})
    program = torch.export.export(
        module, (torch.rand(4, 8, 2), torch.rand(4, 8)), dynamic_shapes=shapes
    )
    path = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    inputs = (build.spec("INPUT__0", dims=(-1, 2)), build.spec("INPUT__1", dims=(-1,)))
    loaded = exported_programs.load_aoti(build.config(tmp_path, inputs=inputs), path, CPU)

    for size in (1, 2, 5):
        x, mask = torch.rand(3, size, 2), torch.rand(3, size)
        with torch.inference_mode():
            wanted = module(x, mask)
        for found, value in zip(loaded.module(x, mask), wanted, strict=True):
            torch.testing.assert_close(found, value)
