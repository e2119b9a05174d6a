"""What torch.compile made, kept on disk: the next start loads it instead of compiling.

A bundle is a line of JSON that says what it is for, with the payload's hash, then the payload: a
zip of PyTorch's own portable bundle (`torch.compiler.save_cache_artifacts`) and of the libraries
that inductor built for the CPU, which PyTorch's leaves out. Loading it runs compiled code from it:
it is loaded only where nobody but this user could have written it.

The first line also names the vector instructions that inductor may use: in every start it would
else try out each in a process of its own (1 s of a warm start with torch 2.13 and AVX-512).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import logging
import os
import platform
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, PlatformError, brief
from torch_py_backend.processes import private_files

log = logging.getLogger(__name__)

_FOLDER = "compile_cache"
# Options that change what is compiled.
_COMPILED = ("torch_compile_optional_parameters", "optimize", "batch_buckets", "pad", "method")


def at(config: ModelConfig, artifact: Artifact, device: torch.device) -> Bundle | None:
    """The bundle of a model on a device; None: nothing is to be kept, or cannot be.

    Raises:
        ConfigError: COMPILE_CACHE_DIR leads out of the model's folder.
        PlatformError: COMPILE_CACHE_DIR cannot be written.
    """
    _settle()
    wished = config.options.compile_cache_dir
    if wished is not None and wished.lower() == "none":
        return None
    folder = config.folder / _FOLDER if wished is None else _named(config, wished)
    facts = _facts(config, artifact, device)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    vectors = device.type == "cpu" and torch_compile.by_inductor(config)
    bundle = Bundle(config.name, folder / f"{config.name}-{digest[:16]}.bundle", facts, vectors)
    try:
        reason = private_files.make(folder)
        if reason:
            log.warning(
                "model '%s': %s is ignored, and nothing is kept there: %s. Only its owner may"
                " write a folder that code is loaded from.",
                config.name,
                folder,
                reason,
            )
            return None
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if wished is not None:
            raise PlatformError(
                config.name,
                f"COMPILE_CACHE_DIR is '{wished}', which cannot be written: {brief(error)}",
                cure='Name another folder, or "none".',
            ) from error
        # Not is_file(): it raises where another user alone may enter the folder.
        if not os.access(bundle.path, os.R_OK, effective_ids=True):
            log.info("model '%s': %s cannot be written: nothing is kept.", config.name, folder)
            return None
    return bundle


def _named(config: ModelConfig, wished: str) -> Path:
    """COMPILE_CACHE_DIR: a folder of the model's, or anywhere by an absolute path."""
    try:
        named = Path(wished).expanduser()
        folder = (config.folder / named).resolve()
        leaves = not named.is_absolute() and not folder.is_relative_to(config.folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, a user that is unknown, links in a circle
        leaves = True
    if leaves:
        raise ConfigError(
            config.name,
            f"COMPILE_CACHE_DIR is '{wished}'",
            expected="a folder in the model's own, or an absolute path",
        )
    return folder


def _facts(config: ModelConfig, artifact: Artifact, device: torch.device) -> Mapping[str, Any]:
    """What a bundle depends on."""
    return {
        "model": _hash(config, artifact),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "rows": config.max_batch_size,
        "inputs": [str(spec) for spec in config.inputs],
        "options": {key: repr(getattr(config.options, key)) for key in _COMPILED},
    }


def _processor() -> str:
    """What inductor's kernels for the CPU are made for."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _hash(config: ModelConfig, artifact: Artifact) -> str:
    """Of the code, with its name; of weights, which compiled code does not hold, the size."""
    found = hashlib.sha256()
    files = {*config.version_folder.glob("**/*.py"), artifact.path, artifact.weights}
    for path in sorted(file for file in files if file is not None and file.is_file()):
        found.update(f"{path.name} {path.stat().st_size}".encode())
        if path is not artifact.weights:
            with path.open("rb") as file:
                for piece in iter(lambda: file.read(1 << 20), b""):  # noqa: B023  called here
                    found.update(piece)
    return found.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle on disk.

    Attributes:
        model: the model's name.
        path: the file.
        facts: what it is for.
        vectors: whether inductor looks for vector instructions.
    """

    model: str
    path: Path
    facts: Mapping[str, Any]
    vectors: bool

    @contextlib.contextmanager
    def used(self) -> Iterator[bool]:
        """Compile within: with what is kept; else the first of several instances keeps it.

        The others wait for the first, and then load what it has kept. Gives whether there was
        anything.
        """
        with _own_cache(self.path.stem) as cache:
            if self._load(cache, logging.DEBUG):  # what is wrong with it, is told below
                yield True
                return
            with _locked(self.path.with_suffix(".lock")):
                found = self._load(cache, logging.WARNING)
                # Before anything is compiled: the answer is part of the keys in inductor's cache.
                names = _find_vectors(self.model) if self.vectors and not found else []
                yield found
                if not found:
                    self._save(cache, names)

    def _load(self, cache: Path, level: int) -> bool:
        if not self.path.is_file():
            return False
        try:
            line, _, payload = private_files.read(self.path).partition(b"\n")
            header = json.loads(line)
            if header["facts"] != self.facts:
                raise ValueError("it is for another model, torch, device or config")
            if header["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("it is damaged")
            _unpack(payload, cache)
            if self.vectors:
                _take_vectors(header["vectors"])
        except Exception as error:  # whatever a file of this name may hold
            log.log(
                level, "model '%s': %s is ignored: %s.", self.model, self.path.name, brief(error)
            )
            return False
        return True

    def _save(self, cache: Path, vectors: Sequence[str]) -> None:
        made = torch.compiler.save_cache_artifacts()
        libraries = sorted(cache.glob("**/*.so"))
        if made is None and not libraries:  # a backend that keeps nothing
            return
        payload = _pack(made[0] if made else b"", libraries, cache)
        header = {
            "facts": self.facts,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "vectors": vectors,
        }
        try:
            _write(self.path, json.dumps(header).encode() + b"\n" + payload)
        except OSError as error:  # a full disk: the model serves all the same
            log.warning(
                "model '%s': %s cannot be kept: %s.", self.model, self.path.name, brief(error)
            )


_TORCHS = "torch.bundle"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def _settle() -> None:
    """Give inductor a folder that is this user's alone: its own has a name that anyone may take."""
    named, reason = os.environ.get(_VARIABLE), ""
    try:
        reason = private_files.make(Path(named)) if named else ""
    except OSError as error:
        reason = brief(error)
    if reason:
        log.warning("%s, %s, is not used: %s.", _VARIABLE, named, reason)
    if reason or not named:
        os.environ[_VARIABLE] = str(private_files.of_user())


def _find_vectors(model: str) -> list[str]:
    """The vector instructions that inductor may use here; it does not look for them again."""
    try:
        found = _vectors()
        _take_vectors(found)
    except Exception as error:  # a torch that arranges this otherwise: it goes on looking
        log.info("model '%s': %s; inductor looks for them itself.", model, brief(error))
        return []
    return found


def _take_vectors(names: Sequence[str]) -> None:
    """Spare inductor the search for vector instructions, where it would end with these."""
    from torch._inductor import config, cpu_vec_isa  # noqa: PLC0415  only who compiles pays it

    # Nothing was noted, or TORCHINDUCTOR_VEC_ISA_OK is set: the user's word.
    if not names or config.cpp.vec_isa_ok is not None:
        return
    forget = cpu_vec_isa.valid_vec_isa_list.cache_clear
    config.cpp.vec_isa_ok = True
    forget()
    if _vectors() != names:  # the compiler knows fewer than the processor
        config.cpp.vec_isa_ok = None
        forget()


def _vectors() -> list[str]:
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415

    return [str(one) for one in cpu_vec_isa.valid_vec_isa_list()]


@contextlib.contextmanager
def _own_cache(name: str) -> Iterator[Path]:
    """Inductor's folder for this model alone: what lies there afterwards, is the model's."""
    before = os.environ[_VARIABLE]
    cache = Path(before) / name
    os.environ[_VARIABLE] = str(cache)
    try:
        yield cache
    finally:
        os.environ[_VARIABLE] = before


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever reads it meanwhile and whatever becomes of this process."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        scratch = Path(file.name)
        try:
            file.write(content)
            file.flush()
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def _pack(made: bytes, libraries: Sequence[Path], cache: Path) -> bytes:
    """The same bytes of the same content, whenever it was made.

    Args:
        made: PyTorch's bundle; empty where it keeps no graph, as none with weights that "freeze"
            has packed for oneDNN. Those are lowered in every start, but their kernels, which take
            most of the time, are not built again.
        libraries: the kernels.
        cache: the folder that they lie in.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # An entry that is described by its name alone has no time.
        archive.writestr(zipfile.ZipInfo(_TORCHS), made, zipfile.ZIP_DEFLATED)
        for library in libraries:
            entry = zipfile.ZipInfo(library.relative_to(cache).as_posix())
            archive.writestr(entry, library.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _unpack(payload: bytes, cache: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        for entry in archive.infolist():
            if entry.filename == _TORCHS:
                continue
            library = (cache / entry.filename).resolve()
            if not library.is_relative_to(cache.resolve()):
                raise ValueError(f"it holds {entry.filename}, which leads out of its folder")
            # One that is whole may be in use; a start that was killed may have left another.
            if not library.is_file() or library.stat().st_size != entry.file_size:
                library.parent.mkdir(parents=True, exist_ok=True)
                _write(library, archive.read(entry))
                library.chmod(0o700)
        made = archive.read(_TORCHS)
        if made and torch.compiler.load_cache_artifacts(made) is None:
            raise ValueError("torch does not take it")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While no other process has it; the kernel takes it back from one that dies."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:  # read-only
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
