"""The command-line arguments of a tritonserver, and the restrictions of endpoints among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch_py_backend.errors import ToolError

# With these a client can run code, read memory or write files.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
# The names of Triton 24.10.
APIS = ("health", "metadata", "inference", "model-config", "statistics", *SENSITIVE)
_HTTP, _GRPC = "http-restricted-api", "grpc-restricted-protocol"
# The prefix of the names of keys in gRPC metadata; HTTP headers have none.
_GRPC_PREFIX = "triton-grpc-protocol-"


def values(arguments: Sequence[str], *names: str) -> list[str]:
    """Return the values of arguments, which may be repeated: `--name=value` or `--name value`."""
    options = [f"--{name}" for name in names]
    return [
        following if argument in options else argument.partition("=")[2]
        for argument, following in itertools.pairwise([*arguments, ""])
        if argument.partition("=")[0] in options
    ]


def without(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments without one of them and its values."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and argument.partition("=")[0] != f"--{name}":
            kept.append(argument)
        is_value = not is_value and argument == f"--{name}"
    return kept


def configures(arguments: Sequence[str], service: str) -> bool:
    """Return whether the arguments set where a service listens, or disable it."""
    names = (f"{service}-port", f"{service}-address", f"allow-{service}", f"reuse-{service}-port")
    return bool(values(arguments, *names))


# --- restrictions --------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The headers that a client must send to restricted endpoints: pairs of name and value."""

    http: tuple[tuple[str, str], ...] = ()
    grpc: tuple[tuple[str, str], ...] = ()


def required_keys(arguments: Sequence[str]) -> Keys:
    """Return the keys that a tritonserver with these arguments requires.

    Raises:
        ToolError: a restriction has no key.
    """
    grpc = [(f"{_GRPC_PREFIX}{key}".lower(), secret) for key, secret in _keys(arguments, _GRPC)]
    return Keys(tuple(_keys(arguments, _HTTP)), tuple(grpc))


def _keys(arguments: Sequence[str], name: str) -> list[tuple[str, str]]:
    keys = []
    for value in values(arguments, name):
        key, equals, secret = value.partition(":")[2].partition("=")
        if not equals:
            raise ToolError(
                f"'{value}' restricts no endpoints; expected APIS:KEY=VALUE, such as"
                " model-repository,shared-memory:admin-key=secret."
            )
        keys.append((key, secret))
    return keys


def unrestricted(arguments: Sequence[str]) -> list[str]:
    """Return the sensitive endpoints that require no key over HTTP or over gRPC."""
    http, grpc = (
        ",".join(value.partition(":")[0] for value in values(arguments, name)).split(",")
        for name in (_HTTP, _GRPC)
    )
    return [api for api in SENSITIVE if api not in http or api not in grpc]


def restriction_arguments(apis: str, key: str, secret: str) -> list[str]:
    """Return the arguments that restrict endpoints, separated by commas, over both protocols.

    A client must then send the header `key` with the value `secret`.

    Raises:
        ToolError: Triton has no endpoint of such a name.
    """
    names = [name.strip() for name in apis.split(",")]
    unknown = [name for name in names if name not in APIS]
    if unknown:
        raise ToolError(f"'{unknown[0]}' is not one of Triton's endpoints: {', '.join(APIS)}.")
    value = f"{','.join(names)}:{key}={secret}"
    return [f"--{_HTTP}={value}", f"--{_GRPC}={value}"]
