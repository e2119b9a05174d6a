"""A server of S3 for tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
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
