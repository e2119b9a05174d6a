"""`serve URL` against a server of S3 and one of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import stores
import supervised
import torch
import tritonclient.grpc

pytestmark = [pytest.mark.server]

_URL = "s3://bucket/models"
_MODULE = b"""
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.factor
"""
_CONFIG = b"""
backend: "pytorch_py"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
instance_group [{ kind: KIND_CPU }]
"""


def _model(factor: float) -> Mapping[str, bytes]:
    return {
        "scale/config.pbtxt": _CONFIG,
        "scale/1/model.py": _MODULE,
        "scale/1/model.safetensors": safetensors.torch.save({"factor": torch.full((4,), factor)}),
    }


@pytest.fixture
def s3() -> Iterator[stores.S3]:
    server = stores.S3()
    server.put("bucket/models", _model(2.0))
    yield server
    server.stop()


def test_starts(s3: stores.S3, tmp_path: Path) -> None:
    """A start fetches the models; without the store, the last files are served."""
    cache = f"--cache={tmp_path / 'cache'}"
    for factor, store_runs in ((2.0, True), (2.0, False)):
        if store_runs:
            s3.put("bucket/models", _model(factor))
        else:
            s3.stop()
        with supervised.serve(_URL, cache, **s3.variables) as served:
            served.wait_loaded()
            assert served.infer("scale", 3.0) == [3 * factor] * 4
            log = served.log
        assert ("Serving the files that were fetched last." in log) != store_runs
        assert stores.SECRET not in log


@pytest.mark.slow
def test_a_model_of_the_hugging_face_hub(tmp_path: Path) -> None:
    """It becomes a model folder, whose inputs are tensors."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    bert = transformers.BertModel(settings, add_pooling_layer=False).eval()
    bert.save_pretrained(tmp_path / "net")
    ids = np.arange(6, dtype=np.int64)[None]
    with torch.inference_mode():
        expected = bert(torch.from_numpy(ids)).last_hidden_state.numpy()
    cache = f"--cache={tmp_path / 'cache'}"
    with (
        stores.hugging_face_hub(stores.files_in(tmp_path / "net")) as address,
        supervised.serve(
            "hf://organization/net", cache, HF_ENDPOINT=address, HF_HUB_OFFLINE="0"
        ) as served,
    ):
        served.wait_loaded()
        with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
            tensor = tritonclient.grpc.InferInput("input_ids", [1, 6], "INT64")
            tensor.set_data_from_numpy(ids)
            answer = client.infer("net", [tensor]).as_numpy("last_hidden_state")
    np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-4)


def test_refused(s3: stores.S3, tmp_path: Path) -> None:
    """A URL that holds no models ends the command with a sentence."""
    url = "s3://bucket/models/scale/1"
    with supervised.serve(url, f"--cache={tmp_path / 'cache'}", **s3.variables) as served:
        assert served.process.wait(60) == 1
        assert "holds no models" in served.log
