"""The files that compiling and tuning made for a model on a type of machine.

They are the bundle of the compile cache, an AOTInductor package and an entry of tuned.json. To be
run in a child process: an incomplete config and a model of sequences run the model's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching import runtime
from torch_py_backend.compile import compile_cache, torch_compile
from torch_py_backend.compile.compile_cache import Bundle
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, BackendError, printable, summarize
from torch_py_backend.loading import aotinductor
from torch_py_backend.processes import private_files
from torch_py_backend.startup import builder
from torch_py_backend.tools import compiled_folder

_DRIVER = Path("/proc/driver/nvidia/version")
# Facts of the machine; the others are those of the model.
_MACHINE = ("torch-py-backend", "torch", "python", "device", "driver")
_NOT_COMPILED = (ArtifactType.TORCHSCRIPT, ArtifactType.TORCHSERVE, ArtifactType.AOTI)
_SHOWN = 200


def export(arguments: Mapping[str, str], target: str) -> dict[str, Any]:
    """Copy the compiled files of a model on this machine into a new folder.

    Returns:
        `facts`, which they depend on; `files`, their names; `missing`, why compiled code is left
        out.

    Raises:
        LoadError: the model's config or files are invalid, or the files cannot be copied.
    """
    config, folder = tuned_settings.apply(model_config.parse(arguments)), Path(target)
    facts, bundle, package = _target(config)
    missing = ""
    try:
        if package is not None and not facts["files"]:
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
    return {"facts": facts, "files": names, "missing": missing}


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


def put(arguments: Mapping[str, str], facts: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check the files of an export, and then copy them into the folder of a model.

    Args:
        arguments: Triton's arguments.
        facts: the facts of the export.
        source: the model's folder in the export.

    Returns:
        `files`, the names of the files, with remarks.

    Raises:
        LoadError: they do not fit the model or this machine, and nothing is written; or they cannot
            be written.
    """
    config, export = model_config.parse(arguments), Path(source)
    bundle = next(export.glob("compile_cache/*.bundle"), None)
    package = next(export.glob("[0-9]*/*"), None)
    with tempfile.TemporaryDirectory() as scratch:
        tuned, remark = _merge_tuned(config, export, Path(scratch))
        # The settings of a start after the import.
        settings = tuned_settings.apply(dataclasses.replace(config, folder=tuned.parent))
        here, own_bundle, own_package = _target(
            dataclasses.replace(settings, folder=config.folder), package
        )
        _check_facts(config.name, facts, here)
        copies = {tuned: config.folder / tuned.name} if tuned.exists() else {}
        if package is not None and own_package is not None:
            _check_package(config, own_package, package)
            copies[package] = own_package
        if bundle is not None:
            obstacle = "the model is not compiled"
            if own_bundle is not None:
                obstacle = own_bundle.obstacle(bundle.read_bytes())
                copies[bundle] = own_bundle.path
            if obstacle:
                raise ArtifactError(config.name, f"the bundle is of no use: {obstacle}", cure=_CURE)
        if others := sum(path.is_file() for path in export.rglob("*")) - len(copies):
            raise ArtifactError(
                config.name,
                f"the export has {others} other files of it",
                expected=f"a bundle, a package and {tuned.name}",
                cure=_CURE,
            )
        try:
            if bundle is not None and (reason := private_files.create(copies[bundle].parent)):
                raise PermissionError(f"{copies[bundle].parent}: {reason}")
            names = [
                _copy(file, path, 0o600 if file == bundle else 0o644)
                + (remark if file == tuned else "")
                for file, path in copies.items()
            ]
        except OSError as error:
            raise ArtifactError(config.name, f"its folder cannot be written: {error}") from error
    return {"files": names}


