"""The handlers of `ts.torch_handler`, from which those of archives are derived.

Methods and attributes have TorchServe's names, because handlers override and read them.
https://docs.pytorch.org/serve/default_handlers.html
"""

from __future__ import annotations

import base64
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.errors import ArtifactError, SourceError, join_names
from torch_py_backend.loading import mapped_files, state_dict
from torch_py_backend.torchserve.context import Context, settings
from torch_py_backend.torchserve.images import ImageNetTransform, opened, pillow
from torch_py_backend.torchserve.labels import (
    list_classes_from_module,
    load_label_mapping,
    map_class_to_label,
)

log = logging.getLogger(__name__)


class BaseHandler:
    """Loads the model of the manifest and answers with preprocess, inference and postprocess.

    Attributes:
        model: the model; loaded by `initialize`.
        device: its device.
        mapping: names of classes by their numbers, from index_to_name.json.
        context: the context of the batch.
        initialized: whether the model is loaded.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.manifest: Any = None
        self.model_pt_path: str | None = None
        self.map_location: str | None = None
        self.model_yaml_config: dict[str, Any] = {}
        self.explain = False
        self.target = 0

    def initialize(self, context: Context) -> None:
        """Load the model.

        Raises:
            LoadError: it cannot be loaded.
        """
        properties = context.system_properties
        self.device = torch.device("cpu")
        if properties.get("gpu_id") is not None and torch.cuda.is_available():
            self.device = torch.device("cuda", properties["gpu_id"])
        self.map_location = self.device.type
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config
        folder = properties["model_dir"]
        model = self.manifest["model"]
        if model.get("serializedFile"):
            self.model_pt_path = str(Path(folder, model["serializedFile"]))
        self.model = self._load(folder, model.get("modelFile"))
        self.mapping = load_label_mapping(str(Path(folder, "index_to_name.json")))
        self.initialized = True

    def _load(self, folder: str, model_file: str | None) -> Any:
        if model_file:
            module = self._load_pickled_model(folder, model_file, self.model_pt_path)
            return module.to(self.device).eval()
        if self.model_pt_path is None:
            config = settings.get()
            raise ArtifactError(
                config.name, "the manifest names neither a serializedFile nor a modelFile"
            )
        content = file_types.file_type(Path(self.model_pt_path))
        if content is FileType.AOTI:
            return torch._inductor.aoti_load_package(self.model_pt_path)  # noqa: SLF001  public
        if content is FileType.EXPORTED:
            return torch.export.load(self.model_pt_path).module().to(self.device)
        return self._load_torchscript_model(self.model_pt_path).eval()

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        config, path = settings.get(), Path(model_pt_path)
        content = file_types.file_type(path)
        if content is not FileType.TORCHSCRIPT:
            raise ArtifactError(
                config.name,
                f"{path.name} is {content.value}",
                expected="TorchScript, or a modelFile in the manifest that defines its class",
                cure=file_types.advice(content, path),
            )
        module: Any = torch.jit.load(path, map_location=self.device)
        if config.options.enable_weight_sharing is not False:
            mapped_files.share((*module.parameters(), *module.buffers()), path)
        return module

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> nn.Module:
        """Return the only module class of a source with its weights; pickled code is not run."""
        config = settings.get()
        source = importlib.import_module(model_file.partition(".")[0])
        classes = list_classes_from_module(source, nn.Module)
        if len(classes) != 1:
            names = join_names(cls.__name__ for cls in classes) or "no nn.Module"
            raise SourceError(
                config.name, f"{model_file} defines {names}", expected="one nn.Module"
            )
        if model_pt_path is None:
            whole: nn.Module = classes[0]()
            return whole
        module: nn.Module = state_dict.build_uninitialized(classes[0])
        path = Path(model_dir, model_file)
        state_dict.load_into(
            config, Artifact(ArtifactType.MODULE, path, Path(model_pt_path)), module
        )
        return module

    def preprocess(self, data: Any) -> Any:
        """Return requests, each a number or a list of numbers, as a tensor."""
        if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
            data = [body(row) for row in data]
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        return data.tolist()

    def handle(self, data: Any, context: Context) -> Any:
        """Return one answer for each request."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def get_device(self) -> Any:
        return self.device


def body(row: Mapping[str, Any]) -> Any:
    """Return the body of a request: its field `data`, else `body`."""
    value = row.get("data")
    return row.get("body") if value is None else value


class VisionHandler(BaseHandler):
    """Handles images: files as bytes or in base64, or lists of numbers."""

    image_processing: ClassVar[Any] = ImageNetTransform()

    def initialize(self, context: Context) -> None:
        pillow()  # if it is not installed, fail at load
        super().initialize(context)

    def preprocess(self, data: Any) -> Any:
        return torch.stack([self._image(body(row)) for row in data]).to(self.device)

    def _image(self, content: Any) -> Tensor:
        if isinstance(content, str):
            content = base64.b64decode(content)
        if not isinstance(content, bytes | bytearray):
            return torch.tensor(content, dtype=torch.float32)
        image: Tensor = self.image_processing(opened(content, self.image_processing))
        return image


class ImageClassifier(VisionHandler):
    """Returns the most probable classes of each image with their probabilities."""

    topk = 5

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        values, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """Returns the most probable class of each pixel with its probability."""

    def postprocess(self, data: Any) -> Any:
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()


class ObjectDetector(VisionHandler):
    """Returns the objects in each image: the box by the name of its class, and the score."""

    image_processing: ClassVar[Any] = ImageNetTransform(side=None)
    threshold = 0.5

    def postprocess(self, data: Any) -> Any:
        return [self._objects(detection) for detection in data]

    def _objects(self, detection: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        kept = detection["scores"] >= self.threshold
        columns: Sequence[list[Any]] = [
            detection[key][kept].tolist() for key in ("boxes", "labels", "scores")
        ]
        return [
            map_class_to_label([[box]], self.mapping, [[label]])[0] | {"score": score}
            for box, label, score in zip(*columns, strict=True)
        ]
