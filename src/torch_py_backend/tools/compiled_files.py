"""The files that compiling and tuning made for a model on a type of machine.

They are the bundle of the compile cache, an AOTInductor package and an entry of tuned.json. To be
run in a child process: an incomplete config and a model of sequences run the model's code.
"""

from __future__ import annotations

import dataclasses
import filecmp
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.batching import runtime
from torch_py_backend.compile import compile_cache, torch_compile
from torch_py_backend.compile.compile_cache import Bundle
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    join_names,
    printable,
    summarize,
)
from torch_py_backend.loading import aotinductor
from torch_py_backend.processes import private_files
from torch_py_backend.startup import builder
from torch_py_backend.tools import compiled_folder

_NOT_COMPILED = (ArtifactType.TORCHSCRIPT, ArtifactType.AOTI)
_CURE = "Compile it here with `torch-py-backend check`, or import what such a machine exported."


def export(arguments: Mapping[str, str], target: str) -> dict[str, Any]:
    """Copy the compiled files of a model on this machine into a new folder.

    Returns:
        `files`, their names; `beside`, the SHA-256 of each file beside a package; `missing`, why
        compiled code is left out.

    Raises:
        LoadError: the model's config or files are invalid, or the files cannot be copied.
    """
    config, folder = tuned_settings.apply(model_config.parse(arguments)), Path(target)
    bundle, package = used(config)
    # A package was compiled from the files beside it.
    beside = compiled_folder.digests(package.parent, [package]) if package is not None else {}
    missing = ""
    try:
        if package is not None and not beside:
            missing = f"{package.name} is the whole model: copy its folder"
        elif package is not None:
            shutil.copyfile(package, _new(folder / package.parent.name) / package.name)
        elif bundle is not None:
            content, missing = _read(bundle)
            if not missing:
                (_new(folder / "compile_cache") / bundle.path.name).write_bytes(content)
        machine = tuned_settings.fingerprint(tuned_settings.machine_facts())
        if entry := tuned_settings.entries(config.folder).get(machine):
            tuned_settings.save(_new(folder), entry)
    except OSError as error:
        raise ArtifactError(config.name, f"its files cannot be copied: {error}") from error
    names = sorted(path.name for path in folder.rglob("*") if path.is_file())
    return {"files": names, "beside": beside, "missing": missing}


def used(config: ModelConfig) -> tuple[Bundle | None, Path | None]:
    """Return the bundle or the AOTInductor package that a start with a config uses, if any.

    Raises:
        LoadError: the model's files are invalid.
    """
    device, artifact = runtime.placement(config), discovery.find(config)
    if artifact.kind is ArtifactType.AOTI and not aotinductor.mismatch(artifact.path, device):
        return None, artifact.path
    kind = (artifact.fallback or artifact).kind
    if not torch_compile.requested(config) or kind in _NOT_COMPILED:
        return None, None
    if device is None or (config.sequencing is not None and config.sequencing.controls):
        engine = builder.build(config, threads.budget(config))  # it adds the controls
        config, device = engine.config, engine.device
        engine.close()
    return compile_cache.locate(config, artifact, device), None


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(bundle: Bundle) -> tuple[bytes, str]:
    """Return the content of a bundle, and why it is left out; empty: a start here would use it."""
    try:
        content = private_files.read(bundle.path)
    except FileNotFoundError:
        return b"", "it was not compiled here with this config: run `torch-py-backend check`"
    except OSError as error:
        return b"", f"its bundle is ignored: {error}"
    return content, bundle.obstacle(content)


