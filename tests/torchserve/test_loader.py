"""Serving TorchServe archives through the adapter: answers are those of TorchServe."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import archives
import fake_triton
import numpy as np
import pytest
import torch
from torch import nn

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.torchserve import handlers, migration, stand_in
from torch_py_backend.torchserve.manifest import Manifest

pytestmark = pytest.mark.usefixtures("process")


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the import path and remove the archive's modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    suppress = torch._dynamo.config.suppress_errors
    yield
    torch._dynamo.config.suppress_errors = suppress
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(tmp_path)) or name.partition(".")[0] == "ts":
            del sys.modules[name]


class Served:
    """A model that is migrated from an archive's files and loaded through the adapter."""

    def __init__(
        self,
        folder: Path,
        files: archives.Files,
        settings: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        example: bytes | None = None,
        **options: Any,
    ) -> None:
        version = folder / "net" / "1"
        if settings is not None:
            document = json.loads(files[archives.MANIFEST])
            document["model"]["configFile"] = "c.yaml"
            settings_file = json.dumps(settings)  # which is YAML, too
            files = {**files, "c.yaml": settings_file, archives.MANIFEST: json.dumps(document)}
        unpacked = archives.write_folder(version / "model.mar", files)
        contents = Manifest.read(unpacked, "net.mar")
        migrated = migration.migrate("net", contents, example=example is not None, **options)
        config = migrated.config + "".join(
            f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n'
            for key, value in (parameters or {}).items()
        )
        (folder / "net" / "config.pbtxt").write_text(config)
        (self.input, *_) = migrated.inputs
        if example is not None:
            archives.write_folder(version / "example_inputs", {self.input: example})
        self.model = TritonPythonModel()
        self.arguments = fake_triton.completed(self.model, fake_triton.arguments(folder / "net"))
        self.document = json.loads(self.arguments["model_config"])
        self.model.initialize(self.arguments)

    def answer(self, *requests: bytes | Mapping[str, bytes]) -> list[bytes | str]:
        """Run a batch; return the answers: bytes, or the code and the message of an error."""
        batch = [
            request if isinstance(request, Mapping) else {self.input: request}
            for request in requests
        ]
        responses = self.model.execute(
            [
                fake_triton.request(
                    {key: np.array([[value]], dtype=np.object_) for key, value in fields.items()},
                    self.document,
                )
                for fields in batch
            ]
        )
        return [_answer(response) for response in responses]


def _answer(response: Any) -> bytes | str:
    error = response.error()
    if error is not None:
        return f"{error.code()} {error.message()}"
    (tensor,) = response.output_tensors()
    ((answer,),) = tensor.as_numpy()
    assert isinstance(answer, bytes)
    return answer


def _load_error(*arguments: Any, **named: Any) -> str:
    """Return the message with which the load of these files fails."""
    with pytest.raises(fake_triton.TritonModelException) as error:
        Served(*arguments, **named)
    return str(error.value)


_BATCHES = {"batchSize": 8}


def _function(body: str) -> archives.Files:
    """Return an archive whose handler is a function with this body and the variable `rows`."""
    source = f"""
import torch


def handle(data, context):
    if data is None:
        return None
    rows = [row["body"] for row in data]
    {body}
"""
    return {"handler.py": source, archives.MANIFEST: archives.manifest()}


# --- handlers --------------------------------------------------------------------------------


@pytest.fixture
def module_of_the_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a module `model` from elsewhere, as Triton's stub does."""
    stub = ModuleType("model")
    stub.__file__ = "/opt/tritonserver/backends/pytorch_py/model.py"
    monkeypatch.setitem(sys.modules, "model", stub)


@pytest.mark.usefixtures("module_of_the_stub")
def test_a_handler_with_a_class_and_weights(tmp_path: Path) -> None:
    """A derived handler uses the modules and the weights of its archive."""
    served = Served(tmp_path, archives.eager(factor=3.0), _BATCHES)
    assert [json.loads(answer) for answer in served.answer(b"1", b"2.5")] == [
        {"scaled": 4.0},
        {"scaled": 8.5},
    ]


@pytest.mark.usefixtures("module_of_the_stub")
@pytest.mark.parametrize("handler", archives.BUILT_IN)
def test_built_in_handlers(tmp_path: Path, handler: str) -> None:
    """TorchServe's own handlers answer with the model of the archive's model.py."""
    built_in = archives.BUILT_IN[handler]
    served = Served(tmp_path, built_in.archive(handler), content_type=built_in.content_type)
    (answer,) = served.answer(built_in.body())
    assert built_in.answers(json.loads(answer)), answer[:200]


