"""Programs that torch.export captured: as they are, or compiled ahead of time by AOTInductor."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts import file_types
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, InputError, brief
from torch_py_backend.loading import mapped_files, sample_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.signature import binding, introspection, results
from torch_py_backend.signature.binding import Signature

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded program; what `Loaded` takes from it."""

    module: Callable[..., Any]
    signature: Signature
    owner: nn.Module | None
    rows: Rows


# --- torch.export ----------------------------------------------------------------------------


def load_exported(config: ModelConfig, path: Path, device: torch.device | None) -> Program:
    """A program that torch.export.save wrote, moved to the device.

    Raises:
        ArtifactError: this torch cannot load it.
    """
    program = _read_exported(config, path)
    if config.options.enable_weight_sharing is not False:
        _share(program, path)
    if device is not None:
        program = move_to_device_pass(program, device)
    module = program.module()
    spec: Any = program.call_spec.in_spec
    signature = introspection.of_tree(spec, _constants(program), _positional_names(module))
    _refuse_numbers(config, path, program, signature)
    return Program(module, signature, module, _rows(program) if config.max_batch_size else ANY_ROWS)


def _share(program: torch.export.ExportedProgram, path: Path) -> None:
    tables: tuple[dict[str, Any], ...] = (program.state_dict, program.constants)
    for table in tables:
        # As they were read, they are views, whose bases would go on holding the old memory.
        table.update({name: one.data for name, one in table.items() if type(one) is Tensor})
    mapped_files.share((value for table in tables for value in table.values()), path)


def _refuse_numbers(
    config: ModelConfig, path: Path, program: torch.export.ExportedProgram, signature: Signature
) -> None:
    """Numbers that were exported as dynamic: requests carry tensors."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    taken = [one for one in _user_inputs(program) if not hasattr(one, "value")]
    for leaf, argument in zip(signature.leaves or (), taken, strict=False):
        if not isinstance(nodes[argument.name].meta["val"], Tensor):
            raise ArtifactError(
                config.name,
                f"{path.name} takes a number at {leaf}",
                expected="tensors",
                cure="Export it with that number as a constant, or as a tensor.",
            )


def _read_exported(config: ModelConfig, path: Path) -> torch.export.ExportedProgram:
    try:
        return torch.export.load(path)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ArtifactError(
            config.name,
            f"{path.name} is a torch.export program that torch {torch.__version__} cannot load:"
            f" {brief(error)}",
            cure="Write it again with torch.export.save under this version of torch.",
        ) from error


@dataclass(frozen=True, slots=True)
class Described:
    """A program's tensors: name, type and shape (-1: any size) of each; and the rows it takes."""

    inputs: list[tuple[str, torch.dtype, tuple[int, ...]]]
    outputs: list[tuple[str, torch.dtype, tuple[int, ...]]]
    rows: Rows


def describe_exported(config: ModelConfig, path: Path) -> Described:
    """What a program says of itself, without running it.

    Raises:
        ArtifactError: this torch cannot load it.
    """
    program = _read_exported(config, path)
    tree: Any = program.call_spec.in_spec
    signature = introspection.of_tree(
        tree, _constants(program), _positional_names(program.module())
    )
    nodes = {node.name: node for node in program.graph.nodes}
    taken = [one for one in _user_inputs(program) if not hasattr(one, "value")]
    specs: Any = program.call_spec.out_spec
    made = program.graph_signature.user_outputs
    names = results.names(pytree.tree_unflatten(list(range(len(made))), specs))
    return Described(
        [
            _tensor(binding.leaf_name(index, signature), nodes[one.name])
            for index, one in enumerate(taken)
        ],
        # None and numbers in a result are no outputs.
        [_tensor(name, nodes[one]) for name, one in zip(names, made, strict=True) if one in nodes],
        _rows(program),
    )


def _tensor(name: str, node: Any) -> tuple[str, torch.dtype, tuple[int, ...]]:
    value = node.meta["val"]
    return name, value.dtype, tuple(one if isinstance(one, int) else -1 for one in value.shape)


def _positional_names(module: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(module.forward).parameters)  # type: ignore[attr-defined]


def _user_inputs(program: torch.export.ExportedProgram) -> list[Any]:
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is kind]


