"""Arguments of a tritonserver: their values, and restrictions of endpoints."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

from torch_py_backend.errors import ToolError
from torch_py_backend.server import server_arguments
from torch_py_backend.server.server_arguments import SENSITIVE, Keys

_ARGUMENTS = ["--load-model=a", "--log-verbose", "1", "--load-model", "b", "--load-models=c"]
_ALL = ",".join(SENSITIVE)
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


@pytest.mark.parametrize(
    ("arguments", "keys", "exposed"),
    [
        pytest.param([], Keys(), list(SENSITIVE), id="none"),
        pytest.param(
            [f"--http-restricted-api={_ALL}:k=v=w", "--http-restricted-api", "health:l=x"],
            Keys(http=(("k", "v=w"), ("l", "x"))),
            list(SENSITIVE),
            id="http",
        ),
        pytest.param(
            server_arguments.restriction_arguments("health, model-repository", "k", "v"),
            Keys((("k", "v"),), (("triton-grpc-protocol-k", "v"),)),
            ["shared-memory", "trace", "logging"],
            id="ours",
        ),
        pytest.param(
            [
                f"--http-restricted-api={_ALL}:k=v",
                "--grpc-restricted-protocol",
                "trace:k=v",
                "--grpc-restricted-protocol=logging:L=w",
            ],
            Keys((("k", "v"),), (("triton-grpc-protocol-k", "v"), ("triton-grpc-protocol-l", "w"))),
            ["model-repository", "shared-memory"],
            id="several",
        ),
        pytest.param(
            _DOCUMENTED,
            Keys((("admin-key", "SECRET"),), (("triton-grpc-protocol-admin-key", "SECRET"),)),
            [],
            id="security.md",
        ),
    ],
)
def test_keys_and_exposed_endpoints(arguments: list[str], keys: Keys, exposed: list[str]) -> None:
    """Clients must send the keys; an endpoint is restricted if both protocols require one."""
    assert server_arguments.required_keys(arguments) == keys
    assert server_arguments.unrestricted(arguments) == exposed


@pytest.mark.parametrize("value", ["health:key", "health=key"])
def test_a_restriction_without_a_key(value: str) -> None:
    """The error shows the expected form."""
    with pytest.raises(ToolError, match="expected APIS:KEY=VALUE"):
        server_arguments.required_keys([f"--http-restricted-api={value}"])


@pytest.mark.parametrize("apis", ["repository", "trace,,logging", "trace:k"])
def test_endpoints_that_triton_does_not_have(apis: str) -> None:
    """A misspelt endpoint would stay open: it is an error, which lists the names."""
    with pytest.raises(ToolError, match="health, metadata, inference"):
        server_arguments.restriction_arguments(apis, "k", "v")
