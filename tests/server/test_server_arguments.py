"""Arguments of a tritonserver: their values, and restrictions of endpoints."""

from __future__ import annotations

import re

import pytest
from documentation import ROOT

from torch_py_backend.errors import ToolError
from torch_py_backend.server import server_arguments
from torch_py_backend.server.server_arguments import SENSITIVE

_DOCUMENTED = re.findall(
    r"^--(?:http|grpc)-restricted\S+$", (ROOT / "docs/security.md").read_text(), re.MULTILINE
)


def test_both_spellings() -> None:
    """`--name=value` and `--name value` are found; the last --exit-timeout-secs counts."""
    words = "--load-model=a --log-verbose 1 --exit-timeout-secs=5 --load-model b --load-models=c"
    parsed = server_arguments.parse([*words.split(), "--exit-timeout-secs", "7"])
    assert (parsed.load_model, parsed.exit_timeout_secs) == (["a", "b"], 7)
    assert parsed.others == ["--log-verbose", "1", "--load-models=c"]
    assert server_arguments.parse([]).exit_timeout_secs == server_arguments.EXIT_SECONDS


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--exit-timeout-secs=soon", "--exit-timeout-secs: invalid int"),
        ("--load-model", "expected one argument"),
        ("--model-control-mode=poll", "--model-control-mode was .* `serve` sets it itself"),
        ("--http-restricted-api=trace:k=v", "api was .* `serve` sets it itself"),
        ("--http-port 1", "port was .* `serve` sets it itself"),
    ],
)
def test_refused_arguments(argument: str, says: str) -> None:
    """What `serve` itself uses cannot be taken from it: it would wait for it forever."""
    with pytest.raises(ToolError, match=says):
        server_arguments.parse(argument.split())


def test_restrictions() -> None:
    """They are the arguments that the documentation has for a plain tritonserver."""
    names = server_arguments.endpoints(", ".join(SENSITIVE))
    assert server_arguments.restriction_arguments(names, "SECRET") == _DOCUMENTED
    assert server_arguments.restriction_arguments([], "SECRET") == []


@pytest.mark.parametrize("apis", ["repository", "trace:k"])
def test_endpoints_that_triton_does_not_have(apis: str) -> None:
    """A misspelt endpoint would stay open: it is an error, which lists the names."""
    with pytest.raises(ToolError, match="health, metadata, inference"):
        server_arguments.endpoints(apis)
