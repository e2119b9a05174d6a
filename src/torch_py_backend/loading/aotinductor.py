"""Packages that AOTInductor compiled ahead of time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, InputError
from torch_py_backend.loading import discovery, example_inputs
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.processes import instance_status
from torch_py_backend.signature import binding, introspection
from torch_py_backend.values import ANY_ROWS, Rows

log = logging.getLogger(__name__)

# A package reads it when it first runs. Without checks, it reads past inputs of wrong shapes.
_CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
# Messages of the checks: "input_handles[0]: dim value is too small". Up to torch 2.11 only printed.
REFUSED = re.compile(r"input_handles\[(\d+)\]: (.*)")


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load a package, which takes its leaves, or raises InputError with torch's reason."""
    path = artifact.path
    difference = mismatch(path, device)
    if difference:
        raise ArtifactError(
            f"{path.name} was built for {difference}",
            cure="Serve it on such a machine, or build it for this one.",
        )
    package, out_spec, close = open_package(path, device)
    in_spec = pytree.treespec_loads(package.get_call_spec()[0])
    # A tree would only be built to be flattened again.
    signature = dataclasses.replace(introspection.from_tree(in_spec, {}), unflatten=None)
    config = binding.with_controls(config, signature)
    names = tuple(signature.leaves or ())
    # Inputs of hooks, or of a wrong number, are others than the leaves.
    fits = len(names) == len(config.inputs) and all(spec.dtype.torch for spec in config.inputs)
    if fits:
        names = binding.bind_inputs([spec.name for spec in config.inputs], signature).names

    def module(*leaves: Tensor) -> object:
        try:
            results = package.run(list(leaves))
        except RuntimeError as error:
            refused = REFUSED.search(str(error))
            if refused is None:
                raise
            name, reason = names[int(refused[1])], refused[2]
            raise InputError(
                f"input '{name}' does not fit the compiled package: {reason}"
            ) from error
        return pytree.tree_unflatten(results, out_spec)

    rows = ANY_ROWS
    if fits and config.max_batch_size:
        item = example_inputs.item(config, 1)
        try:
            with torch.inference_mode():
                # The checks compare devices before sizes.
                module(*(torch.as_tensor(item[name]).to(device or "cpu") for name in names))
        except (RuntimeError, InputError):  # up to torch 2.11, torch prints the reason
            log.info("%s takes at least two rows; a single one is filled up.", path.name)
            rows = Rows(2)  # torch.export specializes a size of 1
    return Loaded(artifact, module, signature, rows=rows, close=close)


def open_package(
    path: Path, device: torch.device | None
) -> tuple[Any, pytree.TreeSpec, Callable[[], object]]:
    """Open a package; return it, the tree of its results, and what removes its temporary files.

    Those stay until the process ends: a package on a GPU reads its kernels when it needs them.
    """
    os.environ[_CHECKS] = "1"
    index = device.index if device is not None and device.type == "cuda" else -1
    with contextlib.ExitStack() as files:
        # Not where torch would unpack it: a process that Triton ends does not remove that.
        folder = tempfile.mkdtemp(prefix="torch_py_backend-", dir=instance_status.folder())
        files.callback(shutil.rmtree, folder, ignore_errors=True)
        # aoti_load_package ends with this call. Before that, it imports the compiler and builds a
        # library for each instruction set, to warn of what `mismatch` has compared, in 2 to 10 s.
        before = os.environ.get("TMPDIR", tempfile.gettempdir())
        os.environ["TMPDIR"] = folder
        try:
            package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)  # noqa: FBT003
            result = pytree.treespec_loads(package.get_call_spec()[1])
        finally:
            os.environ["TMPDIR"] = before
        return package, result, weakref.finalize(package, files.pop_all().close)


def compile_program(
    program: ExportedProgram,
    path: Path,
    options: Mapping[str, object],
) -> None:
    """Compile a program to a package, with those options of inductor that this torch has."""
    from torch._inductor import aoti_compile_and_package, config  # noqa: PLC0415  slow

    known = config.get_config_copy()
    # Inductor would keep the headers in a folder in /tmp whose name another user can predict.
    options = {"aot_inductor.precompile_headers": False, **options}
    options = {name: value for name, value in options.items() if name in known}
    aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


# Inductor's names of instruction sets, and whether this machine has them.
_INSTRUCTIONS = {
    "AVX2": torch.cpu._is_avx2_supported,
    "AVX512": torch.cpu._is_avx512_supported,
    "AVX512_VNNI": torch.cpu._is_vnni_supported,
    "AMX_TILE": torch.cpu._is_amx_tile_supported,
    "AVX512_BF16": torch.cpu._is_avx512_bf16_supported,
}


def mismatch(path: Path, device: torch.device | None) -> str:
    """Return how the machine that a package was built for differs from this one; empty: it fits."""
    built = discovery.aoti_metadata(path)
    differences = []
    for key, (label, here) in this_machine(device).items():
        value, _, _ = built.get(key, "").partition("+")
        needed = set(value.split())
        if key == "AOTI_CPU_ISA":
            needed &= _INSTRUCTIONS.keys()
        if not needed.issubset(here.split()):
            differences.append(f"{label} {built[key]} (here: {here})")
    return ", ".join(differences)


def this_machine(device: torch.device | None) -> dict[str, tuple[str, str]]:
    """Return what this machine is under the keys of a package's metadata, with the words for it."""
    on_gpu = device is not None and device.type == "cuda"
    capability = "none"
    if on_gpu:
        capability = "".join(map(str, torch.cuda.get_device_capability(device)))
    instructions = " ".join(name for name, is_there in _INSTRUCTIONS.items() if is_there())
    return {
        "AOTI_DEVICE_KEY": ("device", "cuda" if on_gpu else "cpu"),
        "AOTI_MACHINE": ("processor", platform.machine()),
        "AOTI_CPU_ISA": ("instruction set", instructions),
        "AOTI_COMPUTE_CAPABILITY": ("GPU architecture", capability),
        # Not set by torch: a package may have it through inductor's aot_inductor.metadata.
        "torch_version": ("torch", torch.__version__.partition("+")[0]),
    }
