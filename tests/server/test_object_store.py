"""Repositories in object stores: names, faults, credentials; against S3, and a store that fails."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pytest
import stores
from fsspec.asyn import AsyncFileSystem
from stores import Faulty

from torch_py_backend.server import object_store
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.remote_file import RemoteFile
from torch_py_backend.server.store_errors import StoreError

_FILES = {"a/config.pbtxt": b"x", "a/1/model.pt": bytes(range(256)) * 10}


@pytest.fixture
def faulty() -> Iterator[type[Faulty]]:
    with stores.faulty() as one:
        one.files = dict(_FILES)
        yield one


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/models", "'bucket/models' is not a URL; expected one such as s3://bucket/folder."),
        ("s3://", "'s3://' is not a URL"),
        ("s3://id:secret@bucket/models", "the URL of s3:// holds credentials or a query"),
        ("s3://https://user:secret@minio:9000/bucket", "the URL of s3:// holds credentials"),
        ("az://box/models?sv=2024&sig=secret", "the URL of az:// holds credentials or a query"),
        ("nothing://box/models", "nothing:// is not a store .*; expected s3://"),
        ("hf://organization", "hf://organization cannot be read: "),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as raised:
        Store(url).files()
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "module", "extra"),
    [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs"), ("az", "adlfs", "az")],
)
def test_missing_package(
    scheme: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    message = rf"{scheme}:// needs a package: .* pip install 'torch-py-backend\[{extra}\]'"
    with pytest.raises(StoreError, match=message):
        Store(f"{scheme}://box/models")


@pytest.mark.parametrize(
    ("scheme", "rest", "expected"),
    [
        ("s3", "bucket/a/b", ("s3", "bucket/a/b", {})),
        ("s3", "minio:9000/bucket/a", ("s3", "bucket/a", {"endpoint_url": "http://minio:9000"})),
        (
            "s3",
            "https://minio.example.com:443/bucket/a",
            ("s3", "bucket/a", {"endpoint_url": "https://minio.example.com:443"}),
        ),
        ("as", "account/box/a", ("az", "box/a", {"account_name": "account"})),
        (
            "as",
            "account.blob.core.windows.net/box/a",
            ("az", "box/a", {"account_name": "account"}),
        ),
        ("gs", "bucket/a", ("gs", "bucket/a", {})),
        ("hf", "organization/model@v1", ("hf", "organization/model@v1", {})),
    ],
)
def test_urls_in_triton_s_forms(
    scheme: str, rest: str, expected: tuple[str, str, dict[str, str]]
) -> None:
    assert object_store._translate(scheme, rest) == expected


def test_files_of_a_bucket(s3: stores.S3) -> None:
    """Names relative to the folder, sizes, and keys that follow the contents."""
    s3.put("bucket/old", _FILES)
    s3.put("bucket/new", {**_FILES, "a/config.pbtxt": b"y", "a/empty/": b""})
    old, new = Store("s3://bucket/old").files(), Store("s3://bucket/new/").files()
    names = [PurePosixPath(name) for name in sorted(_FILES)]
    empty = PurePosixPath("a/empty")
    assert sorted(old) == names
    assert sorted(new) == [*names, empty]
    assert new[empty].key == ""
    assert [old[name].size for name in names] == [2560, 1]
    # The same contents in another folder have the same key; others have not.
    assert [old[name].key == new[name].key for name in names] == [True, False]


def test_a_listing_is_never_an_old_one(s3: stores.S3) -> None:
    """The stores' libraries remember listings."""
    s3.put("bucket/models", _FILES)
    store = Store("s3://bucket/models")
    before = store.files()
    s3.put("bucket/models", {"a/config.pbtxt": b"y", "b/config.pbtxt": b"new"})
    path = PurePosixPath("a/config.pbtxt")
    assert store.files().keys() - before.keys() == {PurePosixPath("b/config.pbtxt")}
    assert store.files()[path].key != before[path].key
    assert not store.is_unchanged(before[path])


