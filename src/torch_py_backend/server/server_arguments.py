"""The command-line arguments of a tritonserver."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_py_backend.errors import ToolError

# With these a client can run code, read memory or write files.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
# The names of Triton 24.10.
APIS = ("health", "metadata", "inference", "model-config", "statistics", *SENSITIVE)
RESTRICTIONS = ("http-restricted-api", "grpc-restricted-protocol")
KEY_HEADER = "admin-key"
KEY_METADATA = f"triton-grpc-protocol-{KEY_HEADER}"


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


def restriction_arguments(apis: str, key: str) -> list[str]:
    """Return the arguments that restrict endpoints, separated by commas, over both protocols.

    A client must then send the header `KEY_HEADER` with this key, or its metadata `KEY_METADATA`.

    Raises:
        ToolError: Triton has no endpoint of such a name.
    """
    names = [name.strip() for name in apis.split(",")]
    unknown = [name for name in names if name not in APIS]
    if unknown:
        raise ToolError(f"'{unknown[0]}' is not one of Triton's endpoints: {', '.join(APIS)}.")
    value = f"{','.join(names)}:{KEY_HEADER}={key}"
    return [f"--{option}={value}" for option in RESTRICTIONS]
