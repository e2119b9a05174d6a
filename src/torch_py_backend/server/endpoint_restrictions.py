"""Which of Triton's endpoints ask for a key, told from the arguments of a tritonserver."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_py_backend.errors import ServerError

# The names of Triton's own, of 24.10.
APIS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
# Through these a client runs code, reads memory or writes files: closed to strangers.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
# Triton puts this before the names of keys in gRPC's metadata, and nothing in HTTP's headers.
_GRPC_KEY = "triton-grpc-protocol-"
_RESTRICTION = re.compile(r"--(http-restricted-api|grpc-restricted-protocol)(?:=|$)")


@dataclass(frozen=True, slots=True)
class Keys:
    """What a caller must send where Triton's endpoints are restricted: pairs of name and value."""

    http: tuple[tuple[str, str], ...] = ()
    grpc: tuple[tuple[str, str], ...] = ()


def keys(arguments: Sequence[str]) -> Keys:
    """The keys that a tritonserver with these arguments asks for.

    Raises:
        ServerError: a restriction has no key.
    """
    http, over_grpc = [], []
    for protocol, value in _restricted(arguments):
        key, equals, secret = value.partition(":")[2].partition("=")
        if not equals:
            raise ServerError(
                f"'{value}' restricts no endpoints; expected APIS:KEY=VALUE, such as"
                " model-repository,shared-memory:admin-key=secret."
            )
        if protocol == "http":
            http.append((key, secret))
        else:
            over_grpc.append((f"{_GRPC_KEY}{key}".lower(), secret))
    return Keys(tuple(http), tuple(over_grpc))


def still_open(arguments: Sequence[str]) -> list[str]:
    """The sensitive endpoints that ask for no key, over HTTP or over gRPC."""
    closed: dict[str, set[str]] = {"http": set(), "grpc": set()}
    for protocol, value in _restricted(arguments):
        closed[protocol] |= {name.strip() for name in value.partition(":")[0].split(",")}
    return [name for name in SENSITIVE if not all(name in names for names in closed.values())]


def _restricted(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The protocol and the value of each restriction."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        match = _RESTRICTION.match(argument)
        if match is not None:
            yield match[1][:4], argument[match.end() :] if "=" in match[0] else following


def arguments(apis: str, key: str, secret: str) -> list[str]:
    """What restricts these endpoints, comma-separated, over both protocols.

    Raises:
        ServerError: Triton has no such endpoints.
    """
    names = [name.strip() for name in apis.split(",")]
    unknown = [name for name in names if name not in APIS]
    if unknown:
        raise ServerError(f"'{unknown[0]}' is none of Triton's endpoints: {', '.join(APIS)}.")
    value = f"{','.join(names)}:{key}={secret}"
    return [f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}"]
