"""Migrating model-config.yaml to config.pbtxt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import archives
import models
import pytest
import torch
import yaml

from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.errors import ArchiveError
from torch_py_backend.torchserve import mar_archive, migration
from torch_py_backend.torchserve.migration import Migration

_HANDLER = "def handle(data, context):\n    return [row['body'] for row in data]\n"


def _migrate(
    tmp_path: Path,
    settings: Any = None,
    handler: str = "handler.py",
    files: archives.Files | None = None,
    options: dict[str, Any] | None = None,
    **more: str,
) -> Migration:
    if settings is not None:
        more["configFile"] = "model-config.yaml"
    written = {
        "handler.py": _HANDLER,
        "model-config.yaml": yaml.safe_dump(settings or {}),
        **(files or {}),
        archives.MANIFEST: archives.manifest(handler, **more),
    }
    folder = archives.write_folder(tmp_path / "archive", written)
    manifest = mar_archive.read_manifest(folder, "net.mar")
    return migration.migrate("net.mar", "net", folder, manifest, **(options or {}))


def _read(tmp_path: Path, migrated: Migration) -> dict[str, Any]:
    """Return the config as Triton reads it; the backend must accept it."""
    folder = tmp_path / "net"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(migrated.config)
    document = pbtxt.read(folder)
    model_config.parse(pbtxt.arguments(folder, "1", document))
    return document


def _parameters(document: dict[str, Any]) -> dict[str, str]:
    return {key: value["string_value"] for key, value in document["parameters"].items()}


def test_without_settings(tmp_path: Path) -> None:
    """Without settings: batches of one, one instance, no warm-up, and a hint at batchSize."""
    migrated = _migrate(tmp_path)
    document = _read(tmp_path, migrated)
    assert document["backend"] == "pytorch_py"
    assert document["max_batch_size"] == 1
    assert "dynamic_batching" not in document
    (group,) = document["instance_group"]
    assert (group["kind"], group["count"]) == ("KIND_AUTO", 1)
    for role, name in (("input", "body"), ("output", "output")):
        (entry,) = document[role]
        assert (entry["name"], entry["data_type"], entry["dims"]) == (name, "TYPE_STRING", [1])
    assert _parameters(document) == {"WARMUP": "false"}
    assert len(migrated.not_converted) == 1
    assert "batchSize is not in the archive" in migrated.not_converted[0]


def test_all_settings(tmp_path: Path) -> None:
    """Settings of TorchServe become fields of config.pbtxt."""
    settings = {
        "minWorkers": 2,
        "maxWorkers": 2,
        "batchSize": 8,
        "maxBatchDelay": 50,
        "responseTimeout": 120,
        "jobQueueSize": 200,
        "deviceType": "cpu",
        "pt2": {"compile": {"enable": True, "backend": "inductor", "mode": "reduce-overhead"}},
        "handler": {"profile": True},
    }
    migrated = _migrate(tmp_path, settings)
    document = _read(tmp_path, migrated)
    assert document["max_batch_size"] == 8
    batching = document["dynamic_batching"]
    assert int(batching["max_queue_delay_microseconds"]) == 50_000
    assert batching["default_queue_policy"]["max_queue_size"] == 200
    (group,) = document["instance_group"]
    assert (group["kind"], group["count"]) == ("KIND_CPU", 2)
    parameters = _parameters(document)
    assert parameters["EXECUTION_TIMEOUT_MS"] == "120000"
    assert json.loads(parameters["TORCH_COMPILE_OPTIONAL_PARAMETERS"]) == {
        "backend": "inductor",
        "mode": "reduce-overhead",
    }
    assert migrated.not_converted == []
    converted = "\n".join(migrated.converted)
    assert all(key in converted for key in settings if key != "maxWorkers"), converted


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        ({"minWorkers": 4}, {"kind": "KIND_AUTO", "count": 4}),
        ({"minWorkers": 0, "maxWorkers": 3}, {"kind": "KIND_AUTO", "count": 3}),
        ({"deviceType": "gpu", "minWorkers": 2}, {"kind": "KIND_GPU", "count": 2, "gpus": []}),
        (
            {"deviceType": "gpu", "deviceIds": [0, 2], "minWorkers": 3},
            {"kind": "KIND_GPU", "count": 2, "gpus": [0, 2]},
        ),
        ({"deviceIds": [1]}, {"kind": "KIND_GPU", "count": 1, "gpus": [1]}),
        (
            {"deviceType": "cpu", "deviceIds": [1], "minWorkers": 3},
            {"kind": "KIND_CPU", "count": 3},
        ),
    ],
)
def test_workers(tmp_path: Path, settings: dict[str, Any], group: dict[str, Any]) -> None:
    """Workers become instances: per model in TorchServe, per GPU in Triton."""
    (written,) = _read(tmp_path, _migrate(tmp_path, settings))["instance_group"]
    assert {key: written[key] for key in group} == group


@pytest.mark.parametrize(
    ("pt2", "compiled"),
    [
        ("inductor", {"backend": "inductor"}),
        ({"backend": "aot_eager", "mode": "default"}, {"backend": "aot_eager", "mode": "default"}),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "inductor"}}, None),
        ({"compile": {"enable": True, "dynamic": True, "odd": 1}}, {"dynamic": True}),
        ({"export": {"aot_compile": True}}, None),
    ],
)
def test_pt2(tmp_path: Path, pt2: Any, compiled: dict[str, Any] | None) -> None:
    """All forms of `pt2`; a `compile` needs `enable`."""
    migrated = _migrate(tmp_path, {"pt2": pt2, "batchSize": 2})
    value = _parameters(_read(tmp_path, migrated)).get("TORCH_COMPILE_OPTIONAL_PARAMETERS")
    assert (None if value is None else json.loads(value)) == compiled
    ignored = [line for line in migrated.not_converted if line.startswith("pt2's")]
    assert bool(ignored) == ("odd" in str(pt2) or "export" in str(pt2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"startupTimeout": 300}, "startupTimeout 300: Triton waits"),
        ({"minWorkers": 1, "maxWorkers": 4}, "maxWorkers 4: Triton starts a fixed number"),
        ({"maxBatchDelay": 50}, "maxBatchDelay 50: no request waits for others"),
    ],
)
def test_settings_without_a_counterpart(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """They are listed in the report and in config.pbtxt."""
    migrated = _migrate(tmp_path, {"batchSize": 1, **settings})
    (line,) = migrated.not_converted
    assert line.startswith(message)
    assert f"# - {line}" in migrated.config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batchSize": 0},
            "model-config.yaml says batchSize: 0; expected an integer of at least 1",
        ),
        ({"batchSize": True}, "says batchSize: True"),
        ({"maxBatchDelay": -1}, "says maxBatchDelay: -1; expected an integer of at least 0"),
        ({"minWorkers": 1.5}, "says minWorkers: 1.5"),
        ({"deviceType": "neuron"}, "says deviceType: 'neuron'; expected cpu or gpu"),
        ({"deviceIds": [-1]}, "says deviceIds: [-1]; expected a list of GPUs' numbers"),
        ({"pt2": 3}, "says pt2: 3"),
        ({"pt2": {"compile": "inductor"}}, "expected a compile with its settings"),
        ({"pt2": {"options": {"a": b"x"}}}, "expected values that JSON can hold"),
        ({"parallelType": "tp"}, "asks for parallelType (one model on several GPUs)"),
        ({"sequenceBatching": True, "continuousBatching": True}, "continuousBatching"),
    ],
)
def test_invalid_and_unsupported_settings(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """Settings that are invalid, or that the handler cannot do without, raise an error."""
    with pytest.raises(ArchiveError) as error:
        _migrate(tmp_path, settings)
    assert message in str(error.value)
    assert str(error.value).startswith("net.mar: ")


def test_a_number_of_too_many_digits(tmp_path: Path) -> None:
    """A number that Python does not print is an error like others."""
    files = {"model-config.yaml": f"batchSize: 0x{'f' * 5000}\nstartupTimeout: 0x{'f' * 5000}"}
    with pytest.raises(ArchiveError, match="says batchSize: a number of too many digits; expect"):
        _migrate(tmp_path, files=files, configFile="model-config.yaml")


_SCRIPT = archives.scripted(models.Negate())
_WEIGHTS = archives.saved({"weight": torch.ones(1)})
_ONNX = b"\x08\x07pytorch"
_NO_DICT = archives.saved(Path("torchtext.vocab"))


@pytest.mark.parametrize(
    ("handler", "files", "message"),
    [
        ("image_classifier", {"m.pt": _WEIGHTS}, "m.pt is a state_dict: weights without code (Put"),
        (
            "object_detector",
            {"m.pt": archives.saved(torch.nn.Linear(1, 1)), "model.py": archives.SCALE},
            "m.pt is a pickle of a whole module (Pickles can run any code",
        ),
        ("image_segmenter", {"m.pt": _ONNX}, "m.pt is an ONNX model (Triton's"),
        (
            "text_classifier",
            {"m.pt": _SCRIPT},
            "it holds no source_vocab.pt, which text_classifier",
        ),
        (
            "text_classifier",
            {"m.pt": _SCRIPT, "source_vocab.pt": _NO_DICT},
            "source_vocab.pt is not a dict of tokens (torchtext",
        ),
        ("image_classifier", {}, "names neither a serializedFile nor a modelFile"),
    ],
)
def test_files_that_a_handler_cannot_load(
    tmp_path: Path, handler: str, files: dict[str, bytes | str], message: str
) -> None:
    """Files that a handler of TorchServe lacks or cannot load raise an error."""
    with pytest.raises(ArchiveError) as error:
        _migrate_files(tmp_path, handler, files)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("handler", "files"),
    [
        ("image_classifier", {"m.pt": _SCRIPT}),
        ("image_classifier", {"m.pt": _WEIGHTS, "model.py": archives.SCALE}),
        ("handler.py", {"m.pt": _ONNX}),
    ],
)
def test_files_of_handlers(tmp_path: Path, handler: str, files: dict[str, bytes | str]) -> None:
    """TorchServe's handlers load programs, and weights with a class; other handlers any file."""
    assert _read(tmp_path, _migrate_files(tmp_path, handler, files))


