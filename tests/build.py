"""What several test files build: a ModelConfig, Triton's arguments, files in a version folder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch_py_backend.config import dtypes, pbtxt
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.options import Options
from torch_py_backend.loading.discovery import Artifact, ArtifactType

MODEL = "digits"
_OPTIONS = {entry.name for entry in dataclasses.fields(Options)}


def spec(name: str = "x", dtype: str = "FP32", dims: tuple[int, ...] = (4,)) -> TensorSpec:
    return TensorSpec(name, dtypes.from_triton(dtype), dims)


def config(folder: Path = Path("/models/digits"), **overrides: Any) -> ModelConfig:
    """One CPU instance of `digits` with an input x and an output y; options by their fields."""
    options = {key: overrides.pop(key) for key in _OPTIONS & overrides.keys()}
    plain = ModelConfig(
        name=MODEL,
        folder=folder,
        version="1",
        instance=f"{MODEL}_0_0",
        kind="CPU",
        device_id=0,
        instances=1,
        max_batch_size=8,
        inputs=(spec("x"),),
        outputs=(spec("y"),),
        default_model_filename=None,
        python_runtime=False,
        options=Options(**options),
    )
    return dataclasses.replace(plain, **overrides)


def artifact(kind: ArtifactType = ArtifactType.FACTORY) -> Artifact:
    """A model that lies nowhere, for engines whose module is made in the test."""
    return Artifact(kind, Path("/models/digits/1"))


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """A file in version 1 of a model's folder."""
    path = folder / "1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the contents of files by their paths in a folder, less what Python compiled."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def arguments(**document: Any) -> dict[str, str]:
    """Triton's arguments of initialize(), with defaults written out as Triton does."""
    whole = {
        "name": MODEL,
        "platform": "",
        "backend": "pytorch_py",
        "runtime": "model.py",
        "max_batch_size": 8,
        "input": [_tensor("x")],
        "output": [_tensor("y")],
        "instance_group": [{"name": MODEL, "kind": "KIND_CPU", "count": 1, "gpus": []}],
        "default_model_filename": "",
        "parameters": {},
    }
    return {
        "model_config": json.dumps(whole | document),
        "model_name": MODEL,
        "model_repository": f"/models/{MODEL}",
        "model_version": "1",
        "model_instance_name": f"{MODEL}_0_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


def described(document: dict[str, Any]) -> str:
    """The inputs, outputs and max_batch_size of a config in one line; types other than FP32."""
    inputs, outputs = (
        ", ".join(
            f"{entry['name']} {entry['data_type'][5:]} {pbtxt.model_dims(entry)}"
            for entry in document[role]
        )
        for role in ("input", "output")
    )
    return f"{inputs} → {outputs} ({document['max_batch_size']})".replace(" FP32", "")


def _tensor(name: str) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": [4]}
