"""Archives imported by the command and served: the same answers over HTTP, gRPC and curl."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import archives
import numpy as np
import pytest
import serving
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from torch_py_backend import cli
from torch_py_backend.server.model_status import ModelState
from torch_py_backend.server.tritonserver import Server

_APP = "from torch_py_backend.cli import app; app()"
_SETTINGS = "batchSize: 8\nmaxBatchDelay: 200\nminWorkers: 1\nresponseTimeout: 60\n"

# Answers how many requests it was given with this one.
_COUNTS = """
def handle(data, context):
    if data is None:
        return None
    return [b"%d of %d: " % (row, len(data)) + bytes(one["data"]) for row, one in enumerate(data)]
"""


def _files(files: archives.Files, **more: str) -> archives.Files:
    document = json.loads(files[archives.MANIFEST])
    document["model"] |= {"configFile": "c.yaml", **more}
    return {**files, "c.yaml": _SETTINGS, archives.MANIFEST: json.dumps(document)}


_HANDLER = "base_handler"
_BUILT_IN = archives.BUILT_IN[_HANDLER]
_ARCHIVES = {
    "numbers": (_files(archives.eager(3.0)), ()),
    "classifier": (_files(archives.classifier()), ()),
    "counts": (
        _files({"handler.py": _COUNTS, archives.MANIFEST: archives.manifest()}),
        (),
    ),
    "tells": (
        _files({"handler.py": archives.TELLS, archives.MANIFEST: archives.manifest()}),
        ("--input=body", "--input=data"),
    ),
    # The other built-in handlers run in tests/torchserve.
    _HANDLER: (
        _files(_BUILT_IN.archive(_HANDLER)),
        (f"--content-type={_BUILT_IN.content_type}",),
    ),
}


@dataclass(frozen=True)
class Imported:
    server: Server
    states: dict[str, ModelState]
    http: Any
    grpc: Any
    repository: Path

    def ask(self, protocol: str, name: str, field: str, body: bytes) -> bytes:
        """One request with one field."""
        module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        answer = getattr(self, protocol).infer(name, _inputs(module, field, body))
        value: bytes = answer.as_numpy("output")[0, 0]
        return value


def _inputs(module: Any, field: str, body: bytes) -> list[Any]:
    return serving.infer_inputs(module, {field: np.array([[body]], dtype=np.object_)})


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    """A server with every archive, each imported by the command."""
    folder = tmp_path_factory.mktemp("imported")
    repository = folder / "repository"
    for name, (files, options) in _ARCHIVES.items():
        archive = archives.write(folder / f"{name}.mar", files)
        arguments = ["import-mar", str(archive), f"--output={repository / name}", *options]
        result = CliRunner().invoke(cli.commands, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert "loads; next:" in result.output
    with serving.running(folder, ready=False) as server:
        states = {state.name: state for state in server.models()}
        http = tritonclient.http.InferenceServerClient(server.http_address, concurrency=8)
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield Imported(server, states, http, grpc, repository)
        http.close()
        grpc.close()


@pytest.mark.parametrize("name", _ARCHIVES)
def test_it_is_ready(imported: Imported, name: str) -> None:
    """Each archive that the command has imported loads in a real server."""
    assert imported.states[name].ready, imported.states[name].reason


def test_a_built_in_handler(imported: Imported) -> None:
    """A built-in handler answers with the model of the archive's model.py."""
    answer = imported.ask("grpc", _HANDLER, "body", _BUILT_IN.body())
    assert _BUILT_IN.answers(json.loads(answer)), answer[:200]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_derived_handler(imported: Imported, protocol: str) -> None:
    """The handler's JSON, from weights that the archive's own class holds."""
    assert json.loads(imported.ask(protocol, "numbers", "body", b"2")) == {"scaled": 7.0}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_image(imported: Imported, protocol: str) -> None:
    """A PNG file as the body, names of classes as the answer."""
    found = json.loads(imported.ask(protocol, "classifier", "body", archives.image()))
    assert len(found) == 5
    assert set(found) <= set(archives.NAMES)
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        ("bad", "400", "the handler answered 422: a number, please"),
        ("busy", "503", "the handler answered 503: come back later"),
        ("crash", "500", "handle() raised ValueError: unexpected value"),
    ],
)
def test_refusals(imported: Imported, protocol: str, sent: str, status: str, says: str) -> None:
    """A handler's refusal arrives with its words, and with a status of its kind."""
    with pytest.raises(InferenceServerException) as refusal:
        imported.ask(protocol, "numbers", "body", json.dumps(sent).encode())
    assert says in refusal.value.message()
    codes = {"400": "INVALID_ARGUMENT", "503": "UNAVAILABLE", "500": "INTERNAL"}
    assert (status if protocol == "http" else codes[status]) in refusal.value.status()


