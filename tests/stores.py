"""Object stores for tests: a server of S3, and one of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-secret"


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
        variables: the environment in which s3:// is this server.
    """

    def __init__(self) -> None:
        self._server: ThreadedMotoServer | None = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        url = "http://{}:{}".format(*self._server.get_host_and_port())
        self.variables = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
        self._files: Any = fsspec.filesystem(
            "s3", key=KEY, secret=SECRET, endpoint_url=url, skip_instance_cache=True
        )
        # All servers of a process have the same buckets.
        request = urllib.request.Request(f"{url}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

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


_COMMIT = "a" * 40


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
            api, resolve = "/api/models/organization/net", f"/organization/net/resolve/{_COMMIT}/"
            status, headers = 200, {"X-Repo-Commit": _COMMIT}
            if path == f"{api}/tree/{_COMMIT}":
                body = json.dumps([_tree_entry(name, files[name]) for name in files]).encode()
            elif path in (api, f"{api}/revision/main", f"{api}/revision/{_COMMIT}"):
                body = json.dumps({"id": "organization/net", "sha": _COMMIT}).encode()
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


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(content), "path": name}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry
