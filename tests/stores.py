"""A server of S3 for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-secret"


def s3(folder: str, files: Mapping[str, bytes]) -> tuple[dict[str, str], Callable[[], None]]:
    """Start a server of S3 in a thread, with files in a folder of a bucket.

    Return the environment in which s3:// is this server, and the function that stops it.
    """
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    store: Any = fsspec.filesystem(
        "s3", key=KEY, secret=SECRET, endpoint_url=url, skip_instance_cache=True
    )
    store.mkdirs(folder.partition("/")[0])
    for name, content in files.items():
        store.pipe_file(f"{folder}/{name}", content)
    variables = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    return variables, server.stop