def test_a_server_s_own_address(s3: stores.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of Triton's URLs needs no variable with the endpoint."""
    s3.put("bucket/models", _FILES)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert len(Store(f"s3://{s3.address}/bucket/models").files()) == 2


@pytest.mark.parametrize("url", ["s3://bucket/nothing", "s3://no-such-bucket/models"])
def test_nothing_there(s3: stores.S3, url: str) -> None:
    s3.put("bucket/models", _FILES)
    with pytest.raises(
        StoreError, match=r"holds no files|cannot be read: it does not exist"
    ) as raised:
        Store(url).files()
    assert not raised.value.temporary


def test_a_store_that_is_down(s3: stores.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match="s3://bucket/models cannot be read: ") as raised:
        Store("s3://bucket/models").files()
    assert raised.value.temporary


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "a/./x", "/x", "a//x", "a/\0", "..", "a/..", "a/" + "x" * 256]
)
def test_hostile_names(faulty: type[Faulty], name: str) -> None:
    faulty.files[name] = b"evil"
    with pytest.raises(StoreError, match="expected names that a folder can have"):
        Store("faulty://models").files()


def test_a_file_where_a_folder_is(faulty: type[Faulty]) -> None:
    faulty.files["a/1"] = b"not empty"
    with pytest.raises(StoreError, match=r"holds a file a/1 and a file a/1/model.pt"):
        Store("faulty://models").files()
    faulty.files["a/1"] = b""  # the mark of a folder
    assert len(Store("faulty://models").files()) == 2
    faulty.files["\x1b[2J\n"] = faulty.files["\x1b[2J\n/1"] = b"erases the screen"
    with pytest.raises(StoreError) as raised:
        Store("faulty://models").files()
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"size": None}, "does not say how large a/1/model.pt is"),
        ({"created": None}, "reports neither etags nor modification times"),
        ({"size": "x"}, "describes 'models/a/1/model.pt' in a way that is not understood"),
        ({"lfs": {}}, "in a way that is not understood: KeyError"),
    ],
)
def test_files_without_facts(faulty: type[Faulty], facts: dict[str, Any], message: str) -> None:
    faulty.facts["a/1/model.pt"] = facts
    with pytest.raises(StoreError, match=message):
        Store("faulty://models").files()


def _content(store: Store, name: str, start: int = 0) -> bytes:
    return b"".join(store.read(store.files()[PurePosixPath(name)], start))