def _target(
    config: ModelConfig, package: Path | None = None
) -> tuple[dict[str, Any], Bundle | None, Path | None]:
    """Return the facts of a model on this machine, and the bundle or package that a start uses.

    Args:
        config: its settings, with those of `tune`.
        package: an AOTInductor package from an export; None: the model's own, if it fits.

    Raises:
        ArtifactError: the package does not run on this machine.
    """
    device, bundle = runtime.placement(config), None
    if package is None:
        artifact = discovery.find(config)
        if artifact.kind is ArtifactType.AOTI and not aotinductor.mismatch(artifact.path, device):
            package = artifact.path
    elif difference := aotinductor.mismatch(package, device):
        raise ArtifactError(config.name, f"its package was built for {difference}", cure=_CURE)
    if package is not None:
        name = config.default_model_filename
        package = config.version_folder / ("model.pt2" if name in (None, "model.pt") else name)
        artifact = Artifact(ArtifactType.AOTI, config.version_folder)  # its files are hashed below
    elif (
        torch_compile.requested(config)
        and (artifact.fallback or artifact).kind not in _NOT_COMPILED
    ):
        if device is None or (config.sequencing is not None and config.sequencing.controls):
            engine = builder.build(config, threads.budget(config))  # it adds the controls
            config, device = engine.config, engine.device
            engine.close()
        bundle = compile_cache.locate(config, artifact, device)
    device = device or torch.device("cpu")
    facts: dict[str, Any] = {"torch-py-backend": metadata.version("torch-py-backend")}
    facts |= compile_cache.facts(config, artifact, device)
    facts |= {key.upper(): value for key, value in facts.pop("options").items()}
    facts |= {"max_batch_size": str(facts.pop("rows")), "inputs": ", ".join(facts["inputs"])}
    if device.type == "cuda":
        facts["driver"] = driver_version()
    if package is not None:
        # It was compiled from the files beside it.
        facts["files"] = compiled_folder.digests(config.version_folder, [package])
    return facts, bundle, package


def driver_version(path: Path = _DRIVER) -> str:
    """Return the version of the GPU driver."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text("utf-8")):
            return version.group(1)
    return "unknown"


_CURE = "Compile it here with `torch-py-backend check`, or import what such a machine exported."


def _check_facts(model: str, facts: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ArtifactError at the first fact that differs, those of the machine first."""
    for key in sorted(here, key=lambda key: (key not in _MACHINE, key)):
        if facts.get(key) == here[key]:
            continue
        if key in ("model", "files"):
            raise ArtifactError(
                model,
                "the export is of a model with other files, or weights of another size",
                expected="those of its version folder",
                cure=_CURE,
            )
        value = printable(str(facts.get(key)))[:_SHOWN]
        raise ArtifactError(
            model, f"the export is for {key} {value}", expected=f"{here[key]}, as here", cure=_CURE
        )


def _check_package(config: ModelConfig, path: Path, package: Path) -> None:
    """Raise if another package would be replaced that runs here: it may be of newer weights."""
    if not path.exists() or filecmp.cmp(path, package, shallow=False):
        return
    if not aotinductor.mismatch(path, runtime.placement(config)):
        raise ArtifactError(
            config.name,
            f"it has another {path.name}, which was built for such a machine, too",
            cure="Remove that file to import the one of the export.",
        )


def _merge_tuned(config: ModelConfig, export: Path, scratch: Path) -> tuple[Path, str]:
    """Write the entries of tuned.json in a model's folder and in an export into a scratch folder.

    Returns:
        The path, where nothing is written if the export has no entries; and a remark if it has an
        entry that this machine does not use.

    Raises:
        ArtifactError: that of the export is not what `tune` writes.
    """
    path = scratch / tuned_settings.FILE
    try:
        entries = tuned_settings.entries(export)
        if entries and (config.folder / path.name).exists():
            shutil.copyfile(config.folder / path.name, path)
        for entry in entries.values():
            tuned_settings.save(scratch, entry)
            tuned_settings.read_choice(scratch, tuned_settings.fingerprint(entry["machine"]))
    except (BackendError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArtifactError(config.name, f"tuned.json is refused: {summarize(error)}") from error
    here = tuned_settings.fingerprint(tuned_settings.machine_facts())
    return path, " (tuned on another type of machine)" if entries.keys() - {here} else ""


def _copy(source: Path, path: Path, mode: int) -> str:
    """Copy a file atomically to a path; return its name."""
    if path.is_file() and filecmp.cmp(source, path, shallow=False):
        return f"{path.name} (unchanged)"
    scratch = path.with_name(f".{path.name}-import")
    try:
        shutil.copyfile(source, scratch)
        scratch.chmod(mode)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path.name