def _migrate_files(tmp_path: Path, handler: str, files: dict[str, bytes | str]) -> Migration:
    names = {"serializedFile": "m.pt", "modelFile": "model.py"}
    entries: dict[str, Any] = {key: name for key, name in names.items() if name in files}
    return _migrate(tmp_path, None, handler, files=files, **entries)


def test_text_classifier_takes_one_at_a_time(tmp_path: Path) -> None:
    """text_classifier answers only the first request of a batch, so that batchSize becomes 1."""
    files = {"m.pt": _SCRIPT, "source_vocab.pt": archives.saved({"a": 0})}
    migrated = _migrate(
        tmp_path, {"batchSize": 4}, "text_classifier", files=files, serializedFile="m.pt"
    )
    assert _read(tmp_path, migrated)["max_batch_size"] == 1
    assert migrated.not_converted == ["batchSize 4: text_classifier answers one request at a time"]


def test_options(tmp_path: Path) -> None:
    """The user's choices: input names, the content type of bodies, and an example."""
    options = {
        "inputs": ("question", "context"),
        "content_type": "application/json",
        "example": True,
    }
    document = _read(tmp_path, _migrate(tmp_path, {"batchSize": 4}, options=options))
    assert [(spec["name"], spec["optional"]) for spec in document["input"]] == [
        ("question", True),
        ("context", True),
    ]
    assert _parameters(document) == {
        "MODEL_KWARGS": '{"content_type": "application/json"}',
    }


def test_unknown_fields(tmp_path: Path) -> None:
    """If the handler's source does not show the fields that it reads, the report says so."""
    files = {"handler.py": "def handle(data, context):\n    return data\n"}
    migrated = _migrate(tmp_path, {"batchSize": 2}, files=files)
    assert migrated.inputs == ("body",)
    assert migrated.not_converted[0].startswith(
        "the names of a request's fields: handler.py does not say"
    )


def test_requirements(tmp_path: Path) -> None:
    """The report has the command that installs the archive's requirements."""
    files = {"requirements.txt": "einops"}
    migrated = _migrate(
        tmp_path, {"batchSize": 2}, files=files, requirementsFile="requirements.txt"
    )
    (line,) = migrated.not_converted
    assert "pip install -r 1/model.mar/requirements.txt" in line


def test_comments_end_with_their_line(tmp_path: Path) -> None:
    """Line breaks in an archive's settings do not end comments in the config."""
    evil = 'x"\nbackend: "python"\r\nmax_batch_size: 99\u2028#'
    migrated = _migrate(tmp_path, {"batchSize": 2, "startupTimeout": evil, evil: 1})
    document = _read(tmp_path, migrated)
    assert (document["backend"], document["max_batch_size"]) == ("pytorch_py", 2)
