"""The command that compares two versions of the backend bit for bit."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).with_name("recordings.py")


def _run(action: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_PROGRAM), action, str(file), "function", "poison_in_buckets"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_changed_bit_is_a_difference(tmp_path: Path) -> None:
    """A second recording equals the first one, but for the bit that was changed in between."""
    file = tmp_path / "old.json.gz"
    done = _run("record", file)
    assert done.returncode == 0, done.stderr
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    assert [*recorded] == ["function", "poison_in_buckets"]
    # The table's refusals are codes; each way has the requests that the table allows.
    (batch,) = recorded["poison_in_buckets"]["batches"]
    assert [place for place, outcome in enumerate(batch) if "code" in outcome] == [3, 17]
    ((good, refused),) = recorded["function"]["beside a failure"]
    assert [good] == recorded["function"]["alone"][0] == recorded["function"]["together"][0]
    assert "code" in refused
    text = good["y"][2]
    recorded["function"]["alone"][0][0]["y"][2] = ("B" if text[0] == "A" else "A") + text[1:]
    file.write_bytes(gzip.compress(json.dumps(recorded).encode()))
    done = _run("compare", file)
    assert done.returncode == 1, done.stderr
    assert "function, alone, batch 0, request 0: y differs by up to" in done.stdout
    assert "2 scenarios, 1 differences" in done.stdout