def test_types_of_answers(tmp_path: Path) -> None:
    """Bytes are unchanged, text is UTF-8, tensors are torch.save files, other values JSON."""
    answers = "b'\\xff', bytearray(b'x\\0'), 'é', torch.ones(2), {'a': [1, None]}, None, torch.nan"
    served = Served(tmp_path, _function(f"return [{answers}][:len(rows)]"), _BATCHES)
    sent = served.answer(*[b""] * 7)
    assert sent[:3] == [b"\xff", b"x\0", "é".encode()]
    assert isinstance(sent[3], bytes)
    assert torch.equal(torch.load(io.BytesIO(sent[3])), torch.ones(2))
    assert sent[4] == json.dumps({"a": [1, None]}, indent=2).encode()
    assert sent[5:] == [b"null", b"NaN"]


def test_a_function(tmp_path: Path) -> None:
    """A handler function is called once without requests, to initialize itself."""
    files = {"old.py": archives.FUNCTION, archives.MANIFEST: archives.manifest("old.py:answer")}
    served = Served(tmp_path, files, _BATCHES)
    assert served.answer(b"a", b"b") == [b"initialized 1 times: a", b"initialized 1 times: b"]


def test_context_and_requests(tmp_path: Path) -> None:
    """The context, the fields of requests and the working directory are those of TorchServe."""
    files = {"handler.py": archives.TELLS, archives.MANIFEST: archives.manifest()}
    served = Served(tmp_path, files, {"batchSize": 4, "mine": [1]}, inputs=("body", "data"))
    first, second = map(json.loads, served.answer({"body": b"x"}, {"body": b"y"}))
    assert first == {
        "properties": {
            "gpu_id": None,
            "batch_size": 4,
            "server_name": "MMS",
            "server_version": "0.12.0",
            "limit_max_image_pixels": True,
        },
        "here": True,
        "name": "net",
        "yaml": {"batchSize": 4, "mine": [1]},
        "handler": "handler.py",
        "header": None,
        "id": first["id"],
        "keys": ["body"],
        "types": {"body": "bytearray"},
    }
    assert first["id"] != second["id"]
    (both,) = served.answer({"body": b"x", "data": b"y"})
    assert json.loads(both)["keys"] == ["body", "data"]


@pytest.mark.parametrize(
    ("content_type", "kinds"),
    [
        ("application/octet-stream", ["bytearray", "bytearray", "bytearray"]),
        ("application/json; charset=utf-8", ["dict", "bytearray", "bytearray"]),
        ("text/plain", ["str", "str", "bytearray"]),
    ],
)
def test_bodies(tmp_path: Path, content_type: str, kinds: list[str]) -> None:
    """JSON is parsed and text is decoded; a body that is neither stays bytes."""
    files = _function("return [type(row).__name__ for row in rows]")
    served = Served(tmp_path, files, _BATCHES, content_type=content_type)
    assert served.answer(b'{"a": 1}', b"{", b"\xff") == [kind.encode() for kind in kinds]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ("import torch\nx = 1 / 0", "the handler handler.py fails at line 2: ZeroDivisionError"),
        ("import ts.service", "fails at line 1: ModuleNotFoundError: No module named 'ts.service'"),
        ("raise SystemExit(3)", "SystemExit"),
        ("x = 1", "the handler handler defines no class with handle(), and no function handle()"),
        (
            "class A:\n    def handle(self): ...\nclass B(A): ...",
            "the handler handler defines A, B",
        ),
        (
            "class A:\n    def initialize(self, c): 1 / 0\n    def handle(self): ...",
            "fails at line 2: ZeroDivisionError",
        ),
        ("async def handle(data, context): ...", "handle() is a coroutine"),
    ],
)
def test_invalid_handlers(tmp_path: Path, handler: str, message: str) -> None:
    """The error of the load says where the handler fails, or what it lacks."""
    files = {"handler.py": handler, archives.MANIFEST: archives.manifest()}
    assert message in _load_error(tmp_path, files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.pt": archives.saved({"other": torch.ones(1)})}, "missing keys (1): weight"),
        ({"model.pt": archives.saved(nn.Linear(1, 1))}, "are a pickle of a whole module"),
        ({"model.py": "x = 1"}, "model.py defines no nn.Module; expected one nn.Module"),
        ({"model.py": archives.SCALE + "\nclass B(Scale): ..."}, "model.py defines B, Scale"),
        ({"index_to_name.json": "[]"}, "index_to_name.json is not an object of names by class"),
        ({"index_to_name.json": '{"0": 7}'}, "is not an object of names by class"),
    ],
)
def test_invalid_models(tmp_path: Path, change: Mapping[str, bytes | str], message: str) -> None:
    """Weights that do not fit, pickled code and wrong classes fail the load."""
    assert message in _load_error(tmp_path, {**archives.eager(), **change})


