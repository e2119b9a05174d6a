"""`serve URL`: what is fetched, when it is fetched again, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import build
import fsspec
import pytest
from build import files_in

from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ToolError
from torch_py_backend.model_folders import creation, remote_repository
from torch_py_backend.processes import child_process

_URL = "memory://bucket/models"
_FILES = {"a/config.pbtxt": b"x", "a/1/model.pt": b"weights"}


@pytest.fixture
def store() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    for name, content in _FILES.items():
        files.pipe_file(f"/bucket/models/{name}", content)
    files.store["/bucket/models/a/"] = files.store["/bucket/models/a/config.pbtxt"]  # a folder
    yield files
    files.store.clear()


def test_changes(store: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = remote_repository.local(_URL, tmp_path / "cache", lines.append)
    assert files_in(folder) == _FILES
    kept = (folder / "a/config.pbtxt").stat()
    store.pipe_file("/bucket/models/a/1/model.pt", b"other weights")
    store.pipe_file("/bucket/models/b/1/model.py", b"")
    assert remote_repository.local(_URL, tmp_path / "cache", lines.append) == folder
    expected = {**_FILES, "a/1/model.pt": b"other weights", "b/1/model.py": b""}
    assert files_in(folder) == expected
    assert (folder / "a/config.pbtxt").stat().st_ino == kept.st_ino
    build.write(folder / "b", "seen.npy", b"")  # of a load
    store.rm("/bucket/models/b/1/model.py")
    remote_repository.local(_URL, tmp_path / "cache", lines.append)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert lines == [f"fetching {count} files from {_URL}" for count in (2, 2)]


def _gone(store: Any, _: pytest.MonkeyPatch) -> None:
    store.store.clear()


def _denied(store: Any, patch: pytest.MonkeyPatch) -> None:
    def find(*_: object, **__: object) -> None:
        raise PermissionError("403\nmore of it")

    patch.setattr(type(store), "find", find)


def _breaks(store: Any, patch: pytest.MonkeyPatch) -> None:
    """The second of two changed files cannot be read."""
    for name in _FILES:
        store.pipe_file(f"/bucket/models/{name}", b"new")
    copy = type(store).get_file

    def get_file(self: Any, path: str, *rest: Any) -> None:
        if path.endswith("model.pt"):
            raise ConnectionResetError("reset")
        copy(self, path, *rest)

    patch.setattr(type(store), "get_file", get_file)


def _hostile(store: Any, _: pytest.MonkeyPatch) -> None:
    store.store["/bucket/models/../../outside"] = store.store["/bucket/models/a/config.pbtxt"]


@pytest.mark.parametrize("fault", [_gone, _denied, _breaks, _hostile])
def test_faults(fault: Any, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    folder = remote_repository.local(_URL, tmp_path / "cache", lines.append)
    fault(store, monkeypatch)
    remote_repository.local(_URL, tmp_path / "cache", lines.append)
    assert files_in(folder) == _FILES
    assert lines[-1].startswith(f"{_URL} cannot be read: ")
    assert lines[-1].endswith(". Serving the files that were fetched last.")
    with pytest.raises(ToolError, match=r"cannot be read: \w+: .*\.$") as raised:
        remote_repository.local(_URL, tmp_path / "empty", lines.append)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "outside").exists()
    assert not list(tmp_path.glob("cache/*/outside"))


def test_a_store_that_makes_no_folders(tmp_path: Path) -> None:
    build.write(tmp_path / "a", "model.pt", b"weights")
    folder = remote_repository.local(f"file://{tmp_path}/a", tmp_path / "cache", print)
    assert (folder / "1" / "model.pt").read_bytes() == b"weights"


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ToolError, match="others may write to it"):
        remote_repository.local(_URL, tmp_path / "open", print)


def test_model_of_the_hub_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def download(name: str, *, revision: str, local_dir: Path) -> None:
        assert (name, revision) == ("organization/net", "main")
        (local_dir / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
        (local_dir / "old.safetensors").touch()  # of the last start
        (local_dir / ".cache" / "huggingface").mkdir(parents=True)

    def run(task: str, sent: dict[str, Any], *_: object) -> Any:
        assert (task, sent["new"]) == (creation.INSPECT, True)  # tests/cli/test_init.py runs it
        return {"config": json.loads(sent["arguments"]["model_config"])}

    fetch = create_autospec(huggingface_hub.snapshot_download, side_effect=download)
    names = create_autospec(huggingface_hub.list_repo_files, return_value=["config.json"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", names)
    monkeypatch.setattr(child_process, "run", run)
    repository = remote_repository.local("hf://organization/net@main", tmp_path, print)
    parameters = pbtxt.read(repository / "net")["parameters"]
    assert parameters["MODEL_FACTORY"]["string_value"] == "transformers:GPT2LMHeadModel"
    assert {path.name for path in repository.glob("net/1/*")} == {"config.json", ".cache"}
