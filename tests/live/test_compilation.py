"""Compiled models: every compilation happens before READY."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import scenarios
import serving
import tritonclient.http
from torch import Tensor, nn

# A compiler that counts its calls in a file, and generates no code.
_COUNTING = """
from pathlib import Path

from torch._dynamo import register_backend


@register_backend
def counting(graph, samples):
    with (Path(__file__).parent / "compilations").open("a") as file:
        file.write("x")
    return graph.forward


"""


class Widening(nn.Module):
    """Its graph has a guard: fewer columns than rows is another branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 4 else x * 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder, with a model of fixed size and one whose size varies."""
    folder = tmp_path_factory.mktemp("compilation")
    for module, sizes in ((models.Compiled, ([4], [2])), (Widening, ([-1], [-1]))):
        parameters = {
            "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "counting"}',
            "MODEL_CLASS": module.__name__,
            "WEIGHTS": "none",
        }
        scenarios.Scenario(
            module.__name__.lower(),
            scenarios.text(_COUNTING + models.source(module)),
            scenarios.config({"x": sizes[0]}, {"y": sizes[1]}, parameters=parameters),
        ).lay_out(folder / "repository")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[tritonclient.http.InferenceServerClient]:
    with (
        serving.running(folder) as server,
        tritonclient.http.InferenceServerClient(server.http_address) as client,
    ):
        yield client


def _infer(client: tritonclient.http.InferenceServerClient, model: str, x: Any) -> Any:
    return client.infer(model, serving.infer_inputs(tritonclient.http, {"x": x})).as_numpy("y")


def _compilations(folder: Path, model: str) -> str:
    return (folder / "repository" / model / "1" / "compilations").read_text()


def test_no_request_pays_for_a_compilation(
    client: tritonclient.http.InferenceServerClient, folder: Path
) -> None:
    """Requests of 1 to 8 rows run what the warm-up compiled, and add no compilation."""
    before = _compilations(folder, "compiled")
    for rows in (3, 8, 1, 5, 2, 7, 4, 6):
        assert _infer(client, "compiled", np.ones((rows, 4), np.float32)).shape == (rows, 2)
    assert before
    assert _compilations(folder, "compiled") == before
    # Nor does one run beside what was compiled.
    assert "run eagerly" not in (folder / "server.log").read_text(errors="replace")


def test_shape_that_was_not_met_runs_eagerly(
    client: tritonclient.http.InferenceServerClient, folder: Path
) -> None:
    """A length beyond the warm-up's compiles nothing, is answered, and logged once."""
    before = _compilations(folder, "widening")
    for length in (8, 6, 3, 2, 9, 1):
        x = np.ones((2, length), np.float32)
        np.testing.assert_array_equal(_infer(client, "widening", x), x * 2)
    assert before
    assert _compilations(folder, "widening") == before
    log = (folder / "server.log").read_text(errors="replace")
    assert log.count("were not met in the warm-up") == 1
