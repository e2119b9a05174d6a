"""What works with which tritonserver, Python and torch: tried here and now, and written down.

    python tests/compatibility.py                      the server found on this machine
    python tests/compatibility.py --pytriton 0.5.14    that of another wheel, for the moment
    python tests/compatibility.py --without-server     the tests that need no server

prints a row of a table in docs/compatibility.md; --write puts it there, in place of an older one.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
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
_LONGEST_S = 300
_SOURCE = TESTS.parent / "src"
_FIXTURES = re.compile(r"\b(process|dynamo): None\b|usefixtures\(\"(process|dynamo)\"")
# They need torch, a server, fixtures of a conftest.py or tools of the repository on the machine.
_NEED_MORE = {
    "test_fetch.py",
    "test_preflight.py",
    "test_release.py",
    "test_report.py",
    "test_triton_installation.py",
    "test_tritonserver.py",
    "test_tuned_settings.py",
}


def server_row() -> list[str]:
    """The models of SCENARIOS on the server that is found, over HTTP and gRPC."""
    import hooked  # noqa: F401  the tables import each other
    import kinds
    import scenarios
    import tritonclient.grpc
    import tritonclient.http
    from serving import Serving

    from torch_py_backend.server import Server

    table = {one.name: one for one in (*scenarios.TABLE, *kinds.TABLE)}
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        folder = Path(name)
        for one in SCENARIOS:
            table[one].lay_out(folder / "repository")
        with (
            (folder / "server.log").open("wb") as log,
            Server(
                folder / "repository", http_port=0, grpc_port=0, metrics_port=0, log=log
            ) as server,
        ):
            states = {state.name: state for state in server.wait_loaded(_LONGEST_S)}
            with (
                closing(tritonclient.http.InferenceServerClient(server.http_address)) as http,
                closing(tritonclient.grpc.InferenceServerClient(server.grpc_address)) as grpc,
            ):
                serving = Serving(server, states, http, grpc, folder / "server.log")
                failed = [one for one in SCENARIOS if not _answers(serving, table[one])]
            with urllib.request.urlopen(f"http://{server.http_address}/v2") as response:
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
    return [platform.python_version(), *(_version(name) for name in ("torch", "numpy"))]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _found(count: int, failed: Sequence[str]) -> str:
    told = f"{count - len(failed)} of {count} models"
    return f"{told}; not {', '.join(failed)}" if failed else told


# --- without a server ------------------------------------------------------------------------


def tests_row() -> list[str]:
    """The tests without a server; where torch is missing, those of the modules that need none."""
    with_torch = _version("torch") != "none"
    chosen = (
        ["-m", "not server and not slow"]
        if with_torch
        else ["--noconftest", "-k", "not compiler", *without_torch()]
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    scope = "all but slow ones" if with_torch else "modules without torch"
    return [*_here(), scope, re.sub(r" in .*|=", "", last).strip()]


def without_torch() -> list[str]:
    """Return the test files that import no torch, and whose imports import none."""
    return [
        str(path.relative_to(TESTS.parent))
        for path in sorted(TESTS.rglob("test_*.py"))
        if not {"live", "deploy"} & set(path.parts)
        and path.name not in _NEED_MORE
        and not _needs_torch(path, set())
        and not _FIXTURES.search(path.read_text())
    ]


def _needs_torch(path: Path, seen: set[Path]) -> bool:
    if path in seen:
        return False
    seen.add(path)
    for name in _imports(path):
        if name.split(".")[0] in ("torch", "safetensors", "benchmarks", "docs", "examples"):
            return True
        if any(_needs_torch(file, seen) for file in _files(name)):
            return True
    return False


def _files(name: str) -> Iterator[Path]:
    """Return the files of this repository that an import of this name runs."""
    for base in (_SOURCE, TESTS):
        file = base.joinpath(*name.split("."))
        yield from (one for one in (file.with_suffix(".py"), file / "__init__.py") if one.is_file())


def _imports(path: Path) -> Iterator[str]:
    """Yield what a file imports as it is imported: function bodies are left out."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend(ast.iter_child_nodes(node))


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
