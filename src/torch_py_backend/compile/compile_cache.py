"""Compiled code on disk: the next start loads what torch.compile made instead of compiling.

A bundle is a line of JSON with the facts that it depends on and the payload's hash, then the
payload: a ZIP archive of PyTorch's portable bundle (`torch.compiler.save_cache_artifacts`) and of
the libraries that inductor built for the CPU, which PyTorch's bundle does not contain. Loading it
runs code from it, so it is loaded only if no other user can have written it.

The first line also names the vector instruction sets that inductor may use (`vector_isa`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_py_backend import files
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.compile import torch_compile, vector_isa
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, PlatformError, join_names, summarize
from torch_py_backend.processes import private_files

log = logging.getLogger(__name__)

_FOLDER = "compile_cache"
# Options that change the compiled code.
_OPTIONS = ("torch_compile_optional_parameters", "optimize", "batch_buckets", "pad", "method")


def at(config: ModelConfig, artifact: Artifact, device: torch.device) -> Bundle | None:
    """Return the bundle of a model on a device; None: there is none, and none can be written.

    Raises:
        ConfigError: COMPILE_CACHE_DIR is a path outside of the model's folder.
        PlatformError: COMPILE_CACHE_DIR cannot be written.
    """
    _use_private_folder()
    bundle = locate(config, artifact, device)
    if bundle is None:
        return None
    option, folder = config.options.compile_cache_dir, bundle.path.parent
    try:
        reason = private_files.create(folder)
        if reason:
            log.warning(
                "model '%s': %s is ignored, and nothing is written there: %s. Only its owner may"
                " have write access to a folder that code is loaded from.",
                config.name,
                folder,
                reason,
            )
            return None
        files.check_writable(folder)
    except OSError as error:
        if option is not None:
            raise PlatformError(
                config.name,
                f"COMPILE_CACHE_DIR is '{option}', which cannot be written: {summarize(error)}",
                cure='Name another folder, or "none".',
            ) from error
        # Not is_file(): it raises if only another user may enter the folder.
        if not os.access(bundle.path, os.R_OK, effective_ids=True):
            log.info(
                "model '%s': %s cannot be written: compiled code is not kept.", config.name, folder
            )
            return None
    return bundle


def locate(config: ModelConfig, artifact: Artifact, device: torch.device) -> Bundle | None:
    """Return the bundle of a model, which may not exist; None if COMPILE_CACHE_DIR is "none".

    Raises:
        ConfigError: COMPILE_CACHE_DIR is a path outside of the model's folder.
    """
    option = config.options.compile_cache_dir
    if option is not None and option.lower() == "none":
        return None
    folder = config.folder / _FOLDER if option is None else _resolve_folder(config, option)
    requirements = facts(config, artifact, device)
    digest = hashlib.sha256(json.dumps(requirements, sort_keys=True).encode()).hexdigest()
    uses_vectors = device.type == "cpu" and torch_compile.by_inductor(config)
    path = folder / f"{config.name}-{digest[:16]}.bundle"
    return Bundle(config.name, path, requirements, uses_vectors)


def _resolve_folder(config: ModelConfig, option: str) -> Path:
    """Return the folder of COMPILE_CACHE_DIR: inside the model's folder, or an absolute path."""
    try:
        path = Path(option).expanduser()
        folder = (config.folder / path).resolve()
        allowed = path.is_absolute() or folder.is_relative_to(config.folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, an unknown user, circular links
        allowed = False
    if not allowed:
        raise ConfigError(
            config.name,
            f"COMPILE_CACHE_DIR is '{option}'",
            expected="a folder in the model's own, or an absolute path",
        )
    return folder


def facts(config: ModelConfig, artifact: Artifact, device: torch.device) -> Mapping[str, Any]:
    """Return the facts that a bundle depends on."""
    # The code and the size of the weights, whose values are not in compiled code.
    digest = hashlib.sha256()
    files = {*config.version_folder.glob("**/*.py"), artifact.path, artifact.weights}
    for path in sorted(file for file in files if file is not None and file.is_file()):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        if path is not artifact.weights:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    return {
        "model": digest.hexdigest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "rows": config.max_batch_size,
        "inputs": [str(spec) for spec in config.inputs],
        "options": {key: repr(getattr(config.options, key)) for key in _OPTIONS},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle on disk.

    Attributes:
        model: the model's name.
        path: the file.
        facts: the facts that it depends on.
        uses_vectors: whether inductor compiles for the vector instructions of the CPU.
    """

    model: str
    path: Path
    facts: Mapping[str, Any]
    uses_vectors: bool

    @contextlib.contextmanager
    def used(self) -> Iterator[bool]:
        """Load the bundle for the code within; if there is none, save what the code compiles.

        Of several instances, the first compiles, and the others wait and load its bundle. Yields
        whether the bundle was loaded.
        """
        with _own_cache(self.path.stem) as cache:
            if self._load(cache, logging.DEBUG):  # the second attempt logs an error as a warning
                yield True
                return
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # a read-only folder
                    stack.enter_context(private_files.locked(self.path.with_suffix(".lock")))
                loaded = self._load(cache, logging.WARNING)
                # Before compilation: the instruction sets are part of the keys in inductor's cache.
                detects = self.uses_vectors and not loaded
                vectors = vector_isa.detect(self.model) if detects else []
                yield loaded
                if not loaded:
                    self._save(cache, vectors)

    def _load(self, cache: Path, level: int) -> bool:
        if not self.path.is_file():
            return False
        try:
            payload, vectors = self._parse(private_files.read(self.path))
            unpack(payload, cache)
            if self.uses_vectors:
                vector_isa.restore(vectors)
        except Exception as error:  # a file of this name may contain anything
            log.log(
                level,
                "model '%s': %s is ignored: %s.",
                self.model,
                self.path.name,
                summarize(error),
            )
            return False
        return True

    def _parse(self, content: bytes) -> tuple[bytes, Sequence[str]]:
        """Return the payload and the instruction sets; raise if the bundle is another one."""
        line, _, payload = content.partition(b"\n")
        header = json.loads(line)
        if header["facts"] != self.facts:
            raise ValueError(
                f"it differs from this start: {_differences(header['facts'], self.facts)}"
            )
        if header["sha256"] != hashlib.sha256(payload).hexdigest():
            raise ValueError("it is damaged")
        return payload, header["vectors"]

    def obstacle(self, content: bytes) -> str:
        """Return why a start here would not use this bundle, as a clause; empty: it would."""
        try:
            _, vectors = self._parse(content)
            if self.uses_vectors and not vector_isa.restore(vectors):
                return f"it was compiled for {', '.join(vectors)}, which inductor does not use here"
        except Exception as error:  # a file from elsewhere may contain anything
            return summarize(error)
        return ""

    def _save(self, cache: Path, vectors: Sequence[str]) -> None:
        artifacts = torch.compiler.save_cache_artifacts()
        libraries = sorted(cache.glob("**/*.so"))
        if artifacts is None and not libraries:  # a compiler backend without a cache
            return
        payload = pack(artifacts[0] if artifacts else b"", libraries, cache)
        header = {
            "facts": self.facts,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "vectors": vectors,
        }
        try:
            files.replace(self.path, json.dumps(header).encode() + b"\n" + payload, 0o600)
        except OSError as error:  # a full disk does not prevent serving
            log.warning(
                "model '%s': %s cannot be kept: %s.", self.model, self.path.name, summarize(error)
            )


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the facts of a bundle that differ from those of a start, with both values."""
    differences = []
    if there["model"] != here["model"]:  # digests
        differences.append("the model's code or the size of its weights")
    named = [
        {
            **{key: facts[key] for key in ("torch", "python", "device", "inputs")},
            "max_batch_size": facts["rows"],
            **{key.upper(): value for key, value in facts["options"].items()},
        }
        for facts in (there, here)
    ]
    for name, value in named[1].items():
        if named[0].get(name) != value:
            differences.append(f"{name} is {named[0].get(name)} there and {value} here")
    return join_names(differences)


_TORCH_BUNDLE = "torch.bundle"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def _use_private_folder() -> None:
    """Set inductor's cache to a private folder: any user can create its default folder."""
    folder, reason = os.environ.get(_VARIABLE), ""
    try:
        reason = private_files.create(Path(folder)) if folder else ""
    except OSError as error:
        reason = summarize(error)
    if reason:
        log.warning("%s, %s, is not used: %s.", _VARIABLE, folder, reason)
    if reason or not folder:
        os.environ[_VARIABLE] = str(private_files.user_folder())


@contextlib.contextmanager
def _own_cache(name: str) -> Iterator[Path]:
    """Set inductor's cache to a folder of this model only, and yield it."""
    before = os.environ[_VARIABLE]
    cache = Path(before) / name
    os.environ[_VARIABLE] = str(cache)
    try:
        yield cache
    finally:
        os.environ[_VARIABLE] = before


def pack(artifacts: bytes, libraries: Sequence[Path], cache: Path) -> bytes:
    """Return a ZIP archive whose bytes depend on its content only.

    Args:
        artifacts: PyTorch's bundle. It is empty if it has no graph, as with weights that "freeze"
            has packed for oneDNN. Those graphs are lowered in every start, but their kernels, which
            take most of the time, are not built again.
        libraries: the kernels.
        cache: the folder of the kernels.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # A ZipInfo without a time has a constant one.
        archive.writestr(zipfile.ZipInfo(_TORCH_BUNDLE), artifacts, zipfile.ZIP_DEFLATED)
        for library in libraries:
            entry = zipfile.ZipInfo(library.relative_to(cache).as_posix())
            archive.writestr(entry, library.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def unpack(payload: bytes, cache: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        for entry in archive.infolist():
            if entry.filename == _TORCH_BUNDLE:
                continue
            library = (cache / entry.filename).resolve()
            if not library.is_relative_to(cache.resolve()):
                raise ValueError(f"it holds {entry.filename}, which leads out of its folder")
            # A complete library may be in use. A start that was killed may leave an incomplete one.
            if not library.is_file() or library.stat().st_size != entry.file_size:
                library.parent.mkdir(parents=True, exist_ok=True)
                files.replace(library, archive.read(entry), 0o700)
        artifacts = archive.read(_TORCH_BUNDLE)
        if artifacts and torch.compiler.load_cache_artifacts(artifacts) is None:
            raise ValueError("torch cannot load it")
