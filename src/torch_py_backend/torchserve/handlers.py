"""The handlers of `ts.torch_handler` for numbers and images, and the functions of `ts.utils.util`.

Handlers of archives are derived from them. Methods and attributes have TorchServe's names, because
handlers override and read them. https://docs.pytorch.org/serve/default_handlers.html
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.errors import (
    ArtifactError,
    InputError,
    PlatformError,
    SourceError,
    join_names,
)
from torch_py_backend.loading import state_dict, torchscript
from torch_py_backend.torchserve.context import Context, current_config

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

# What a handler's methods pass on: requests, tensors or answers. Each handler has its own types.
Data: TypeAlias = Any

_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
# The length of the shorter side of a resized image, and of a cropped one's sides.
_RESIZED = 256
_CROPPED = 224
# Formats that Pillow decodes itself: for EPS it would start Ghostscript on the client's bytes.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# For images that are not resized: as floats, 12 bytes per pixel or 300 MB in all.
_MAX_FLOAT_PIXELS = 25_000_000


# --- ts.utils.util ---------------------------------------------------------------------------


class PredictionException(Exception):  # noqa: N818  TorchServe's name
    """An error of a handler with the HTTP status of the response."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that a module defines, without imported ones."""
    return [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, parent_class or object)
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Return the names of classes in an index_to_name.json; None: there is no such file.

    The value of a class is its name or a list whose last entry is its name, as for ImageNet. Or the
    list `object_type_names` has the names in the order of the classes.

    Raises:
        ValueError: the file has another structure.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        log.info("%s does not exist: answers have the numbers of classes.", path.name)
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    entries = document.get("object_type_names", document) if isinstance(document, dict) else {}
    numbered = enumerate(entries) if isinstance(entries, list) else entries.items()
    names = {str(key): value[-1] if isinstance(value, list) else value for key, value in numbered}
    if not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path.name} is not an object of names by class")
    return names


def map_class_to_label(
    probs: Sequence[Sequence[object]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, object]]:
    """Return the values of each row by the names of their classes.

    Args:
        probs: for each row, a value for each class.
        mapping: names by class; None: use their numbers.
        lbl_classes: for each row, its classes; None: all, in order.
    """
    if not isinstance(probs, list):
        raise TypeError(f"map_class_to_label takes lists of values, not a {type(probs).__name__}")
    rows = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {
            mapping[str(number)] if mapping is not None else str(number): value
            for number, value in zip(classes, values, strict=False)
        }
        for classes, values in zip(rows, probs, strict=False)
    ]


# --- handlers --------------------------------------------------------------------------------


class BaseHandler:
    """Loads the model of the manifest and answers with preprocess, inference and postprocess."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None  # names of classes, from index_to_name.json
        self.device: Any = None  # a torch.device after `initialize`
        self.initialized = False
        self.context: Context | None = None
        self.manifest: dict[str, Any] = {}
        self.model_pt_path: str | None = None
        self.map_location: str | None = None
        self.model_yaml_config: dict[str, object] = {}
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
        folder = Path(properties["model_dir"])
        model = self.manifest["model"]
        if model.get("serializedFile"):
            self.model_pt_path = str(folder / model["serializedFile"])
        if model.get("modelFile"):
            module = self._load_pickled_model(str(folder), model["modelFile"], self.model_pt_path)
            self.model = module.to(self.device).eval()
        elif self.model_pt_path is None:
            raise ArtifactError(
                current_config.get().name,
                "the manifest names neither a serializedFile nor a modelFile",
            )
        else:
            path = self.model_pt_path
            content = file_types.file_type(Path(path))
            if content is FileType.AOTI:
                self.model = torch._inductor.aoti_load_package(path)  # noqa: SLF001  documented
            elif content is FileType.EXPORTED:
                # Module.to() would leave the devices in the program's graph as they are.
                program = move_to_device_pass(torch.export.load(path), self.device)
                self.model = program.module()
            else:
                self.model = self._load_torchscript_model(path).eval()  # may be overridden
        self.mapping = load_label_mapping(str(folder / "index_to_name.json"))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        config, path = current_config.get(), Path(model_pt_path)
        content = file_types.file_type(path)
        if content is not FileType.TORCHSCRIPT:
            raise ArtifactError(
                config.name,
                f"{path.name} is {content.value}",
                expected="TorchScript, or a modelFile in the manifest that defines its class",
                cure=file_types.advice(content, path),
            )
        return torchscript.read(config, path, self.device)

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> nn.Module:
        """Return the only module class of a source with its weights; pickled code is not run."""
        config = current_config.get()
        source = importlib.import_module(model_file.partition(".")[0])
        classes = list_classes_from_module(source, nn.Module)
        if len(classes) != 1:
            names = join_names(cls.__name__ for cls in classes) or "no nn.Module"
            raise SourceError(
                config.name, f"{model_file} defines {names}", expected="one nn.Module"
            )
        if model_pt_path is None:
            module: nn.Module = classes[0]()
        else:
            weights = Path(model_pt_path)
            module = state_dict.build_uninitialized(
                classes[0], lambda: state_dict.read(config, weights)
            )
            artifact = Artifact(ArtifactType.MODULE, Path(model_dir, model_file), weights)
            state_dict.load_into(config, artifact, module)
        return module

    def preprocess(self, data: Data) -> Data:
        """Return requests, each a number or a list of numbers, as a tensor."""
        if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
            data = [request_body(row) for row in data]
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Data, *args: Any, **kwargs: Any) -> Data:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Data) -> Data:
        return data.tolist()

    def handle(self, data: Data, context: Context) -> Data:
        """Return one answer for each request."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def get_device(self) -> Any:
        return self.device


