"""`serve URL` against a server of S3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import stores
import supervised
import torch

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


def test_a_start_fetches_models_and_serves_the_last_files_if_the_store_is_away(
    s3: stores.S3, tmp_path: Path
) -> None:
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