def test_requests_share_a_batch(imported: Imported) -> None:
    """Requests that wait together are one list for the handler; each has its own answer."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    bodies = [f"body {number}".encode() for number in range(8)]
    for body in bodies:
        imported.grpc.async_infer(
            "counts",
            _inputs(tritonclient.grpc, "data", body),
            lambda result, error: answers.put((result, error)),
        )
    found = []
    for _ in bodies:
        result, error = answers.get(timeout=60)
        assert error is None, error
        found.append(result.as_numpy("output")[0, 0])
    assert {one.partition(b": ")[2] for one in found} == set(bodies)
    assert max(int(one.split()[2].rstrip(b":")) for one in found) > 1


def test_one_bad_request_of_a_batch(imported: Imported) -> None:
    """Of requests that wait together, the one that the handler refuses fails alone."""
    answers: queue.SimpleQueue[tuple[bytes, Any, Any]] = queue.SimpleQueue()
    bodies = [b"1", b"2", b'"bad"', b"4", b"5"]
    for body in bodies:
        imported.grpc.async_infer(
            "numbers",
            _inputs(tritonclient.grpc, "body", body),
            lambda result, error, body=body: answers.put((body, result, error)),
        )
    for _ in bodies:
        body, result, error = answers.get(timeout=60)
        if body == b'"bad"':
            assert "a number, please" in str(error)
        else:
            assert error is None, error
            scaled = json.loads(result.as_numpy("output")[0, 0])["scaled"]
            assert scaled == 3 * float(body) + 1


def test_fields_of_a_form(imported: Imported) -> None:
    """With several inputs, a request sends those that it has, and the handler sees no others."""
    told = json.loads(imported.ask("http", "tells", "data", b"x"))
    assert told["keys"] == ["data"]
    assert told["here"] is True
    assert told["name"] == "tells"
    assert told["properties"]["batch_size"] == 8
    assert told["yaml"]["responseTimeout"] == 60


def _post(url: str, body: bytes, **headers: str) -> tuple[bytes, Any]:
    request = urllib.request.Request(
        url, data=body, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read(), response.headers


def test_a_raw_body_over_http(imported: Imported) -> None:
    """What `curl --data-binary @kitten.jpg` sends is one request, without any client library."""
    url = f"http://{imported.server.http_address}/v2/models/classifier/infer"
    content, headers = _post(url, archives.image(), Inference_Header_Content_Length="0")
    length = int(headers["Inference-Header-Content-Length"])
    described = json.loads(content[:length])
    assert described["outputs"][0]["name"] == "output"
    # Four bytes with its length, then the answer.
    found = json.loads(content[length + 4 :])
    assert set(found) <= set(archives.NAMES)


def test_generate(imported: Imported) -> None:
    """Triton's generate endpoint takes a text as JSON, and gives the answer as JSON."""
    url = f"http://{imported.server.http_address}/v2/models/numbers/generate"
    content, _ = _post(url, json.dumps({"body": "2"}).encode(), Content_Type="application/json")
    assert json.loads(json.loads(content)["output"]) == {"scaled": 7.0}


def test_check(imported: Imported) -> None:
    """`torch-py-backend check` tells of an imported model what it tells of any."""
    arguments = ["check", "--json", str(imported.repository / "numbers")]
    done = subprocess.run(
        [sys.executable, "-c", _APP, *arguments], capture_output=True, text=True, check=False
    )
    (report,) = json.loads(done.stdout)["models"]
    assert report["artifact"] == "model.mar: a TorchServe archive"
    assert report["signature"] == "handle(*, body: list[bytes])"
    assert "error" not in report


def test_torchscript_and_names(imported: Imported) -> None:
    """The probabilities are those of the model itself, for the picture that was sent."""
    from torch_py_backend.torchserve.handlers import ImageNetTransform

    image = pytest.importorskip("PIL.Image")
    picture = archives.image(300, 270)
    import io

    x = ImageNetTransform()(image.open(io.BytesIO(picture)))[None]
    with torch.inference_mode():
        values, places = torch.softmax(archives.colours()(x), dim=1)[0].topk(5)
    found = json.loads(imported.ask("grpc", "classifier", "body", picture))
    assert list(found) == [archives.NAMES[place] for place in places.tolist()]
    assert list(found.values()) == pytest.approx(values.tolist(), rel=1e-5)