@pytest.mark.parametrize(
    ("handler", "files", "message"),
    [
        ("image_classifier", {}, "the manifest names neither a serializedFile nor a modelFile"),
        ("object_detector", {"m.pt": archives.saved({})}, "m.pt is a state_dict: weights without"),
        ("image_segmenter", {"m.pt": b"\x08\x07pytorch"}, "m.pt is an ONNX model; expected Torch"),
    ],
)
def test_files_that_a_handler_cannot_load(
    tmp_path: Path, handler: str, files: Mapping[str, bytes | str], message: str
) -> None:
    """Files that a handler of TorchServe lacks or cannot load fail the load."""
    manifest = archives.manifest(handler, serializedFile=next(iter(files), ""))
    assert message in _load_error(tmp_path, {**files, archives.MANIFEST: manifest})


def test_archives_that_were_changed(tmp_path: Path) -> None:
    """The load checks the manifest like the import; for a .mar file it names `import-mar`."""
    served = Served(tmp_path, archives.eager())
    served.model.close()
    version = tmp_path / "net" / "1"
    (version / "model.mar" / archives.MANIFEST).write_text("{}")
    with pytest.raises(fake_triton.TritonModelException, match=r"model.mar: .* no object 'model'"):
        TritonPythonModel().initialize(served.arguments)
    (version / "model.mar").rename(tmp_path / "elsewhere")
    archives.write(version / "model.mar", archives.eager())
    with pytest.raises(fake_triton.TritonModelException, match="torch-py-backend import-mar"):
        TritonPythonModel().initialize(served.arguments)


# --- errors ----------------------------------------------------------------------------------

_INTERNAL = str(fake_triton.TritonError.INTERNAL)
_INVALID = str(fake_triton.TritonError.INVALID_ARG)
_UNAVAILABLE = str(fake_triton.TritonError.UNAVAILABLE)


def test_failing_requests_of_a_batch(tmp_path: Path) -> None:
    """Only the requests that the handler refuses get its errors and statuses."""
    served = Served(tmp_path, archives.eager(1.0), _BATCHES)
    answers = served.answer(b"1", b'"bad"', b'"busy"', b'"broken"', b'"crash"', b"2")
    assert [json.loads(answers[place])["scaled"] for place in (0, 5)] == [2.0, 3.0]
    for answer, message in zip(
        answers[1:5],
        (
            f"{_INVALID} model 'net': the handler answered 422: a number, please.",
            f"{_UNAVAILABLE} model 'net': the handler answered 503: come back later.",
            f"{_INTERNAL} model 'net': handle() raised PredictionException: out of order",
            f"{_INTERNAL} model 'net': handle() raised ValueError: unexpected value.",
        ),
        strict=True,
    ):
        assert str(answer).startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rows[1:]", "returned a list of 1 for 2 requests; expected a list"),
        ("return {'a': 1}", "the handler returned a dict for 2 requests"),
        ("return [object()] * len(rows)", "the handler returned a object that is not JSON"),
        ("return ['\\ud800'] * len(rows)", "the handler returned a str that is not JSON"),
        ("context.set_all_response_status(500, 'ill')\n    return rows", "answered 500: ill"),
        (
            "import numpy, ts.utils.util as u; raise u.PredictionException(numpy.ones(2), 500)",
            "handle() raised PredictionException: [1. 1.] : 500",
        ),
        (
            "import ts.handler_utils.utils as u; u.send_intermediate_predict_response(rows)",
            "streams an answer, which is not served for TorchServe archives",
        ),
    ],
)
def test_wrong_answers(tmp_path: Path, body: str, message: str) -> None:
    """A return value that is not one answer per request raises an error for all requests."""
    served = Served(tmp_path, _function(body), _BATCHES, parameters={"RETRY_FAILED_BATCH": "false"})
    for answer in served.answer(b"a", b"b"):
        assert isinstance(answer, str)
        assert message in answer


