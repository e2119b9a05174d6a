"""Small Python environments: made, unpacked as Triton does, and run as it starts a stub in them."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"lib/python{PYTHON}/site-packages"
_NEEDED = MappingProxyType({"torch": "2.13.0+cpu", "numpy": "1.26.4", "safetensors": "0.8.0"})


def make(folder: Path, *, layer: bool = False, names: Mapping[str, str] = _NEEDED) -> Path:
    """An environment with packages of which there is but the name and the version."""
    venv.create(folder, with_pip=False, system_site_packages=layer, symlinks=True)
    for name, version in names.items():
        install(folder, name, version)
    return folder


def install(folder: Path, name: str, version: str, origin: Any = None) -> None:
    """A package's name and version, in place of another version; `origin` as pip writes it."""
    for old in (folder / SITE).glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    told = folder / SITE / f"{name}-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if origin is not None:
        (told / "direct_url.json").write_text(json.dumps(origin))


def borrow(folder: Path) -> None:
    """Let an environment import what the running one has, as gigabytes need not be packed."""
    found = {sysconfig.get_path(kind): None for kind in ("purelib", "platlib")}
    (folder / SITE / "borrowed.pth").write_text("".join(f"{one}\n" for one in found))
