"""The files that compiling and tuning made for a model on a type of machine.

They are the bundle of the compile cache, an AOTInductor package and an entry of tuned.json. An
export finds them, and an import puts them into the folder of the same model. To be run in a child
process: an incomplete config and a model of sequences run the model's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import hashlib
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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

BUNDLE, PACKAGE, TUNED = "bundle", "package", tuned_settings.FILE

_DRIVER = Path("/proc/driver/nvidia/version")
# Facts of the machine; the others are those of the model.
_MACHINE = ("torch-py-backend", "torch", "python", "device", "driver")
_NOT_COMPILED = (ArtifactType.TORCHSCRIPT, ArtifactType.TORCHSERVE, ArtifactType.AOTI)
_SHOWN = 200


class _Target(NamedTuple):
    """The bundle or the package of a model, and the facts that it depends on."""

    facts: Mapping[str, str]
    bundle: Bundle | None
    package: Path | None


def find(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the compiled files of a model on this machine.

    Returns:
        `facts`, which they depend on; `files`, the path of the bundle or the package; `tuned`, the
        entry of tuned.json for this machine, or None; `missing`, why compiled code is left out.

    Raises:
        LoadError: the model's config or files are invalid.
    """
    config = tuned_settings.apply(model_config.parse(arguments))
    target = _target(config)
    files, missing = {}, ""
    if target.package is not None:
        if target.facts["files"] == hashlib.sha256().hexdigest():
            missing = f"{target.package.name} is the whole model: copy its folder"
        else:
            files[PACKAGE] = str(target.package)
    elif target.bundle is not None:
        try:
            missing = target.bundle.obstacle(private_files.read(target.bundle.path))
        except FileNotFoundError:
            missing = "it was not compiled here with this config: run `torch-py-backend check`"
        except OSError as error:
            missing = f"its bundle is ignored: {error}"
        if not missing:
            files[BUNDLE] = str(target.bundle.path)
    machine = tuned_settings.fingerprint(tuned_settings.machine_facts())
    entry = tuned_settings.entries(config.folder).get(machine)
    return {"facts": target.facts, "files": files, "tuned": entry, "missing": missing}


def put(arguments: Mapping[str, str], facts: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Check the files of an export, and then move them into the folder of a model.

    Args:
        arguments: Triton's arguments.
        facts: the facts of the export, from `find`.
        folder: the folder of its files: `bundle`, `package` and tuned.json.

    Returns:
        `files`, the names of the files, with remarks.

    Raises:
        LoadError: they do not fit the model or this machine, and nothing is written; or they cannot
            be written.
    """
    config, received = model_config.parse(arguments), Path(folder)
    bundle, package, tuned = (received / name for name in (BUNDLE, PACKAGE, TUNED))
    remark = _merge_tuned(config, received)
    # The settings of a start after the import.
    settings = tuned_settings.apply(dataclasses.replace(config, folder=received))
    target = _target(
        dataclasses.replace(settings, folder=config.folder), package if package.exists() else None
    )
    _check_facts(config.name, facts, target.facts)
    moves = {tuned: config.folder / TUNED} if tuned.exists() else {}
    if package.exists() and target.package is not None:
        _check_package(config, target.package, package)
        moves[package] = target.package
    if bundle.exists():
        obstacle = "the model is not compiled"
        if target.bundle is not None:
            obstacle = target.bundle.obstacle(bundle.read_bytes())
            moves[bundle] = target.bundle.path
            bundle.chmod(0o600)
        if obstacle:
            raise ArtifactError(config.name, f"the bundle is of no use: {obstacle}", cure=_CURE)
    try:
        if bundle in moves and (reason := private_files.create(moves[bundle].parent)):
            raise PermissionError(f"{moves[bundle].parent}: {reason}")
        names = [
            _move(source, path) + (remark if source == tuned else "")
            for source, path in moves.items()
        ]
    except OSError as error:
        raise ArtifactError(config.name, f"its folder cannot be written: {error}") from error
    return {"files": names}


def _target(config: ModelConfig, package: Path | None = None) -> _Target:
    """Return what a start of a model looks for on this machine.

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
        facts["driver"] = _driver()
    if package is not None:
        facts["files"] = _digest(config.version_folder, package)
    return _Target(facts, bundle, package)


def _driver(path: Path = _DRIVER) -> str:
    """Return the version of the GPU driver."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text("utf-8")):
            return version.group(1)
    return "unknown"


def _digest(folder: Path, package: Path) -> str:
    """Return a hash of the files beside a package, from which it was compiled."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path != package and "__pycache__" not in path.parts:
            with path.open("rb") as file:
                digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
                while piece := file.read(1 << 20):
                    digest.update(piece)
    return digest.hexdigest()


_CURE = "Compile it here with `torch-py-backend check`, or import what such a machine exported."


def _check_facts(model: str, facts: Mapping[str, Any], here: Mapping[str, str]) -> None:
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


def _merge_tuned(config: ModelConfig, received: Path) -> str:
    """Add the model's own entries to those of a received tuned.json.

    Returns:
        A remark if that has an entry that this machine does not use.

    Raises:
        ArtifactError: it is not what `tune` writes.
    """
    try:
        entries = tuned_settings.entries(received)
        (received / TUNED).unlink(missing_ok=True)
        if entries and (config.folder / TUNED).exists():
            shutil.copyfile(config.folder / TUNED, received / TUNED)
        for entry in entries.values():
            tuned_settings.save(received, entry)
            tuned_settings.read_choice(received, tuned_settings.fingerprint(entry["machine"]))
    except (BackendError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArtifactError(config.name, f"tuned.json is refused: {summarize(error)}") from error
    here = tuned_settings.fingerprint(tuned_settings.machine_facts())
    return " (tuned on another type of machine)" if entries.keys() - {here} else ""


def _move(source: Path, path: Path) -> str:
    """Move a file atomically to a path, perhaps in another file system; return its name."""
    if path.is_file() and filecmp.cmp(source, path, shallow=False):
        return f"{path.name} (unchanged)"
    scratch = path.with_name(f".{path.name}-import")
    try:
        shutil.move(source, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path.name