def request_body(row: Mapping[str, object]) -> Data:
    """Return the body of a request: its field `data`, else `body`."""
    value = row.get("data")
    return row.get("body") if value is None else value


@dataclass(frozen=True, slots=True)
class ImageNetTransform:
    """The transforms Resize(256), CenterCrop(224), ToTensor and Normalize of torchvision.

    For a `whole` image, only ToTensor.
    """

    whole: bool = False

    def __call__(self, image: Image) -> Tensor:
        """Return an image as a tensor [3, height, width]."""
        image = image.convert("RGB")  # mean and deviation are of three channels
        if not self.whole:
            width, height = image.size
            short, long = sorted(image.size)
            if short != _RESIZED:
                other = int(_RESIZED * long / short)
                width, height = (_RESIZED, other) if width <= height else (other, _RESIZED)
                image = image.resize((width, height), pillow().Resampling.BILINEAR)
            left, top = round((width - _CROPPED) / 2), round((height - _CROPPED) / 2)
            image = image.crop((left, top, left + _CROPPED, top + _CROPPED))
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
        tensor = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
        if self.whole:
            return tensor
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _DEVIATION))
        return (tensor - mean) / deviation


def pillow() -> ModuleType:
    """Return Pillow's module Image.

    Raises:
        PlatformError: it is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415  only models with images need it
    except ImportError as error:
        config = current_config.get(None)
        raise PlatformError(
            config.name if config is not None else "",
            f"its handler reads images: {error}",
            cure="pip install 'torch-py-backend[torchserve]' where the server's Python runs.",
        ) from None
    return Image


class VisionHandler(BaseHandler):
    """Handles images: files as bytes or in base64, or lists of numbers."""

    # Handlers may set another one, such as a transform of torchvision.
    image_processing: ClassVar[Any] = ImageNetTransform()

    def initialize(self, context: Context) -> None:
        pillow()  # if it is not installed, fail at load
        super().initialize(context)

    def preprocess(self, data: Data) -> Data:
        return torch.stack([self._read_image(request_body(row)) for row in data]).to(self.device)

    def _read_image(self, content: Data) -> Tensor:
        """Return an image as a tensor: a file as bytes or in base64, or a list of numbers.

        Pillow's `Image.MAX_IMAGE_PIXELS` limits its size; handlers may raise it, or set it to None.

        Raises:
            PIL.UnidentifiedImageError: it has none of FORMATS.
            InputError: it has too many pixels.
        """
        if isinstance(content, str):
            content = base64.b64decode(content)
        if not isinstance(content, bytes | bytearray):
            return torch.tensor(content, dtype=torch.float32)
        image: Image = pillow().open(io.BytesIO(content), formats=FORMATS)  # not decoded yet
        limit = pillow().MAX_IMAGE_PIXELS
        transform = self.image_processing
        if limit is not None and transform == ImageNetTransform(whole=True):
            limit = min(limit, _MAX_FLOAT_PIXELS)
        width, height = image.size
        if limit is not None and width * height > limit:
            raise InputError(
                current_config.get().name,
                f"the image has {width} x {height} pixels",
                expected=f"at most {limit} pixels in all",
            )
        tensor: Tensor = transform(image)
        return tensor


class ImageClassifier(VisionHandler):
    """Returns the most probable classes of each image with their probabilities."""

    topk = 5

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Data) -> Data:
        values, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """Returns the most probable class of each pixel with its probability."""

    def postprocess(self, data: Data) -> Data:
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()


class ObjectDetector(VisionHandler):
    """Returns the objects in each image: the box by the name of its class, and the score."""

    image_processing: ClassVar[Any] = ImageNetTransform(whole=True)
    threshold = 0.5

    def postprocess(self, data: Data) -> Data:
        answers = []
        for detection in data:
            kept = detection["scores"] >= self.threshold
            columns = [detection[key][kept].tolist() for key in ("boxes", "labels", "scores")]
            answers.append(
                [
                    map_class_to_label([[box]], self.mapping, [[label]])[0] | {"score": score}
                    for box, label, score in zip(*columns, strict=True)
                ]
            )
        return answers
