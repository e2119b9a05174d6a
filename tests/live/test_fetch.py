"""`serve URL` against a server of S3."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import stores
import supervised
import torch

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


_MODEL = {
    "scale/config.pbtxt": _CONFIG,
    "scale/1/model.py": _MODULE,
    "scale/1/model.safetensors": safetensors.torch.save({"factor": torch.full((4,), 2.0)}),
}


def test_a_start_fetches_models(tmp_path: Path) -> None:
    """tests/model_folders has stores that are away."""
    s3 = stores.S3()
    s3.put("bucket/models", _MODEL)
    with supervised.serve(_URL, f"--cache={tmp_path / 'cache'}", **s3.variables) as served:
        served.wait_loaded()
        s3.stop()
        assert served.infer("scale", 3.0) == [6.0] * 4
        assert stores.SECRET not in served.log