def _constants(program: torch.export.ExportedProgram) -> dict[int, Any]:
    """Leaves of the call tree that were no tensors when it was exported."""
    return {
        index: argument.value
        for index, argument in enumerate(_user_inputs(program))
        if hasattr(argument, "value")
    }


def _rows(program: torch.export.ExportedProgram) -> Rows:
    """How many rows the program takes: the size of dimension 0 that all its inputs share."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [
        nodes[argument.name].meta["val"]
        for argument in _user_inputs(program)
        if not hasattr(argument, "value")
    ]
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim]
    if len({str(size) for size in sizes}) != 1:
        return ANY_ROWS
    size = sizes[0]
    if isinstance(size, int):
        return Rows(size, size)
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return ANY_ROWS
    # An open end is a sympy infinity.
    most = int(bounds.upper) if bounds.upper.is_Integer else None
    return Rows(max(1, int(bounds.lower)), most)


# --- AOTInductor -----------------------------------------------------------------------------


def misfit(path: Path, device: torch.device | None) -> str:
    """What a package was built for, where that is not what is here; empty where it fits."""
    built = file_types.aoti_metadata(path)
    here = _machine(device)
    wrong = [
        f"{label} {built[key]} (here: {here[key]})"
        for key, label in _LABELS.items()
        if built.get(key) and not _fits(key, built[key], here[key])
    ]
    return ", ".join(wrong)


_LABELS = {
    "AOTI_DEVICE_KEY": "device",
    "AOTI_PLATFORM": "platform",
    "AOTI_MACHINE": "processor",
    "AOTI_CPU_ISA": "instruction set",
    "AOTI_COMPUTE_CAPABILITY": "GPU architecture",
    # Not torch's own: what a package may be stamped with, by inductor's aot_inductor.metadata.
    "torch_version": "torch",
}
# Inductor's names of instruction sets, and the flags of /proc/cpuinfo that they need.
_ISA_FLAGS = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AMX_TILE": "amx_tile",
    "AVX512_BF16": "avx512_bf16",
}


def _machine(device: torch.device | None) -> Mapping[str, str]:
    on_gpu = device is not None and device.type == "cuda"
    flags = _processor_flags()
    return {
        "AOTI_DEVICE_KEY": "cuda" if on_gpu else "cpu",
        "AOTI_PLATFORM": sys.platform,
        "AOTI_MACHINE": platform.machine(),
        "AOTI_CPU_ISA": " ".join(name for name, flag in _ISA_FLAGS.items() if flag in flags),
        "AOTI_COMPUTE_CAPABILITY": _capability(device) if on_gpu else "none",
        "torch_version": torch.__version__,
    }


def _capability(device: torch.device | None) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line.split() for line in lines if line.startswith("flags")), []))


def _fits(key: str, built: str, here: str) -> bool:
    if key == "AOTI_CPU_ISA":
        needed = {name for name in built.split() if name in _ISA_FLAGS}
        return needed <= set(here.split())
    if key == "torch_version":
        return built.partition("+")[0] == here.partition("+")[0]
    return built == here


def device_of(path: Path) -> torch.device:
    """Return the device to try a package on where the config names none yet.

    A package for CUDA runs on no other device. Without a GPU it is the CPU, which `misfit` refuses.
    """
    on_gpu = torch.cuda.is_available() and file_types.built_for_gpu(path)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def load_aoti(config: ModelConfig, path: Path, device: torch.device | None) -> Program:
    """A package that AOTInductor wrote. It is called with its leaves, in its own order.

    Raises:
        ArtifactError: this torch cannot load it.
    """
    # Without it, a wrong shape is not noticed: the program reads past the memory of its inputs.
    # A library reads it once, when it runs for the first time.
    os.environ[_CHECKS] = "1"
    index = device.index if device is not None and device.type == "cuda" else -1
    try:
        # What aoti_load_package ends with. Before that it imports the compiler and builds a library
        # for each instruction set, to warn of what `misfit` has judged: 2 to 10 s.
        open_package = torch._C._aoti.AOTIModelPackageLoader
        loader = open_package(str(path), _ONLY_MODEL, _SINGLE_THREADED, _RUNNERS, index)
        in_spec, out_spec = (pytree.treespec_loads(text) for text in loader.get_call_spec())
    except Exception as error:  # a foreign or damaged package raises nearly anything
        raise ArtifactError(
            config.name,
            f"{path.name} is an AOTInductor package that torch {torch.__version__} cannot load:"
            f" {brief(error)}",
            cure="Build it again with torch._inductor.aoti_compile_and_package under this version"
            " of torch, or name something else to serve with the parameter FALLBACK.",
        ) from error

    def run(*leaves: Tensor) -> list[Tensor]:
        made: list[Tensor] = loader.run(list(leaves))
        return made

    def open_unchecked() -> _Run:
        twin = open_package(str(path), _ONLY_MODEL, _SINGLE_THREADED, _RUNNERS, index)
        return lambda *leaves: twin.run(list(leaves))

    named = introspection.of_tree(in_spec, {})
    # The leaves themselves are the arguments: no tree is built to be taken apart again.
    signature = Signature(named.arguments, named.leaves, lambda columns: (columns, {}))
    rows = _probe(config, signature, run, device)
    called = _with_sizes_of_one(config, signature, run, open_unchecked, rows, device)

    def served(*leaves: Tensor) -> Any:
        return pytree.tree_unflatten(called(*leaves), out_spec)

    return Program(served, signature, None, rows)


# Calls a package with its leaves, and gives those of its result.
_Run: TypeAlias = "Callable[..., list[Tensor]]"
_CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
# As aoti_compile_and_package calls the model; and how aoti_load_package opens it.
_ONLY_MODEL = "model"
_SINGLE_THREADED, _RUNNERS = False, 1
_AT_LEAST = re.compile(r"at 0, expected (?:it )?to be >= (\d+)")
_AT_MOST = re.compile(r"at 0, expected (?:it )?to be <= (\d+)")
_EXACTLY = re.compile(r"unmatched dim value at 0, expected: (\d+)")
_STRIDE = re.compile(r"unmatched stride value at 0")
# More rows than any package states as its limit, in a tensor that holds one.
_ENDLESS = 1 << 31


def _probe(
    config: ModelConfig,
    signature: Signature,
    run: Callable[..., Any],
    device: torch.device | None,
) -> Rows:
    """How many rows a package takes; it does not say so, but it refuses others.

    Packages with a dynamic batch are often built for at least two rows (torch.export takes a size
    of 1 for a constant), or for as many as the kernel that was chosen is made for.
    """
    config = state_store.bound(config, signature)
    if not config.max_batch_size or len(config.inputs) != len(signature.leaves or ()):
        return ANY_ROWS  # binding will say what is wrong
    inputs = binding.bind_inputs(config.name, [spec.name for spec in config.inputs], signature)

    def refusal(rows: int) -> str:
        item = sample_inputs.item(config, rows)
        # The check of inputs refuses another device before it looks at sizes.
        columns = [_moved(item[name], device) for name in inputs.names]
        return _refusal(lambda: inputs.call(run, columns))

    one = refusal(1)
    exactly = _EXACTLY.search(one)
    if exactly:
        return Rows(int(exactly[1]), int(exactly[1]))
    least = _AT_LEAST.search(one)
    most = _AT_MOST.search(refusal(config.max_batch_size))
    return Rows(int(least[1]) if least else 1, int(most[1]) if most else None)


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, Tensor) else value


# A leaf's number, and one of its dimensions.
_Place: TypeAlias = "tuple[int, int]"
_TOO_SMALL = re.compile(r"too small at (\d+), expected (?:it )?to be >= (\d+)")
_ANY_STRIDE = re.compile(r"unmatched stride value at \d+")
# torch.export takes sizes of 0 and 1 for constants: a dimension that varies has at least 2, if
# nothing else is said, although the code is mostly right for 1.
_UNSAID = 2
_MOST_COMBINED = 4
_ROOM = 64


def _with_sizes_of_one(
    config: ModelConfig,
    signature: Signature,
    run: _Run,
    open_unchecked: Callable[[], _Run],
    rows: Rows,
    device: torch.device | None,
) -> _Run:
    """The package, also for sizes of 1 that its runtime checks refuse, where it is right for them.

    `aot_inductor.check_lowerbound` of inductor's config describes these checks. They cannot be
    switched off alone; so the package is opened a second time without any. What it returns for a
    size of 1 is compared with what the checked one returns for 2 (see `_right`).

    Args:
        config: the model's config; its dims of -1 are looked at.
        signature: what the package takes.
        run: calls it.
        open_unchecked: opens it again, without checks.
        rows: how many rows it takes.
        device: where its inputs are.
    """
    config = state_store.bound(config, signature)
    if len(config.inputs) != len(signature.leaves or ()):
        return run  # binding will say what is wrong
    specs = {spec.name: spec for spec in config.inputs}
    names = binding.bind_inputs(config.name, list(specs), signature).names
    start = int(config.max_batch_size > 0)
    varying = {
        (number, start + dim)
        for number, name in enumerate(names)
        for dim, size in enumerate(specs[name].dims)
        if size == -1
    }
    # On a GPU a read past the memory of an input would leave the process without its device.
    if not varying or (device is not None and device.type != "cpu"):
        return run
    item = sample_inputs.item(config, min(max(rows.least, 2), rows.most or 2) if start else None)
    leaves = [value for name in names if isinstance(value := item[name], Tensor)]
    least = _least_sizes(run, leaves, varying)
    if not least:
        return run
    sound: set[frozenset[_Place]] = set()
    combined = list(_combined([at for at, size in least.items() if size == _UNSAID], varying))
    unchecked = run
    if combined:
        os.environ[_CHECKS] = "0"
        try:
            unchecked = open_unchecked()
            with Path(os.devnull).open("wb") as nowhere, _standard_error_to(nowhere.fileno()):
                sound = {one for one in combined if _right(run, unchecked, leaves, one)}
        except RuntimeError as error:  # memory, mostly
            log.warning("model '%s': %s", config.name, brief(error))
        finally:
            os.environ[_CHECKS] = "1"
    if not sound:  # the second copy, and its weights, are let go of
        unchecked = run
    _report_sizes(config, names, least, sound)

    def called(*leaves: Tensor) -> list[Tensor]:
        small = frozenset(at for at, size in least.items() if leaves[at[0]].shape[at[1]] < size)
        if not small:
            return run(*leaves)
        if small in sound and all(leaves[number].shape[dim] == 1 for number, dim in small):
            return unchecked(*leaves)
        number, dim = min(small)
        raise InputError(
            config.name,
            f"input '{names[number]}' is {list(leaves[number].shape)}",
            expected=f"a size of at least {least[number, dim]} in dimension {dim}, for which the"
            " package was compiled",
        )

    return called


def _least_sizes(
    run: _Run, leaves: Sequence[Tensor], varying: Iterable[_Place]
) -> dict[_Place, int]:
    """The sizes that a package takes at least, where that is more than 1.

    It is asked with strides of 0, which it refuses after it has checked sizes: it is never run.
    """
    found = {}
    for number, dim in varying:

        def ask(size: int, number: int = number, dim: int = dim) -> str:
            sizes = [*leaves[number].shape]
            sizes[dim] = size
            asked = [*leaves]
            asked[number] = leaves[number].new_zeros(1).as_strided(sizes, (0,) * len(sizes))
            return _refusal(lambda: run(*asked))

        if _ANY_STRIDE.search(ask(leaves[number].shape[dim])):
            refused = _TOO_SMALL.search(ask(1))
            if refused and int(refused[1]) == dim:
                found[number, dim] = int(refused[2])
    return found


def _combined(places: Sequence[_Place], varying: Collection[_Place]) -> Iterator[frozenset[_Place]]:
    """Which places may be 1 at once: all, and some as long as that is not too much to try.

    Sizes that inputs have in common are not compared without checks. So all other sizes that vary
    are of one input.
    """
    counts = range(1, len(places) + 1)
    if len(places) > _MOST_COMBINED:
        counts = range(len(places), len(places) + 1)
    for count in counts:
        for some in itertools.combinations(sorted(places), count):
            if len({number for number, _ in set(varying).difference(some)}) <= 1:
                yield frozenset(some)


def _right(run: _Run, unchecked: _Run, leaves: Sequence[Tensor], small: Iterable[_Place]) -> bool:
    """Whether an unchecked package computes sizes of 1 as it does a checked size of 2.

    The second element is the first one again, zeros, or another one: a mean, a masked element, and
    what each element has of its own stay the same. Each output has to in one of these cases.
    """
    single, twice, padded, followed = ([*leaves] for _ in range(4))
    for number, dim in small:
        for some in (single, twice, padded, followed):
            some[number] = some[number].narrow(dim, 0, 1)
    for number, dim in small:
        twice[number] = torch.cat([twice[number]] * 2, dim)
        padded[number] = torch.cat([padded[number], torch.zeros_like(padded[number])], dim)
        other = 1 - followed[number] if followed[number].is_floating_point() else followed[number]
        followed[number] = torch.cat([followed[number], other], dim)
    try:
        with torch.inference_mode():
            found = unchecked(*map(_roomy, single))
            found = [one.clone() for one in found]
    except RuntimeError:
        return False
    same = [False] * len(found)
    for others in (twice, padded, followed):
        try:
            with torch.inference_mode():
                wanted = run(*map(_roomy, others))
        except RuntimeError:
            continue
        same = [
            known or _begins_with(whole, one)
            for known, whole, one in zip(same, wanted, found, strict=True)
        ]
    return all(same)


def _roomy(leaf: Tensor) -> Tensor:
    """The same within larger memory: what is read past it by mistake is there, and is 0."""
    memory = leaf.new_zeros(_ROOM * leaf.numel())
    return memory[: leaf.numel()].view(leaf.shape).copy_(leaf)


def _begins_with(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor has the values of another one at its beginning, but for rounding."""
    if whole.ndim != part.ndim or whole.dtype != part.dtype:
        return False
    for dim, size in enumerate(part.shape):
        if size > whole.shape[dim]:
            return False
        whole = whole.narrow(dim, 0, size)
    if not whole.is_floating_point():
        return torch.equal(whole, part)
    tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(whole, part, rtol=tolerance, atol=tolerance, equal_nan=True)


