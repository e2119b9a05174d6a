"""Which keys a tritonserver asks for, told from its arguments."""

from __future__ import annotations

import pytest

from torch_py_backend import restrictions
from torch_py_backend.errors import ServerError
from torch_py_backend.restrictions import Keys


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
            restrictions.arguments("trace, logging", "key", "v"),
            Keys(http=(("key", "v"),), grpc=(("triton-grpc-protocol-key", "v"),)),
        ),
    ],
    ids=["none", "others", "http", "two words", "grpc", "several", "ours"],
)
def test_keys(arguments: list[str], keys: Keys) -> None:
    """What we must send to endpoints that the user restricts."""
    assert restrictions.keys(arguments) == keys


@pytest.mark.parametrize("value", ["", "health", "health:key", "health=key"])
def test_a_restriction_without_a_key(value: str) -> None:
    """It is refused before the server starts, with the form that is right."""
    with pytest.raises(ServerError, match="expected APIS:KEY=VALUE"):
        restrictions.keys([f"--http-restricted-api={value}"])


def test_arguments_for_both_protocols() -> None:
    """What is closed over one protocol is closed over the other."""
    assert restrictions.arguments("trace,model-repository", "k", "v") == [
        "--http-restricted-api=trace,model-repository:k=v",
        "--grpc-restricted-protocol=trace,model-repository:k=v",
    ]


@pytest.mark.parametrize("apis", ["", "repository", "trace,,logging", "trace;logging"])
def test_endpoints_that_triton_does_not_have(apis: str) -> None:
    """A misspelt endpoint would stay open: it is refused, and the names are listed."""
    with pytest.raises(ServerError, match="health, metadata, inference"):
        restrictions.arguments(apis, "k", "v")