def test_a_status_for_one_request(tmp_path: Path) -> None:
    """A status that the handler sets for one request is the error of this request."""
    body = (
        "for place, row in enumerate(rows):\n"
        "        if row == b'bad':\n"
        "            context.set_response_status(400, 'bad row', place)\n"
        "    return rows"
    )
    answers = Served(tmp_path, _function(body), _BATCHES).answer(b"a", b"bad", b"c")
    assert [answers[0], answers[2]] == [b"a", b"c"]
    assert answers[1] == f"{_INVALID} model 'net': the handler answered 400: bad row."


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"OPTIMIZE": "freeze"}, "OPTIMIZE asks for freeze, and the model is a TorchServe archive"),
        ({"WATCH_WEIGHTS": "true"}, "the handler of a TorchServe archive reads them itself"),
        ({"MODEL_KWARGS": '{"content_type": 1}'}, "which is all that a TorchServe archive takes"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"mode": "no such"}'}, "what torch.compile takes"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "no_compiler"}'}, "no_compiler"),
    ],
)
def test_options_that_do_not_apply(
    tmp_path: Path, parameters: dict[str, str], message: str
) -> None:
    """Options that do not apply to handlers fail the load."""
    assert message in _load_error(tmp_path, archives.eager(), parameters=parameters)


