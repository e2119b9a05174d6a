"""Traces as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_py_backend.observability import trace_recording


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Where the profiler leaves half a file, as on a full disk, an older trace stays."""

    class Half:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [')

    (tmp_path / "trace.json").write_text("older")
    half: Any = Half()
    with pytest.raises(OSError, match="not written to its end"):
        trace_recording.write(half, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "older"
