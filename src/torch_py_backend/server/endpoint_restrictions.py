"""Restrictions of Triton's endpoints by keys, parsed from the arguments of a tritonserver."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_py_backend.errors import ServerError

# The names of Triton 24.10.
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
# With these a client can run code, read memory or write files.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
# The prefix of the names of keys in gRPC metadata; HTTP headers have none.
_GRPC_PREFIX = "triton-grpc-protocol-"
_RESTRICTION = re.compile(r"--(http-restricted-api|grpc-restricted-protocol)(?:=|$)")


@dataclass(frozen=True, slots=True)
class Keys:
    """The headers that a client must send to restricted endpoints: pairs of name and value."""

    http: tuple[tuple[str, str], ...] = ()
    grpc: tuple[tuple[str, str], ...] = ()


def required_keys(arguments: Sequence[str]) -> Keys:
    """Return the keys that a tritonserver with these arguments requires.

    Raises:
        ServerError: a restriction has no key.
    """
    http, grpc = [], []
    for protocol, value in _restrictions(arguments):
        key, equals, secret = value.partition(":")[2].partition("=")
        if not equals:
            raise ServerError(
                f"'{value}' restricts no endpoints; expected APIS:KEY=VALUE, such as"
                " model-repository,shared-memory:admin-key=secret."
            )
        if protocol == "http":
            http.append((key, secret))
        else:
            grpc.append((f"{_GRPC_PREFIX}{key}".lower(), secret))
    return Keys(tuple(http), tuple(grpc))


def unrestricted(arguments: Sequence[str]) -> list[str]:
    """Return the sensitive endpoints that require no key over HTTP or over gRPC."""
    restricted: dict[str, set[str]] = {"http": set(), "grpc": set()}
    for protocol, value in _restrictions(arguments):
        restricted[protocol] |= {name.strip() for name in value.partition(":")[0].split(",")}
    return [name for name in SENSITIVE if not all(name in names for names in restricted.values())]


def _restrictions(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the protocol and the value of each restriction."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        match = _RESTRICTION.match(argument)
        if match is not None:
            yield match[1][:4], argument[match.end() :] if "=" in match[0] else following


def restriction_arguments(apis: str, key: str, secret: str) -> list[str]:
    """Return the arguments that restrict endpoints, over both protocols.

    Args:
        apis: the names of the endpoints, separated by commas.
        key: the name of the header.
        secret: its value.

    Raises:
        ServerError: Triton has no endpoint of such a name.
    """
    names = [name.strip() for name in apis.split(",")]
    unknown = [name for name in names if name not in APIS]
    if unknown:
        raise ServerError(f"'{unknown[0]}' is not one of Triton's endpoints: {', '.join(APIS)}.")
    value = f"{','.join(names)}:{key}={secret}"
    return [f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}"]
