"""`serve s3://…` against a server of S3: answers, new files, healing, faults of the store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import stores
import supervised
import torch
import tritonclient.grpc

import torch_py_backend

pytestmark = [pytest.mark.server]

_URL = "s3://bucket/models"
_MODULE = """
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.factor
"""
_CONFIG = """
backend: "pytorch_py"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
instance_group [{ kind: KIND_CPU count: 2 }]
parameters { key: "WATCH_WEIGHTS" value { string_value: "true" } }
"""


def _weights(factor: float) -> bytes:
    return safetensors.torch.save({"factor": torch.full((4,), factor)})


def _model(factor: float, code: str = _MODULE) -> Mapping[str, bytes]:
    return {
        "scale/config.pbtxt": _CONFIG.encode(),
        "scale/1/model.py": f"import torch\n{code}".encode(),
        "scale/1/model.safetensors": _weights(factor),
    }


@pytest.fixture
def s3() -> Iterator[stores.S3]:
    server = stores.S3()
    server.put("bucket/models", _model(2.0))
    yield server
    server.stop()


def _folders_of_servers(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("cache/user-*/servers/*"))


def _mapped(served: supervised.Supervised) -> set[str]:
    """Return the files of weights that the model's instances have in their memory."""
    assert len(served.stubs("scale")) == 2
    return {
        entry.path
        for stub in served.stubs("scale")
        for entry in stub.memory_maps()
        if entry.path.endswith("model.safetensors")
    }


def test_changes_and_faults(s3: stores.S3, tmp_path: Path) -> None:
    """Weights in the bucket are swapped in; without the store, a model that dies is healed."""
    arguments = [f"--cache={tmp_path / 'cache'}", "--poll=0.5"]
    with supervised.serve(_URL, *arguments, **s3.variables) as served:
        served.wait_loaded()
        assert served.infer("scale", 3.0) == [6.0] * 4
        s3.put("bucket/models", {"scale/1/model.safetensors": _weights(5.0)})
        supervised.until(lambda: served.infer("scale", 3.0) == [15.0] * 4, served)
        assert "s3://bucket/models has changed; its new files are in place." in served.log
        # The weights of both instances are one mapped file.
        supervised.until(lambda: len(_mapped(served)) == 1, served)
        s3.stop()
        served.stubs("scale")[0].kill()
        supervised.until(lambda: "serves again after" in served.log, served)
        assert served.infer("scale", 3.0) == [15.0] * 4
        supervised.until(lambda: "The models keep serving." in served.log, served)
        log = served.log
    assert stores.SECRET not in log
    assert _folders_of_servers(tmp_path) == []
    # A new server starts with what was fetched.
    with supervised.serve(_URL, *arguments, **s3.variables) as served:
        served.wait_loaded()
        assert "Serving the files that were fetched last." in served.log
        assert served.infer("scale", 3.0) == [15.0] * 4


def test_reload(s3: stores.S3, tmp_path: Path) -> None:
    """New versions, new models and new code are loaded; what cannot be loaded is refused."""
    arguments = [f"--cache={tmp_path / 'cache'}", "--poll=0.5", "--reload"]
    config = _CONFIG.replace('"true"', '"false"')
    s3.put("bucket/models", {"scale/config.pbtxt": config.encode()})
    with supervised.serve(_URL, *arguments, **s3.variables) as served:
        served.wait_loaded()
        assert served.infer("scale", 3.0) == [6.0] * 4
        s3.put("bucket/models", {"scale/2/model.py": b"def forward(x): return {'y': x + 1}\n"})
        supervised.until(lambda: served.infer("scale", 3.0) == [4.0] * 4, served)
        s3.put("bucket/models", {"scale/3/model.py": b"def forward(x): return (\n"})
        supervised.until(lambda: re.search(r"FAILED\s+scale: .*SyntaxError", served.log), served)
        assert served.infer("scale", 3.0) == [4.0] * 4


def test_from_python(s3: stores.S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    with torch_py_backend.serve(_URL, arguments=[f"--cache={tmp_path / 'cache'}"]) as server:
        outputs = server.infer("scale", torch.ones(1, 4))
        assert outputs["y"].tolist() == [[2.0] * 4]


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


@pytest.mark.slow
def test_compiled_code_travels(s3: stores.S3, tmp_path: Path) -> None:
    """What one machine has compiled is in the bucket, and another one takes it from there."""
    compiled = (
        'parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{}" } }'
    )
    s3.put("bucket/models", {"scale/config.pbtxt": (_CONFIG + compiled).encode()})
    uploads = ("--poll=0.5", "--upload-compiled")
    with supervised.serve(_URL, f"--cache={tmp_path / 'a'}", *uploads, **s3.variables) as served:
        served.wait_loaded()
        supervised.until(lambda: "bundle was written to s3://bucket/models" in served.log, served)
    with supervised.serve(_URL, f"--cache={tmp_path / 'b'}", **s3.variables) as served:
        served.wait_loaded()
        assert served.infer("scale", 3.0) == [6.0] * 4
        # Still the file that was fetched: what is compiled anew replaces it.
        (bundle,) = tmp_path.glob("b/user-*/servers/*/models/scale/compile_cache/*.bundle")
        assert bundle.stat().st_nlink > 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/nothing", "s3://bucket/nothing holds no files"),
        ("s3://bucket/models/scale", "expected the repository that holds it: s3://bucket/models."),
        ("s3://bucket/models/scale/1", "s3://bucket/models/scale/1 holds no models"),
        ("s3://id:key@bucket/models", "the URL of s3:// holds credentials"),
    ],
)
def test_refused(s3: stores.S3, tmp_path: Path, url: str, message: str) -> None:
    with supervised.serve(url, f"--cache={tmp_path / 'cache'}", **s3.variables) as served:
        assert served.process.wait(60) == 1
        assert message in served.log
    assert _folders_of_servers(tmp_path) == []