def put(arguments: Mapping[str, str], source: str, beside: Mapping[str, str]) -> dict[str, Any]:
    """Check the files of an export, and then copy them into the folder of a model.

    Args:
        arguments: Triton's arguments.
        source: the model's folder in the export.
        beside: the SHA-256 of each file beside a package.

    Returns:
        `files`, the names of the files.

    Raises:
        LoadError: they do not fit the model or this machine, and nothing is written; or they cannot
            be written.
    """
    config, folder = model_config.parse(arguments), Path(source)
    copies: dict[Path, Path] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tuned = _merge_tuned(config, folder, Path(scratch))
        # The settings of a start after the import.
        settings = tuned_settings.apply(dataclasses.replace(config, folder=tuned.parent))
        if (folder / tuned.name).exists() and tuned.exists():
            copies[tuned] = config.folder / tuned.name
        for package in folder.glob("[0-9]*/*"):
            name = config.default_model_filename
            name = "model.pt2" if name in (None, "model.pt") else name
            copies[package] = config.version_folder / name
            _check_package(config, package, copies[package], beside)
        for bundle in folder.glob("compile_cache/*.bundle"):
            own, _ = used(dataclasses.replace(settings, folder=config.folder))
            if own is None:
                raise _refusal(config, "the model is not compiled")
            if obstacle := own.obstacle(bundle.read_bytes()):
                raise _refusal(config, f"the bundle is of no use: {obstacle}")
            copies[bundle] = own.path
        files = {path for path in folder.rglob("*") if path.is_file()}
        if others := files - {*copies, folder / tuned.name}:
            names = join_names(sorted(printable(path.name) for path in others))
            raise _refusal(config, f"the export contains files that no export writes: {names}")
        try:
            copied = [_copy(file, path) for file, path in copies.items()]
        except OSError as error:
            raise ArtifactError(config.name, f"its folder cannot be written: {error}") from error
    return {"files": copied}


def _check_package(
    config: ModelConfig, package: Path, path: Path, beside: Mapping[str, str]
) -> None:
    """Raise ArtifactError unless a package fits this machine and the files beside a path.

    Another package that runs here is not replaced: it may be of newer weights.
    """
    device = runtime.placement(config)
    if difference := aotinductor.mismatch(package, device):
        raise _refusal(config, f"its package was built for {difference}")
    if compiled_folder.digests(config.version_folder, [path]) != beside:
        raise _refusal(config, "the export is of a model with other files")
    if not path.exists() or filecmp.cmp(path, package, shallow=False):
        return
    if not aotinductor.mismatch(path, device):
        raise ArtifactError(
            config.name,
            f"it has another {path.name}, which was built for such a machine, too",
            cure="Remove that file to import the one of the export.",
        )


def _refusal(config: ModelConfig, found: str) -> ArtifactError:
    return ArtifactError(config.name, found, cure=_CURE)


def _merge_tuned(config: ModelConfig, export: Path, scratch: Path) -> Path:
    """Write the entries of tuned.json in a model's folder and in an export into a scratch folder.

    Returns:
        The path, where nothing is written if there are no entries.

    Raises:
        ArtifactError: that of the export is not what `tune` writes.
    """
    path = scratch / tuned_settings.FILE
    try:
        if (config.folder / path.name).exists():
            shutil.copyfile(config.folder / path.name, path)
        for entry in tuned_settings.entries(export).values():
            tuned_settings.save(scratch, entry)
            tuned_settings.read_choice(scratch, tuned_settings.fingerprint(entry["machine"]))
    except (BackendError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArtifactError(config.name, f"tuned.json is refused: {summarize(error)}") from error
    return path


def _copy(source: Path, path: Path) -> str:
    """Copy a file atomically to a path; return its name."""
    if path.is_file() and filecmp.cmp(source, path, shallow=False):
        return f"{path.name} (unchanged)"
    is_bundle = path.suffix == ".bundle"
    if is_bundle and (risk := private_files.create(path.parent)):
        raise PermissionError(f"{path.parent}: {risk}")
    scratch = path.with_name(f".{path.name}-import")
    try:
        shutil.copyfile(source, scratch)
        scratch.chmod(0o600 if is_bundle else 0o644)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path.name
