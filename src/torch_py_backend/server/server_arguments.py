"""The command-line arguments of a tritonserver."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_py_backend.errors import ToolError

# With these a client can run code, read memory or write files.
SENSITIVE = ("model-repository", "shared-memory", "trace", "logging")
# The names of Triton 24.10.
APIS = ("health", "metadata", "inference", "model-config", "statistics", *SENSITIVE)
_RESTRICTIONS = ("http-restricted-api", "grpc-restricted-protocol")
KEY_HEADER = "admin-key"
KEY_METADATA = f"triton-grpc-protocol-{KEY_HEADER}"
# Triton waits this long for models in use before it exits.
EXIT_SECONDS = 30
# What `serve` sets itself, and uses.
_REFUSED = (
    *("model-control-mode", "model-repository", "exit-on-error", *_RESTRICTIONS),
    *("http-port", "allow-http", "grpc-port", "allow-grpc", "metrics-port"),
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what `serve` uses of the arguments for tritonserver.

    Returns:
        `load_model`, the models to load; `exit_timeout_secs`; and `others`, all other arguments.

    Raises:
        ToolError: an argument cannot be used with `serve`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--load-model", action="append", default=[])
    parser.add_argument("--exit-timeout-secs", type=int, default=EXIT_SECONDS)
    try:
        parsed, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ToolError(f"{error}.") from None
    for name in _REFUSED:
        if any(word.partition("=")[0] == f"--{name}" for word in others):
            raise ToolError(
                f"--{name} was given after --, and `serve` sets it itself; use an option of"
                " `serve`, such as --http-port or --restrict, or remove it."
            )
    parsed.others = others
    return parsed


def endpoints(text: str) -> list[str]:
    """Return the names of Triton's endpoints, which are separated by commas.

    Raises:
        ToolError: Triton has no endpoint of such a name.
    """
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in APIS:
            raise ToolError(f"'{name}' is not one of Triton's endpoints: {', '.join(APIS)}.")
    return names


def restriction_arguments(names: Sequence[str], key: str) -> list[str]:
    """Return the arguments that restrict endpoints over both protocols.

    A client must then send the header `KEY_HEADER` with this key, or its metadata `KEY_METADATA`.
    """
    value = f"{','.join(names)}:{KEY_HEADER}={key}"
    return [f"--{option}={value}" for option in _RESTRICTIONS] if names else []
