"""Errors of object stores, from the exceptions that their libraries raise."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch_py_backend.errors import ServerError, printable

# The variables in which the libraries look for credentials, by the scheme of a URL.
_CREDENTIALS: Mapping[str, str] = MappingProxyType(
    {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS",
        "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and a key",
        "hf": "HF_TOKEN",
    }
)
# The extra of this package that a scheme needs.
EXTRAS = {"gcs": "gs", "abfs": "az", "as": "az"} | {name: name for name in _CREDENTIALS}
_MAX_TEXT = 500
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS|CONNECTION", re.IGNORECASE)
_MIN_SECRET = 6
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")  # of a signed URL


class StoreError(ServerError):
    """A store does not answer, refuses, or holds what cannot be served.

    Attributes:
        temporary: whether the same request may succeed later, so that older files may be served.
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(printable(message))
        self.temporary = temporary


class _Cause(NamedTuple):
    """What exceptions mean. They are recognized by names: their libraries are not imported here.

    Attributes:
        text: the cause, for the message; empty: the exception's own text is enough.
        cure: what to do about it.
        names: the classes of the exceptions.
        statuses: those of HTTP.
        beginnings: of the exceptions' texts.
        temporary: whether the same request may succeed later.
    """

    text: str
    cure: str = ""
    names: Collection[str] = ()
    statuses: Collection[int] = ()
    beginnings: tuple[str, ...] = ()
    temporary: bool = True

    def matches(self, error: BaseException) -> bool:
        names = {parent.__name__ for parent in type(error).__mro__}
        return (
            not names.isdisjoint(self.names)
            or _status(error) in self.statuses
            or (bool(self.beginnings) and str(error).startswith(self.beginnings))
        )


_REACH = "Check its address and the network."
# The first one that matches counts.
_CAUSES = (
    _Cause(
        "there are no credentials",
        "Set {credentials}.",
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "DefaultCredentialsError",
        ),
        beginnings=("unable to connect to account",),  # adlfs
        temporary=False,
    ),
    _Cause(
        "access is denied",
        "Check that the credentials may list and {act} it; they come from {credentials}.",
        ("PermissionError", "ClientAuthenticationError"),
        (401, 403),
        ("Forbidden",),  # gcsfs
        temporary=False,
    ),
    _Cause(
        "it does not exist", "Check the URL.", ("FileNotFoundError",), (404, 410), temporary=False
    ),
    _Cause(
        "it cannot be reached",
        _REACH,
        (
            "EndpointConnectionError",
            "ClientConnectorError",
            "ConnectError",
            "ConnectionError",
            "ServiceRequestError",
        ),
    ),
    _Cause(
        "it did not answer in time",
        _REACH,
        (
            "TimeoutError",
            "FSTimeoutError",
            "ReadTimeoutError",
            "ConnectTimeoutError",
            "TimeoutException",
        ),
    ),
    _Cause("it fails or is overloaded", "Try again later.", statuses=(429, *range(500, 600))),
    _Cause("an answer broke off", "", ("ClientPayloadError", "IncompleteReadError")),
)
_OTHER = _Cause("")


def explain(url: str, error: Exception, done: str) -> StoreError:
    """Return an exception of a store's library as one sentence, and one that says what to do.

    Args:
        url: of the folder or file.
        error: the exception; a StoreError is returned as it is.
        done: "read" or "written".
    """
    if isinstance(error, StoreError):
        return error
    cause = next((cause for cause in _CAUSES if cause.matches(error)), _OTHER)
    text = _text(error)
    reason = f"{cause.text} ({text})" if cause.text else text
    extra = EXTRAS.get(url.partition("://")[0], "")
    credentials = _CREDENTIALS.get(extra, "the store's own settings")
    cure = cause.cure.format(credentials=credentials, act="write" if done == "written" else "read")
    message = f"{url} cannot be {done}: {reason}. {cure}".rstrip()
    return StoreError(message, temporary=cause.temporary)


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an exception is about."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def _text(error: Exception) -> str:
    """Return the class of an exception and the first line of its text, without secrets."""
    text = _QUERY.sub(r"\1", str(error))
    for secret in _secrets():
        text = text.replace(secret, "***")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:_MAX_TEXT]}".rstrip(".: ")


def _secrets() -> Iterator[str]:
    """Yield the credentials in environment variables, and those inside a connection string."""
    for name, value in os.environ.items():
        if _SECRET.search(name):
            parts = (part.partition("=")[2] for part in re.split("[;&]", value))
            # The endpoint in a connection string is not secret.
            for secret in (value, *(part for part in parts if not part.startswith("http"))):
                if len(secret) >= _MIN_SECRET:
                    yield secret
                    yield urllib.parse.quote(secret, safe="")
