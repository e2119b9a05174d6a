"""Compiled models: every compilation happens before READY."""

from __future__ import annotations

from pathlib import Path

import models
import numpy as np
import scenarios
import serving
import tritonclient.http
from torch import Tensor, nn

# A compiler that counts its calls in a file, and then leaves the work to inductor.
_COUNTING = """
from pathlib import Path

from torch._dynamo import register_backend
from torch._inductor.compile_fx import compile_fx


@register_backend
def counting(graph, samples):
    with (Path(__file__).parent / "compilations").open("a") as file:
        file.write("x")
    return compile_fx(graph, samples)


"""


def test_no_request_pays_for_a_compilation(tmp_path: Path) -> None:
    """Requests of 1 to 8 rows run what the warm-up compiled, and add no compilation."""
    parameters = {
        "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "counting"}',
        "WEIGHTS": "none",
    }
    folder = scenarios.Scenario(
        "compiled",
        scenarios.text(_COUNTING + models.source(models.Compiled)),
        scenarios.config({"x": [4]}, {"y": [2]}, parameters=parameters)
        + 'parameters { key: "MODEL_CLASS" value { string_value: "Compiled" } }\n',
    ).lay_out(tmp_path / "repository")
    count = folder / "1" / "compilations"
    with serving.running(tmp_path) as server:
        before = count.read_text()
        client = tritonclient.http.InferenceServerClient(server.http_address)
        for rows in (3, 8, 1, 5, 2, 7, 4, 6):
            tensor = tritonclient.http.InferInput("x", [rows, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((rows, 4), dtype=np.float32))
            assert client.infer("compiled", [tensor]).as_numpy("y").shape == (rows, 2)
        client.close()
        assert before
        assert count.read_text() == before
    # Nor does one run beside what was compiled.
    assert "run eagerly" not in (tmp_path / "server.log").read_text(errors="replace")


class Widening(nn.Module):
    """Its graph has a guard: fewer columns than rows is another branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 4 else x * 2.0


def test_shape_that_was_not_met_runs_eagerly(tmp_path: Path) -> None:
    """A length beyond the warm-up's compiles nothing, is answered, and logged once."""
    parameters = {
        "TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "counting"}',
        "MODEL_CLASS": "Widening",
    }
    folder = scenarios.Scenario(
        "widening",
        scenarios.text(_COUNTING + models.source(Widening)),
        scenarios.config({"x": [-1]}, {"y": [-1]}, parameters=parameters),
    ).lay_out(tmp_path / "repository")
    count = folder / "1" / "compilations"
    with serving.running(tmp_path) as server:
        before = count.read_text()
        client = tritonclient.http.InferenceServerClient(server.http_address)
        for length in (8, 6, 3, 2, 9, 1):
            x = np.ones((2, length), dtype=np.float32)
            tensor = tritonclient.http.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            np.testing.assert_array_equal(client.infer("widening", [tensor]).as_numpy("y"), x * 2)
        client.close()
        assert before
        assert count.read_text() == before
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert log.count("were not met in the warm-up") == 1