def _report_sizes(
    config: ModelConfig,
    names: Sequence[str],
    least: Mapping[_Place, int],
    sound: Collection[frozenset[_Place]],
) -> None:
    alone = {at for some in sound for at in some}
    if alone:
        log.info(
            "model '%s': sizes of 1 in %s are computed by a second copy of the package, without"
            " runtime checks.",
            config.name,
            ", ".join(f"dimension {dim} of '{names[number]}'" for number, dim in sorted(alone)),
        )
    unsaid = {at for at, size in least.items() if size == _UNSAID}
    for number, dim in sorted(unsaid - alone):
        log.warning(
            "model '%s': a size of 1 in dimension %d of input '%s' is refused: the package was"
            " compiled for at least 2, and was not seen to be right for 1. Compile it with"
            ' inductor_configs={"aot_inductor.check_lowerbound": False} to serve it.',
            config.name,
            dim,
            names[number],
        )


def most_rows(call: Callable[[Sequence[Any]], Any], columns: Sequence[Tensor]) -> int | None:
    """How many rows a package takes at most; None: any number, or it does not say.

    It is asked with rows that share one row's memory. A package that checks strides refuses those
    after it has checked their number, so it is never run; another is not asked.
    """
    # With memory for each row all the same: this question may be answered without checks.
    doubled = [torch.cat([column, column]) for column in columns]
    shared = [column[:1].expand(column.shape) for column in doubled]
    if not _STRIDE.search(_refusal(lambda: call(shared))):
        return None
    endless = [column[:1].expand(_ENDLESS, *column.shape[1:]) for column in columns]
    most = _AT_MOST.search(_refusal(lambda: call(endless)))
    return int(most[1]) if most else None


def _refusal(ask: Callable[[], Any]) -> str:
    """What a package says of its inputs; empty where it takes them."""
    with tempfile.TemporaryFile() as kept:
        with _standard_error_to(kept.fileno()):
            said = _said(ask)
        known = (_AT_LEAST, _AT_MOST, _EXACTLY, _STRIDE, _TOO_SMALL, _ANY_STRIDE)
        if not any(one.search(said) for one in known):
            kept.seek(0)
            for line in kept:
                os.write(2, line)
    return said


def _said(ask: Callable[[], Any]) -> str:
    try:
        with torch.inference_mode():
            ask()
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """AOTInductor's runtime prints what it raises, and knows nothing of Python's streams."""
    try:
        before = os.dup(2)
    except OSError:  # it is closed: nothing is heard anyway
        yield
        return
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
