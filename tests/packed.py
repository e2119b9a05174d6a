"""Small Python environments that import what the running one has."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def make(folder: Path) -> Path:
    """Make an environment; gigabytes of packages are borrowed from this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    found = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (folder / SITE / "borrowed.pth").write_text("".join(f"{path}\n" for path in found))
    return folder
