"""TorchServe archives as torch-model-archiver lays them out, and handlers to put into them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from torch import nn

Files = Mapping[str, bytes | str]

MANIFEST = "MAR-INF/MANIFEST.json"


def manifest(handler: str = "handler.py", **more: Any) -> str:
    """Return the text of a manifest; `more` goes into its object `model`."""
    model = {"modelName": "net", "handler": handler, "modelVersion": "1.0"} | more
    return json.dumps(
        {
            "createdOn": "21/11/2026 19:00:00",
            "runtime": "python",
            "model": model,
            "archiverVersion": "0.12.0",
        },
        indent=2,
    )


def write(path: Path, files: Files, **how: Any) -> Path:
    """Write a .mar file."""
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_tar(path: Path, files: Files, top: str = "net") -> Path:
    """Write an archive as `--archive-format tgz` does: everything in one folder."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            encoded = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(f"{top}/{name}" if top else name)
            entry.size = len(encoded)
            archive.addfile(entry, io.BytesIO(encoded))
    return path


def write_folder(path: Path, files: Files) -> Path:
    """Write a folder as `--archive-format no-archive` does, or as an archive is unpacked."""
    for name, content in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def saved(value: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def scripted(module: nn.Module) -> bytes:
    """Return the bytes that torch.jit.save writes for the scripted module."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module.eval()), file)
    return file.getvalue()


def image(width: int = 320, height: int = 280, mode: str = "RGB", seed: int = 0) -> bytes:
    """A PNG of noise."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values, "RGBA").convert(mode).save(file, "PNG")
    return file.getvalue()


# --- models ----------------------------------------------------------------------------------


class Scale(nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Colours(nn.Module):
    """Seven classes of an image, by the means of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.linear(x.mean(dim=(2, 3)))
        return classes


class Segments(nn.Module):
    """Two classes of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.convolution(x)}


class Detector(nn.Module):
    """Two boxes in each image."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = nn.Parameter(torch.zeros(2, 4))

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        labels, scores = torch.tensor([1, 2]), torch.tensor([0.75, 0.25])
        return [{"boxes": self.boxes, "labels": labels, "scores": scores} for _ in images]


SCALE = models.source(Scale)

# JSON numbers in, JSON out; a request may be refused, or make the batch fail.
NUMBERS = """
import json

import torch
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

from offsets import OFFSET


class Numbers(BaseHandler):
    def preprocess(self, data):
        rows = [json.loads(row.get("data") or row.get("body")) for row in data]
        for row in rows:
            if row == "bad":
                raise PredictionException("a number, please", 422)
            if row == "busy":
                raise PredictionException("come back later", 503)
            if row == "broken":
                raise PredictionException("out of order", 500)
            if row == "crash":
                raise ValueError("unexpected value")
        return torch.tensor(rows, dtype=torch.float32, device=self.device)

    def postprocess(self, data):
        return [{"scaled": value + OFFSET} for value in data.tolist()]
"""

# Answers with its context and the request.
TELLS = """
import os


class Tells:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.properties = dict(context.system_properties)
        self.folder = self.properties.pop("model_dir")
        self.initialized = True

    def handle(self, data, context):
        report = {
            "properties": self.properties,
            "here": os.path.samefile(self.folder, os.getcwd()),
            "name": context.model_name,
            "yaml": context.model_yaml_config,
            "handler": context.manifest["model"]["handler"],
            "header": context.get_request_header(0, "X-Anything"),
        }
        context.metrics.add_counter("calls", 1)
        return [
            report | {"id": context.get_request_id(row), "keys": sorted(fields), "types":
             {key: type(value).__name__ for key, value in fields.items()}}
            for row, fields in enumerate(data)
        ]
"""

# A function, as in TorchServe's first versions.
FUNCTION = """
calls = []


def answer(data, context):
    if data is None:
        calls.append(None)
        return None
    return [b"initialized %d times: " % len(calls) + bytes(row["body"]) for row in data]
"""


def eager(factor: float = 3.0) -> Files:
    """A handler, a class and its weights."""
    return {
        "handler.py": NUMBERS,
        "model.py": SCALE,
        "offsets.py": "OFFSET = 1.0\n",
        "model.pt": saved({"weight": torch.tensor([factor])}),
        MANIFEST: manifest(serializedFile="model.pt", modelFile="model.py"),
    }


@dataclass(frozen=True)
class BuiltIn:
    """A built-in handler with a model.

    Attributes:
        model: its class, in a model.py.
        state: the weights.
        body: a request.
        answers: whether this is the answer to it.
        files: what else lies in the archive.
        content_type: what the client sends as Content-Type.
    """

    model: type[nn.Module]
    state: Mapping[str, torch.Tensor]
    body: Callable[[], bytes]
    answers: Callable[[Any], bool]
    files: Files = field(default_factory=dict)
    content_type: str = ""

    def archive(self, handler: str) -> Files:
        """The files of the archive."""
        model = {"serializedFile": "weights.pth", "modelFile": "model.py"}
        return {
            "model.py": models.source(self.model),
            "weights.pth": saved(self.state),
            MANIFEST: manifest(handler, **model),
            **self.files,
        }


BUILT_IN: Mapping[str, BuiltIn] = {
    "base_handler": BuiltIn(
        Scale,
        {"weight": torch.tensor([3.0])},
        body=lambda: b"2",
        answers=lambda answer: answer == 6.0,
        content_type="application/json",
    ),
    "image_classifier": BuiltIn(
        Colours,
        {"linear.weight": torch.zeros(7, 3), "linear.bias": torch.arange(7.0)},
        body=image,
        answers=lambda answer: list(answer) == ["6", "5", "4", "3", "2"],
    ),
    "image_segmenter": BuiltIn(
        Segments,
        {
            "convolution.weight": torch.zeros(2, 3, 1, 1),
            "convolution.bias": torch.tensor([0.0, 99.0]),
        },
        body=image,
        answers=lambda answer: answer == [[[1.0, 1.0]] * 224] * 224,
    ),
    "object_detector": BuiltIn(
        Detector,
        {"boxes": torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])},
        body=image,
        answers=lambda answer: answer == [{"cat": [1.0, 2.0, 3.0, 4.0], "score": 0.75}],
        files={"index_to_name.json": '{"object_type_names": ["sky", "cat", "dog"]}'},
    ),
}


def classifier(**more: str | bytes) -> Files:
    """TorchServe's own image_classifier, with TorchScript and names of classes."""
    return {
        "colours.pt": scripted(colours()),
        "index_to_name.json": json.dumps(
            {str(number): [f"n{number}", NAMES[number]] for number in range(7)}
        ),
        MANIFEST: manifest("image_classifier", serializedFile="colours.pt"),
        **more,
    }


NAMES = ("red", "orange", "yellow", "green", "blue", "indigo", "violet")


def colours() -> Colours:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Colours().eval()
