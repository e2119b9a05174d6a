"""Arguments of a tritonserver: their values, and restrictions of endpoints."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

from torch_py_backend.errors import ToolError
from torch_py_backend.server import server_arguments
from torch_py_backend.server.server_arguments import SENSITIVE

_ARGUMENTS = ["--load-model=a", "--log-verbose", "1", "--load-model", "b", "--load-models=c"]
_DOCUMENTED = re.findall(
    r"^--(?:http|grpc)-restricted\S+$", (ROOT / "docs/security.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(
    ("arguments", "values", "rest"),
    [
        (_ARGUMENTS, ["a", "b"], ["--log-verbose", "1", "--load-models=c"]),
        (["--load-model"], [""], []),
        (["--load-model", "--load-model", "x"], ["--load-model", "x"], ["x"]),
    ],
)
def test_values_in_both_spellings(arguments: list[str], values: list[str], rest: list[str]) -> None:
    """`--name=value` and `--name value` are found, and can be removed."""
    assert server_arguments.values(arguments, "load-model") == values
    assert server_arguments.without(arguments, "load-model") == rest


@pytest.mark.parametrize(
    ("arguments", "services"),
    [
        (["--http-thread-count=2", "--allow-gpu-metrics=false"], []),
        (
            ["--http-port", "80", "--allow-metrics=0", "--reuse-grpc-port=1"],
            ["http", "grpc", "metrics"],
        ),
    ],
)
def test_services_that_are_configured(arguments: list[str], services: list[str]) -> None:
    """`serve` does not check the ports that are configured for tritonserver."""
    names = ("http", "grpc", "metrics", "health")
    assert [name for name in names if server_arguments.configures(arguments, name)] == services


def test_restrictions() -> None:
    """They are the arguments that the documentation has for a plain tritonserver."""
    assert server_arguments.restriction_arguments(", ".join(SENSITIVE), "SECRET") == _DOCUMENTED


@pytest.mark.parametrize("apis", ["repository", "trace,,logging", "trace:k"])
def test_endpoints_that_triton_does_not_have(apis: str) -> None:
    """A misspelt endpoint would stay open: it is an error, which lists the names."""
    with pytest.raises(ToolError, match="health, metadata, inference"):
        server_arguments.restriction_arguments(apis, "k")
