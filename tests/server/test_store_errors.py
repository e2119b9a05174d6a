"""Sentences for the exceptions of the stores' libraries, real ones and made-up ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import stores

from torch_py_backend.server import store_errors


def _exception(name: str, text: str = "", **facts: object) -> Exception:
    """Return an exception of a class of some library."""
    error: Exception = type(name, (Exception,), facts)(text)
    return error


@pytest.mark.parametrize(
    ("error", "message", "temporary"),
    [
        (
            PermissionError("Forbidden"),
            (
                "access is denied (PermissionError: Forbidden). Check that the credentials may list"
                " and read it; they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                " AWS_PROFILE."
            ),
            False,
        ),
        (
            FileNotFoundError("models"),
            "it does not exist (FileNotFoundError: models). Check the URL.",
            False,
        ),
        (
            TimeoutError("too slow"),
            (
                "it did not answer in time (TimeoutError: too slow). Check its address and the"
                " network."
            ),
            True,
        ),
        (
            _exception("NoCredentialsError", "none"),
            (
                "there are no credentials (NoCredentialsError: none). Set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
            ),
            False,
        ),
        (
            _exception("EndpointConnectionError", "refused: http://127.0.0.1:9/b"),
            (
                "it cannot be reached (EndpointConnectionError: refused: http://127.0.0.1:9/b)."
                " Check its address and the network."
            ),
            True,
        ),
        (
            _exception("HttpError", "no", code=503),
            "it fails or is overloaded (HttpError: no). Try again later.",
            True,
        ),
        (
            _exception("ClientPayloadError", "x"),
            "an answer broke off (ClientPayloadError: x).",
            True,
        ),
        (OSError("first\nsecond"), "OSError: first.", True),
        (OSError("no answer of http://a:1/b"), "OSError: no answer of http://a:1/b.", True),
        (OSError("signed with s3cr3t-key"), "OSError: signed with ***.", True),
        (OSError("x" * 495 + " s3cr3t-key"), f"OSError: {'x' * 495} ***.", True),
        (OSError("k=c3Vy%2F3Ry, Key=c3Vy/3Ry"), "OSError: k=***, Key=***.", True),
        (
            OSError("404 https://cdn/a?S=s3cr3t&b=c: gone"),
            "OSError: 404 https://cdn/a gone.",
            True,
        ),
    ],
)
def test_sentences(
    error: Exception, message: str, temporary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause, the exception's first line without secrets, and what to do."""
    monkeypatch.setenv("SOME_SECRET_ACCESS_KEY", "s3cr3t-key")
    monkeypatch.setenv("STORE_CONNECTION_STRING", "Name=a;AccountKey=c3Vy/3Ry;End=http://a:1")
    explained = store_errors.explain("s3://bucket/models", error, "read")
    assert str(explained) == f"s3://bucket/models cannot be read: {message}"
    assert explained.temporary is temporary


# In a process of its own: huggingface_hub reads its variables when it is imported.
_LISTING = """
import sys
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.store_errors import StoreError
try:
    Store(sys.argv[1]).files()
except StoreError as error:
    print(error.temporary, error)
"""


def _listing(url: str, variables: Mapping[str, str]) -> tuple[str, str]:
    """Return what the listing of a folder prints to its output and to its log."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("AZURE_")}
    done = subprocess.run(
        # Not what libraries say of this version of Python.
        [sys.executable, "-W", "ignore", "-c", _LISTING, url],
        env=environment | dict(variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("scheme", ["gs", "az", "hf"])
def test_denied(scheme: str, status: int) -> None:
    """Denied access is final: files in the cache are not served then.

    The libraries print nothing beside it: their warnings may contain secrets.
    """
    url = f"{scheme}://organization/models"
    with stores.refusing(status) as variables:
        output, errors = _listing(url, variables)
    assert output.startswith(f"False {url} cannot be read: access is denied (")
    assert errors == ""


def test_missing_credentials() -> None:
    output, errors = _listing("az://box/models", {})
    assert output.startswith("False az://box/models cannot be read: there are no credentials (")
    assert "Set AZURE_STORAGE_CONNECTION_STRING, or" in output
    assert errors == ""
