"""What works with which tritonserver, Python and torch: tried here and now, and written down.

    python tests/compatibility.py                      the server found on this machine
    python tests/compatibility.py --pytriton 0.5.14    that of another wheel, for the moment
    python tests/compatibility.py --without-server     the tests that need no server

prints a row of a table in docs/compatibility.md; --write puts it there, in place of an older one.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "compatibility.md"
# One of each way through the backend: kinds of artifacts, types, errors, batches, states.
SCENARIOS = (
    "script_by_name", "module_one", "factory", "every_type", "bytes_in_rows",
    "optional_inputs", "padded", "poison", "compiled", "state_oldest", "state_grows",
    "complete_export_nested", "complete_aoti", "complete_torchscript",
)  # fmt: skip
# The first minor version of each run of months, and the number of its last month.
_MONTHS = ((42, "24.01", 12), (54, "25.01", 6), (60, "25.08", 12), (65, "26.01", 12))


def server_row() -> list[str]:
    """The models of SCENARIOS on the server that is found, over HTTP and gRPC."""
    import hooked  # noqa: F401  the tables import each other
    import kinds
    import scenarios
    from serving import asked

    table = {one.name: one for one in (*scenarios.TABLE, *kinds.TABLE)}
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        for one in SCENARIOS:
            table[one].lay_out(Path(name) / "repository")
        with asked(Path(name)) as serving:
            failed = [one for one in SCENARIOS if not _answers(serving, table[one])]
            with urllib.request.urlopen(f"http://{serving.server.http_address}/v2") as response:
                version = json.load(response)["version"]
    return [_release(version), *_here(), _found(len(SCENARIOS), failed)]


def _answers(serving: Any, scenario: Any) -> bool:
    try:
        state = serving.states[scenario.name]
        assert state.ready, state.reason
        for protocol in ("http", "grpc"):
            for call in scenario.calls:
                serving.check(protocol, scenario.name, call)
        for batch in scenario.batches:
            serving.check_together(scenario.name, batch)
    except Exception as error:  # whatever does not work is what is looked for
        print(f"{scenario.name}: {error}", file=sys.stderr)
        return False
    return True


def _release(version: str) -> str:
    minor = int(version.split(".")[1])
    for first, release, last in _MONTHS:
        year, month = map(int, release.split("."))
        if minor >= first and month + minor - first <= last:
            return f"{version} ({year}.{month + minor - first:02})"
    return version


def _here() -> list[str]:
    return [platform.python_version(), *map(metadata.version, ("torch", "numpy"))]


def _found(count: int, failed: Sequence[str]) -> str:
    told = f"{count - len(failed)} of {count} models"
    return f"{told}; not {', '.join(failed)}" if failed else told


def tests_row() -> list[str]:
    """The tests without a server, but for slow ones."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not server and not slow"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    last = done.stdout.strip().splitlines()[-1]
    return [*_here(), "all but slow ones", re.sub(r" in .*|=", "", last).strip()]


# --- the page --------------------------------------------------------------------------------


def rows(page: str, table: str) -> list[list[str]]:
    """The rows of one of the page's tables."""
    lines = _table(page, table)[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def written(page: str, table: str, row: Sequence[str], keys: int) -> str:
    """The page with a row, in place of one with the same first cells."""
    kept = [one for one in rows(page, table) if one[:keys] != list(row[:keys])]
    before, old, after = _table(page, table)
    head = old.strip().splitlines()[:2]
    lines = [f"| {' | '.join(one)} |" for one in sorted([*kept, list(row)], reverse=True)]
    return before + "\n".join([*head, *lines]) + "\n" + after


def _table(page: str, table: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {table}:", f"<!-- end of {table} -->"
    start = page.index("\n", page.index(begin)) + 1
    stop = page.index(end)
    return page[:start], page[start:stop], page[stop:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--pytriton", metavar="VERSION", help="the server of that wheel")
    parser.add_argument("--without-server", action="store_true", help="tests without a server")
    parser.add_argument("--write", action="store_true", help="into docs/compatibility.md, too")
    asked = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    with tempfile.TemporaryDirectory(prefix="pytriton-") as folder:
        if asked.pytriton:
            wheel = f"nvidia-pytriton=={asked.pytriton}"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", folder, wheel], check=True)
            # It is found where the other wheel is: first on the path.
            sys.path.insert(0, folder)
        table, keys = ("tests", 3) if asked.without_server else ("servers", 4)
        row = tests_row() if asked.without_server else server_row()
    print(f"| {' | '.join(row)} |")
    if asked.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, table, row, keys), encoding="utf-8")


if __name__ == "__main__":
    main()