@pytest.mark.parametrize("start", [0, 1, 1000, 2560])
def test_read(faulty: type[Faulty], start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces in their order, from any position; those that fail are asked for again."""
    monkeypatch.setattr(object_store, "_PIECE", 100)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    faulty.reading_errors = [OSError("reset"), None, TimeoutError("slow")]
    content = _content(Store("faulty://models"), "a/1/model.pt", start)
    assert content == _FILES["a/1/model.pt"][start:]


def test_a_truncated_answer(faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    faulty.truncate = True
    with pytest.raises(
        StoreError, match=r"models/a/1/model.pt cannot be read: .*2559 of 2560 bytes"
    ) as raised:
        _content(Store("faulty://models"), "a/1/model.pt")
    assert raised.value.temporary
    assert pauses == [1, 2, 4, 8]


def test_denied_while_reading(faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for again."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("asked again"))
    faulty.reading_errors = [PermissionError("Forbidden")]
    with pytest.raises(StoreError, match="access is denied"):
        _content(Store("faulty://models"), "a/1/model.pt")


def test_digests(faulty: type[Faulty]) -> None:
    """Of Google's and Hugging Face's stores."""
    content = _FILES["a/1/model.pt"]
    md5, sha256 = hashlib.md5(content), hashlib.sha256(content)
    faulty.facts["a/1/model.pt"] = {"md5Hash": base64.b64encode(md5.digest()).decode()}
    path = PurePosixPath("a/1/model.pt")
    assert Store("faulty://models").files()[path].digest == ("md5", md5.hexdigest())
    faulty.facts["a/1/model.pt"] = {"lfs": {"sha256": sha256.hexdigest(), "size": len(content)}}
    assert Store("faulty://models").files()[path].digest == ("sha256", sha256.hexdigest())


def test_git_s_digest(faulty: type[Faulty]) -> None:
    """Of small files of a Hugging Face hub, where it comes back when a change is reverted."""
    content = _FILES["a/1/model.pt"]
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    faulty.facts["a/1/model.pt"] = {"blob_id": blob, "lfs": None}
    file = Store("faulty://models").files()[PurePosixPath("a/1/model.pt")]
    assert file.has_digest(io.BytesIO(content))
    assert not file.has_digest(io.BytesIO(bytes(len(content))))


def test_folders_without_files(faulty: type[Faulty]) -> None:
    """The version of an ensemble is an empty object; of some libraries without the "/"."""
    faulty.files |= {"ensemble/config.pbtxt": b"x", "ensemble/1": b"", "a/1/": b"", "b/x/": b""}
    files = Store("faulty://models").files()
    assert {str(path) for path, file in files.items() if not file.key} == {"ensemble/1", "b/x"}


class Silent(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Accepts requests and never answers."""

    protocol = "silent"
    cachable = False
    requests = 0

    async def _find(self, *_: Any, **__: Any) -> Any:
        type(self).requests += 1
        await asyncio.sleep(3600)

    _info = _cat_ranges = _pipe_file = _find


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gcsfs has no time limit of its own."""
    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(object_store, "_LISTING_S", 0.2)
    monkeypatch.setattr(object_store, "_READING_S", 0.2)
    store = Store("silent://models")
    file = RemoteFile(PurePosixPath("x"), "models/x", 10, "key")
    (tmp_path / "x").write_bytes(b"x")
    for call in (
        store.files,
        lambda: store.is_unchanged(file),
        lambda: [*store.read(file, 0)],
        lambda: store.write(tmp_path / "x", PurePosixPath("x")),
    ):
        with pytest.raises(StoreError, match=r"silent://models\S* cannot be .*Timeout") as raised:
            call()
        assert raised.value.temporary
    assert Silent.requests == 4  # none was sent again: that would take minutes


def test_write(s3: stores.S3, tmp_path: Path) -> None:
    s3.put("bucket/models", _FILES)
    store = Store("s3://bucket/models")
    (tmp_path / "bundle").write_bytes(b"compiled")
    store.write(tmp_path / "bundle", PurePosixPath("a/compile_cache/b.bundle"))
    assert _content(store, "a/compile_cache/b.bundle") == b"compiled"


def test_google_cloud_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    with stores.google(_FILES, monkeypatch):
        store = Store("gs://bucket/models")
        files = store.files()
        digests = {str(path): file.digest for path, file in files.items()}
        assert digests == {
            name: ("md5", hashlib.md5(content).hexdigest()) for name, content in _FILES.items()
        }
        assert _content(store, "a/1/model.pt") == _FILES["a/1/model.pt"]
        with pytest.raises(StoreError, match=r"holds no files|does not exist"):
            Store("gs://bucket/nothing").files()


def test_azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with stores.azure(_FILES, tmp_path, monkeypatch):
        store = Store("az://bucket/models")
        files = store.files()
        digests = {str(path): file.digest for path, file in files.items()}
        assert digests == {
            name: ("md5", hashlib.md5(content).hexdigest()) for name, content in _FILES.items()
        }
        assert _content(store, "a/1/model.pt") == _FILES["a/1/model.pt"]
        (tmp_path / "bundle").write_bytes(b"compiled")
        store.write(tmp_path / "bundle", PurePosixPath("a/compile_cache/b.bundle"))
        assert _content(store, "a/compile_cache/b.bundle") == b"compiled"
        with pytest.raises(StoreError, match=r"holds no files|does not exist"):
            Store("az://bucket/nothing").files()
        with pytest.raises(StoreError, match="is a file; expected a folder"):
            Store("az://bucket/models/a/config.pbtxt").files()


# In a process of its own: huggingface_hub reads the address of its hub when it is imported.
_LISTING = """
import json, sys
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.store_errors import StoreError
from torch_py_backend.server.remote_file import RemoteFile
try:
    store = Store(sys.argv[1])
    print(json.dumps([
        [str(file.path), file.digest, b"".join(store.read(file, 0)).decode()]
        for file in store.files().values()
    ]))
except StoreError as error:
    print(json.dumps(str(error)))
"""


def _listed(url: str, address: str) -> Any:
    command = [sys.executable, "-c", _LISTING, url]
    # A load of a Hugging Face folder, in an earlier test of this process, sets HF_HUB_OFFLINE.
    variables = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("url", ["hf://organization/net", "hf://organization/net@main"])
def test_hugging_face_hub(url: str) -> None:
    """Of a model, only the files that PyTorch needs; all of a model repository."""
    files = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "vocab.txt": b"a"}
    others = {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", ".gitattributes": b"x"}
    digests = {
        name: hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as git's
        for name, content in files.items()
    }
    digests["model.safetensors"] = hashlib.sha256(files["model.safetensors"]).hexdigest()
    with stores.hugging_face_hub({**files, **others}) as address:
        listed = _listed(url, address)
        assert {name: content.encode() for name, _, content in listed} == files
        assert {name: digest and digest[1] for name, digest, _ in listed} == digests
        missing = _listed("hf://organization/nothing", address)
        assert re.search(r"it does not exist .*repository not found", missing)
    repository = {"a/config.pbtxt": b"x", "a/1/config.json": b"{}"}
    with stores.hugging_face_hub(repository) as address:
        assert {name: content.encode() for name, _, content in _listed(url, address)} == repository


def test_the_url_of_a_file(s3: stores.S3) -> None:
    s3.put("bucket/models", _FILES)
    with pytest.raises(StoreError, match="is a file; expected a folder"):
        Store("s3://bucket/models/a/config.pbtxt").files()


def test_etags_that_say_nothing() -> None:
    """A server that calls itself S3 may send the same etag for all files."""
    store = Store("s3://bucket/models")
    keys = {
        store._remote_file(
            f"bucket/models/{name}", {"size": 4, "ETag": '""', "LastModified": when}
        ).key
        for name, when in (("a", 1), ("b", 1), ("b", 2))
    }
    assert len(keys) == 3


def test_etags_of_zeros() -> None:
    """MinIO's, of files that it did not write: they stay the same when the contents change."""
    store = Store("s3://bucket/models")
    etag = '"00000000000000000000000000000000-1"'
    files = [
        store._remote_file(f"bucket/models/{name}", {"size": 4, "ETag": etag, "LastModified": when})
        for name, when in (("a", 1), ("b", 1), ("b", 2))
    ]
    assert len({file.key for file in files}) == 3
    assert [file.etag for file in files] == [""] * 3


def test_times_of_a_listing_and_of_a_file() -> None:
    """MinIO lists fractions of a second; the header of one file has none."""
    store = Store("s3://bucket/models")
    listed = datetime(2026, 11, 24, 12, 0, 0, 250_000, tzinfo=timezone.utc)
    keys = {
        store._remote_file("bucket/models/a", {"size": 4, "LastModified": when}).key
        for when in (listed, listed.replace(microsecond=0))
    }
    assert len(keys) == 1


def test_only_pieces_that_failed_are_asked_for_again(
    faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PIECE", 100)
    monkeypatch.setattr(object_store, "_PAUSE_S", 0)
    request = Store._request
    asked: list[int] = []

    def fail_once(self: Store, file: Any, ranges: Any) -> Any:
        asked.append(len(ranges))
        answers = list(request(self, file, ranges))
        return [OSError("reset"), *answers[1:]] if len(asked) == 1 else answers

    monkeypatch.setattr(Store, "_request", fail_once)
    assert _content(Store("faulty://models"), "a/1/model.pt", 1760) == _FILES["a/1/model.pt"][1760:]
    assert asked == [8, 1]


def test_denied_while_writing(faulty: type[Faulty], tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(b"")
    store = Store("faulty://models")
    store._files.pipe_file = lambda *_: (_ for _ in ()).throw(PermissionError("Forbidden"))
    with pytest.raises(StoreError, match=r"written: access is denied .* may list and write"):
        store.write(tmp_path / "bundle", PurePosixPath("a/compile_cache/b.bundle"))


def test_a_server_that_ignores_conditions(s3: stores.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of another etag are refused."""
    s3.put("bucket/models", _FILES)
    store = Store("s3://bucket/models")
    file = store.files()[PurePosixPath("a/1/model.pt")]
    s3.put("bucket/models", {"a/1/model.pt": bytes(2560)})
    call = store._files._call_s3

    def without_condition(*names: Any, IfMatch: str = "", **how: Any) -> Any:
        return call(*names, **how)

    monkeypatch.setattr(store._files, "_call_s3", without_condition)
    with pytest.raises(StoreError, match="PreconditionFailed"):
        list(store.read(file, 0))
    assert not store.is_unchanged(file)


@pytest.mark.parametrize(
    ("name", "one", "other", "is_same"),
    [
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=a;AccountKey=1",
            "AccountName=a;AccountKey=2",
            True,
        ),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "BlobEndpoint=a;SharedAccessSignature=1",
            "BlobEndpoint=a;SharedAccessSignature=2",
            True,
        ),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a", "AccountName=b", False),
        ("AWS_PROFILE", "test", "production", False),
        ("AWS_SECRET_ACCESS_KEY", "1", "2", True),
    ],
)
def test_identity(
    faulty: type[Faulty],
    name: str,
    one: str,
    other: str,
    is_same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New credentials are for the same store."""
    monkeypatch.setenv(name, one)
    identity = Store("faulty://models").identity
    monkeypatch.setenv(name, other)
    assert (Store("faulty://models").identity == identity) is is_same
