"""Write a file at once, or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file atomically. A link is replaced; resolve the path to replace its target.

    Without a `mode` it has the permissions of the file that it replaces, 644 if it is new.
    """
    if mode is None:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        scratch = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
