"""Packages that AOTInductor compiled ahead of time."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.loading import package_weights, size_probing
from torch_py_backend.loading.loaded import Loaded, refuse_method, warn_unused
from torch_py_backend.processes import orphan_cleanup
from torch_py_backend.signature import introspection
from torch_py_backend.signature.arguments import Signature


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load a package. It is called with its leaves, in the order of the package.

    The owner of the result has the weights of a package that was compiled without them.

    Raises:
        ArtifactError: it was built for another machine, this torch cannot load it, or it has no
            weights.
        WeightsError: the weights do not fit the package.
        ConfigError: METHOD is set.
    """
    path = artifact.path
    refuse_method(artifact, config)
    difference = mismatch(path, device)
    if difference:
        raise ArtifactError(
            config.name,
            f"{path.name} was built for {difference}",
            cure=""
            if artifact.fallback is not None
            else "Serve it on such a machine, build it for this one, or name an exported program or"
            " a model.py to serve instead with the parameter FALLBACK.",
        )
    owner = package_weights.read(config, artifact, device)
    warn_unused(config, "model_class", "model_kwargs", *([] if owner else ["weights"]))
    # Without the checks, a package reads past the memory of inputs whose shapes are wrong.
    os.environ[size_probing.CHECKS] = "1"
    index = device.index if device is not None and device.type == "cuda" else -1

    with contextlib.ExitStack() as files:
        # Not where torch would unpack it: a process that Triton ends does not remove that.
        folder = tempfile.mkdtemp(prefix="torch_py_backend-", dir=orphan_cleanup.server_folder())
        files.callback(shutil.rmtree, folder, ignore_errors=True)

        def set_constants() -> None:
            if owner is not None:
                # Not a copy: the package keeps the tensors and the addresses of their memory.
                # keep_vars: views would be second users of the memory, which could not be replaced.
                weights = owner.state_dict(keep_vars=True)
                package.load_constants(
                    weights, use_inactive=False, check_full_update=True, user_managed=True
                )

        try:
            # aoti_load_package ends with this call. Before that, it imports the compiler and builds
            # a library for each instruction set, to warn of what `mismatch` has compared, in 2 to
            # 10 s.
            # It passes the same name of the model, "not single-threaded", and one runner.
            with _temporary_folder(folder):
                package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)  # noqa: FBT003
            package_weights.refuse_unknown(config, path, package.get_constant_fqns(), Path(folder))
            set_constants()
            in_spec, out_spec = (pytree.treespec_loads(text) for text in package.get_call_spec())
        except ArtifactError:
            raise
        except Exception as error:  # a foreign or damaged package raises nearly anything
            raise ArtifactError(
                config.name,
                f"{path.name} is an AOTInductor package that torch {torch.__version__} cannot load:"
                f" {summarize(error)}",
                cure="Build it again with torch._inductor.aoti_compile_and_package under this"
                " version of torch, or name something else to serve with the parameter FALLBACK.",
            ) from error
        tree = introspection.from_tree(in_spec, {})
        # The leaves are the arguments: a tree would only be built to be flattened again.
        signature = Signature(tree.arguments, tree.leaves, lambda columns: (columns, {}))
        rows, call = size_probing.probe(config, signature, package.run, device)

        def module(*leaves: Tensor) -> Any:
            return pytree.tree_unflatten(call(list(leaves)), out_spec)

        # Removed before the process ends, too: a package on a GPU reads its kernels when it needs
        # them.
        close = weakref.finalize(module, files.pop_all().close)

    return Loaded(
        artifact, module, signature, owner, rows, close=close, weights_moved=set_constants
    )


@contextlib.contextmanager
def _temporary_folder(folder: str) -> Iterator[None]:
    """Let torch create its temporary files in a folder."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def device_of(path: Path) -> torch.device:
    """Return the device to try a package on where the config names none yet.

    A package for CUDA runs on no other device. Without a GPU the CPU is returned, and `mismatch`
    reports the difference.
    """
    on_gpu = torch.cuda.is_available() and file_types.is_cuda_package(path)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# --- the machine that a package was built for ------------------------------------------------

_LABELS = {
    "AOTI_DEVICE_KEY": "device",
    "AOTI_PLATFORM": "platform",
    "AOTI_MACHINE": "processor",
    "AOTI_CPU_ISA": "instruction set",
    "AOTI_COMPUTE_CAPABILITY": "GPU architecture",
    # Not set by torch: a package may have it through inductor's aot_inductor.metadata.
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


def mismatch(path: Path, device: torch.device | None) -> str:
    """Return how the machine that a package was built for differs from this one; empty: it fits."""
    built = file_types.aoti_metadata(path)
    here = this_machine(device)
    return ", ".join(
        f"{label} {built[key]} (here: {here[key]})"
        for key, label in _LABELS.items()
        if built.get(key) and not _fits(key, built[key], here[key])
    )


def this_machine(device: torch.device | None) -> dict[str, str]:
    """Return the facts of this machine under the keys of a package's metadata."""
    on_gpu = device is not None and device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else ()
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    return {
        "AOTI_DEVICE_KEY": "cuda" if on_gpu else "cpu",
        "AOTI_PLATFORM": sys.platform,
        "AOTI_MACHINE": platform.machine(),
        "AOTI_CPU_ISA": " ".join(name for name, flag in _ISA_FLAGS.items() if flag in flags),
        "AOTI_COMPUTE_CAPABILITY": "".join(map(str, capability)) or "none",
        "torch_version": torch.__version__,
    }


def _fits(key: str, built: str, here: str) -> bool:
    if key == "AOTI_CPU_ISA":
        needed = {name for name in built.split() if name in _ISA_FLAGS}
        return needed <= set(here.split())
    if key == "torch_version":
        return built.partition("+")[0] == here.partition("+")[0]
    return built == here
