"""Which keys a tritonserver asks for, told from its arguments."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

from torch_py_backend.errors import ServerError
from torch_py_backend.server import server_arguments
from torch_py_backend.server.server_arguments import Keys


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ([], Keys()),
        (["--log-verbose=1", "--http-port", "8000"], Keys()),
        (["--http-restricted-api=health:k=v"], Keys(http=(("k", "v"),))),
        (["--http-restricted-api", "health:k=v=w"], Keys(http=(("k", "v=w"),))),
        (
            ["--grpc-restricted-protocol=model-repository,trace:Key=v"],
            Keys(grpc=(("triton-grpc-protocol-key", "v"),)),
        ),
        (
            ["--http-restricted-api=health:a=1", "--http-restricted-api=trace:b=2"],
            Keys(http=(("a", "1"), ("b", "2"))),
        ),
        (
            server_arguments.restriction_arguments("trace, logging", "key", "v"),
            Keys(http=(("key", "v"),), grpc=(("triton-grpc-protocol-key", "v"),)),
        ),
    ],
    ids=["none", "others", "http", "two words", "grpc", "several", "ours"],
)
def test_keys(arguments: list[str], keys: Keys) -> None:
    """What we must send to endpoints that the user restricts."""
    assert server_arguments.required_keys(arguments) == keys


@pytest.mark.parametrize("value", ["", "health", "health:key", "health=key"])
def test_a_restriction_without_a_key(value: str) -> None:
    """It is refused before the server starts, with the form that is right."""
    with pytest.raises(ServerError, match="expected APIS:KEY=VALUE"):
        server_arguments.required_keys([f"--http-restricted-api={value}"])


def test_arguments_for_both_protocols() -> None:
    """What is closed over one protocol is closed over the other."""
    assert server_arguments.restriction_arguments("trace,model-repository", "k", "v") == [
        "--http-restricted-api=trace,model-repository:k=v",
        "--grpc-restricted-protocol=trace,model-repository:k=v",
    ]


@pytest.mark.parametrize("apis", ["", "repository", "trace,,logging", "trace;logging"])
def test_endpoints_that_triton_does_not_have(apis: str) -> None:
    """A misspelt endpoint would stay open: it is refused, and the names are listed."""
    with pytest.raises(ServerError, match="health, metadata, inference"):
        server_arguments.restriction_arguments(apis, "k", "v")


_ALL = "model-repository,shared-memory,trace,logging"


@pytest.mark.parametrize(
    ("arguments", "exposed"),
    [
        ([], ["model-repository", "shared-memory", "trace", "logging"]),
        (server_arguments.restriction_arguments(_ALL, "k", "v"), []),
        (
            server_arguments.restriction_arguments("health,statistics", "k", "v"),
            _ALL.split(","),
        ),
        (
            server_arguments.restriction_arguments("model-repository, trace", "k", "v"),
            ["shared-memory", "logging"],
        ),
        ([f"--http-restricted-api={_ALL}:k=v"], _ALL.split(",")),
        (
            [
                f"--http-restricted-api={_ALL}:k=v",
                "--grpc-restricted-protocol",
                "trace:k=v",
                "--grpc-restricted-protocol=logging:l=w",
            ],
            ["model-repository", "shared-memory"],
        ),
    ],
    ids=["none", "all", "others", "some", "one protocol", "several"],
)
def test_what_is_still_open(arguments: list[str], exposed: list[str]) -> None:
    """An endpoint is closed once both protocols ask for a key, and not when another one is."""
    assert server_arguments.unrestricted(arguments) == exposed


def test_the_flags_in_the_documentation() -> None:
    """What security.md gives for other servers closes what it says, in the form Triton takes."""
    text = (ROOT / "docs/security.md").read_text()
    flags = re.findall(r"^--(?:http|grpc)-restricted\S+$", text, flags=re.MULTILINE)
    assert server_arguments.required_keys(flags) == Keys(
        http=(("admin-key", "SECRET"),), grpc=(("triton-grpc-protocol-admin-key", "SECRET"),)
    )
    assert server_arguments.unrestricted(flags) == []