_STRING = {"name": "body", "data_type": "TYPE_STRING", "dims": [1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": [_STRING | {"data_type": "TYPE_FP32"}]}, "body FP32 [1]"),
        ({"input": [_STRING | {"dims": [2]}]}, "body BYTES [2]"),
        (
            {"output": [_STRING, _STRING]},
            "body BYTES [1], body BYTES [1], body BYTES [1]; expected",
        ),
        ({"model_transaction_policy": {"decoupled": True}}, "or a decoupled transaction policy"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Anything other than one string per row, in and out, fails the load."""
    served = Served(tmp_path, archives.eager())
    served.model.close()
    changed = served.arguments | {"model_config": json.dumps(served.document | change)}
    with pytest.raises(fake_triton.TritonModelException) as error:
        TritonPythonModel().initialize(changed)
    assert message in str(error.value)


def test_pt2(tmp_path: Path, dynamo: None) -> None:
    """pt2 compiles the handler's attribute `model`; answers stay the same."""
    served = Served(tmp_path, archives.eager(2.0), {"batchSize": 4, "pt2": "eager"})
    (held,) = served.model._engine.loaded.owner._held  # type: ignore[union-attr,misc]
    assert held._compiled_call_impl is not None
    assert json.loads(served.answer(b"3")[0]) == {"scaled": 7.0}


def test_weights_are_shared(tmp_path: Path) -> None:
    """Instances share the weights that BaseHandler maps from the file."""
    model = nn.Linear(512, 512)
    source = "from torch import nn\n\n\nclass Big(nn.Linear):\n    def __init__(self):\n"
    source += "        super().__init__(512, 512)\n"
    files: archives.Files = {
        "model.py": source,
        "model.pt": archives.saved(model.state_dict()),
        archives.MANIFEST: archives.manifest(
            "base_handler", serializedFile="model.pt", modelFile="model.py"
        ),
    }
    served = Served(tmp_path, files, _BATCHES, content_type="application/json")
    assert served.model._engine.sharing.mapped.shared == 4 * (512 * 512 + 512)
    sent = torch.rand(512)
    (answer,) = served.answer(json.dumps(sent.tolist()).encode())
    torch.testing.assert_close(torch.tensor(json.loads(answer)), model(sent).detach())


def test_a_handler_that_reads_torchscript_itself(tmp_path: Path) -> None:
    """A module from an overridden method is put into eval mode, too, as in TorchServe."""
    script, file = torch.jit.script(nn.Dropout(1.0)), io.BytesIO()
    torch.jit.save(script, file)
    source = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Handler(BaseHandler):
    def _load_torchscript_model(self, model_pt_path):
        return torch.jit.load(model_pt_path)
"""
    files: archives.Files = {
        "handler.py": source,
        "m.pt": file.getvalue(),
        archives.MANIFEST: archives.manifest(serializedFile="m.pt"),
    }
    served = Served(tmp_path, files, _BATCHES, content_type="application/json")
    assert served.answer(b"2.5") == [b"2.5"]


def test_an_exported_program(tmp_path: Path) -> None:
    """base_handler runs an exported program without a class."""
    file = io.BytesIO()
    rows = torch.export.Dim("rows", min=1, max=64)
    shapes = ({0: rows},)
    torch.export.save(
        torch.export.export(archives.Scale(), (torch.ones(3),), dynamic_shapes=shapes), file
    )
    files: archives.Files = {
        "m.pt2": file.getvalue(),
        archives.MANIFEST: archives.manifest("base_handler", serializedFile="m.pt2"),
    }
    served = Served(tmp_path, files, _BATCHES, content_type="application/json")
    assert served.answer(b"2.5", b"0") == [b"2.5", b"0.0"]


def test_an_example_warms_up(tmp_path: Path) -> None:
    """With an example, the handler is warmed up in batches of several sizes."""
    body = "with open('sizes.txt', 'a') as f: print(*map(bytes, rows), file=f)\n    return rows"
    Served(tmp_path, _function(body), {"batchSize": 4}, example=b"xyz")
    lines = (tmp_path / "net/1/model.mar/sizes.txt").read_text().splitlines()
    assert {line.count("b'xyz'") for line in lines} == {1, 3, 4}


def test_a_failing_example(tmp_path: Path) -> None:
    """An example that the handler refuses fails the load with the handler's message."""
    message = _load_error(tmp_path, archives.eager(), example=b'"bad"')
    assert "a number, please" in message


# --- TorchServe's handlers --------------------------------------------------------------------


def _opened(picture: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(picture))


def _expected(picture: bytes) -> torch.Tensor:
    """Return the result of torchvision's transforms, implemented from its documentation."""
    from PIL import Image

    image = _opened(picture).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize(
        tuple(256 if side == min(image.size) else int(side * scale) for side in image.size),
        Image.Resampling.BILINEAR,
    )
    pixels = np.asarray(image, dtype=np.float64) / 255
    top, left = round((pixels.shape[0] - 224) / 2), round((pixels.shape[1] - 224) / 2)
    pixels = pixels[top : top + 224, left : left + 224]
    pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float()


@pytest.mark.parametrize(
    ("width", "height", "mode"), [(320, 281, "RGB"), (64, 100, "L"), (256, 256, "RGBA")]
)
def test_images(width: int, height: int, mode: str) -> None:
    """Images are resized to 256, cropped to 224 and normalized like ImageNet's."""
    picture = archives.image(width, height, mode)
    tensor = handlers.ImageNetTransform()(_opened(picture))
    torch.testing.assert_close(tensor, _expected(picture))


def test_whole_images() -> None:
    """For detectors, images keep their size; their values are between 0 and 1."""
    image = _opened(archives.image(30, 20))
    tensor = handlers.ImageNetTransform(whole=True)(image)
    expected = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)
    torch.testing.assert_close(tensor, expected)


def test_image_classifier(tmp_path: Path) -> None:
    """Answers have the five most probable classes of each image by name, the best first."""
    served = Served(tmp_path, archives.classifier(), _BATCHES)
    pictures = [archives.image(seed=seed) for seed in range(3)]
    for picture, answer in zip(pictures, served.answer(*pictures), strict=True):
        labelled = json.loads(answer)
        with torch.inference_mode():
            wanted = torch.softmax(archives.colours()(_expected(picture)[None]), dim=1)[0]
        values, places = wanted.topk(5)
        assert list(labelled) == [archives.NAMES[place] for place in places.tolist()]
        torch.testing.assert_close(torch.tensor(list(labelled.values())), values)


def test_bodies_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is a file of any format that Pillow decodes itself, base64, or numbers.

    Other bodies fail alone, and PostScript without Ghostscript, which Pillow would start.
    """
    from PIL import EpsImagePlugin, Image

    ghostscript: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript.append)
    bodies = {}
    for name in (*handlers.FORMATS, "EPS"):
        file = io.BytesIO()
        Image.new("RGB", (300, 280), (200, 30, 90)).save(file, name)
        bodies[name] = file.getvalue()
    tensor = handlers.ImageNetTransform()(_opened(bodies["PNG"]))
    bodies["numbers"] = json.dumps(tensor.tolist()).encode()
    bodies["base64"] = json.dumps(base64.b64encode(bodies["PNG"]).decode()).encode()
    bodies["other"] = b"no image"
    served = Served(
        tmp_path, archives.classifier(), {"batchSize": 16}, content_type="application/json"
    )
    answers = dict(zip(bodies, served.answer(*bodies.values()), strict=True))
    assert "UnidentifiedImageError" in str(answers.pop("EPS"))
    assert "UnidentifiedImageError" in str(answers.pop("other"))
    assert not ghostscript
    expected = pytest.approx(json.loads(answers["PNG"]), abs=1e-2)
    assert all(json.loads(answer) == expected for answer in answers.values())
    assert answers["base64"] == answers["PNG"]


@pytest.mark.parametrize(
    ("handler", "limit", "height", "most"),
    [
        # The model gets the whole image as floats; the other handlers crop what is decoded.
        ("object_detector", 200_000, 300, None),
        ("object_detector", 200_000, 301, 90_000),
        ("object_detector", 80_000, 300, 80_000),
        ("image_classifier", 90_000, 301, 90_000),
        ("image_classifier", None, 301, None),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_with_too_many_pixels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handler: str,
    limit: int | None,
    height: int,
    most: int | None,
) -> None:
    """An image above the limit is refused before it is decoded."""
    from PIL import Image, PngImagePlugin

    loaded: list[object] = []
    load = PngImagePlugin.PngImageFile.load

    def loads(image: PngImagePlugin.PngImageFile) -> Any:
        loaded.append(image)
        return load(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", loads)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    monkeypatch.setattr(handlers, "_MAX_FLOAT_PIXELS", 90_000)
    served = Served(tmp_path, archives.BUILT_IN[handler].archive(handler))
    (answer,) = served.answer(archives.image(300, height))
    if most is None:
        assert isinstance(answer, bytes)
        assert loaded
    else:
        assert answer == (
            f"{_INVALID} model 'net': the image has 300 x {height} pixels; expected at most"
            f" {most} pixels in all."
        )
        assert not loaded


# --- modules ---------------------------------------------------------------------------------


def test_provided_modules() -> None:
    """The modules in stand_in.MODULES can be imported, with their names."""
    assert stand_in.install()
    for name, members in stand_in.MODULES.items():
        module = importlib.import_module(name)
        assert vars(module).keys() >= set(members)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'ts\.service'"):
        importlib.import_module("ts.service")
    assert stand_in.install()  # its own modules do not count as TorchServe


@pytest.fixture
def without_replacements() -> None:
    """Remove the replacements for TorchServe's modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ts"]:
        del sys.modules[name]


@pytest.mark.usefixtures("without_replacements")
def test_installed_torchserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If TorchServe is installed, its own handlers are used."""
    archives.write_folder(
        tmp_path,
        {
            "ts/__init__.py": "",
            "ts/torch_handler/__init__.py": "",
            "ts/torch_handler/base_handler.py": "class BaseHandler:\n    def handle(self): ...",
            "ts/torch_handler/image_classifier.py": """
from ts.torch_handler.base_handler import BaseHandler


class ImageClassifier(BaseHandler):
    def initialize(self, context): ...

    def handle(self, data, context):
        return ["real"] * len(data)
""",
            "ts/utils/__init__.py": "",
            "ts/utils/util.py": "class PredictionException(Exception): ...",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not stand_in.install()
    assert Served(tmp_path, archives.classifier()).answer(b"") == [b"real"]


@pytest.mark.usefixtures("without_replacements")
def test_another_package_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package `ts` does not count as TorchServe."""
    archives.write_folder(tmp_path, {"ts/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    assert stand_in.install()
    assert sys.modules["ts"].__version__ == "0.12.0"


def test_map_class_to_label() -> None:
    """Values are returned by the names of their classes, or by their numbers."""
    label = handlers.map_class_to_label
    assert label([[0.7, 0.3]]) == [{"0": 0.7, "1": 0.3}]
    assert label([[0.7], [0.6]], {"4": "x", "5": "y"}, [[4], [5]]) == [{"x": 0.7}, {"y": 0.6}]
    with pytest.raises(TypeError, match="takes lists of values"):
        label(torch.ones(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "mapping"),
    [
        ('{"0": "cat", "1": ["n01", "dog"]}', {"0": "cat", "1": "dog"}),
        ('{"object_type_names": ["a", "b"]}', {"0": "a", "1": "b"}),
        (None, None),
    ],
)
def test_load_label_mapping(
    tmp_path: Path, written: str | None, mapping: dict[str, str] | None
) -> None:
    """All formats of index_to_name.json."""
    files = {} if written is None else {"index_to_name.json": written}
    folder = archives.write_folder(tmp_path, files)
    assert handlers.load_label_mapping(str(folder / "index_to_name.json")) == mapping
