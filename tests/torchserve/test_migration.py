"""Migrating model-config.yaml to config.pbtxt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import archives
import pytest
import yaml

from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.errors import ArchiveError
from torch_py_backend.torchserve import migration
from torch_py_backend.torchserve.manifest import Manifest
from torch_py_backend.torchserve.migration import Migration

_HANDLER = "def handle(data, context):\n    return [row['body'] for row in data]\n"


def _migrate(
    tmp_path: Path, settings: Any = None, handler: str = "handler.py", **options: Any
) -> Migration:
    """Migrate an archive; settings are values, or their text."""
    text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    files = {
        "handler.py": options.pop("source", _HANDLER),
        "c.yaml": text,
        "requirements.txt": "einops",
        archives.MANIFEST: archives.manifest(
            handler,
            configFile="c.yaml" if settings is not None else None,
            requirementsFile=options.pop("requirements", None),
        ),
    }
    folder = archives.write_folder(tmp_path / "archive", files)
    return migration.migrate("net", Manifest.read(folder, "net.mar"), **options)


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
    (note,) = migrated.not_converted
    assert "batchSize is not in the archive" in note


def test_all_settings(tmp_path: Path) -> None:
    """Settings of TorchServe become fields of config.pbtxt, and each is reported."""
    compiler = {"backend": "inductor", "mode": "reduce-overhead"}
    settings = {
        "minWorkers": 2,
        "batchSize": 8,
        "maxBatchDelay": 50,
        "responseTimeout": 120,
        "jobQueueSize": 200,
        "deviceType": "cpu",
        "pt2": {"compile": {"enable": True, **compiler}},
        "profile": True,
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
    assert json.loads(parameters["TORCH_COMPILE_OPTIONAL_PARAMETERS"]) == compiler
    assert migrated.not_converted == []
    reported = {line.partition(" ")[0].strip(":") for line in migrated.converted}
    assert reported == {"a", *settings}


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        ({"minWorkers": 0, "maxWorkers": 3}, {"kind": "KIND_AUTO", "count": 3}),
        ({"deviceType": "gpu", "minWorkers": 2}, {"kind": "KIND_GPU", "count": 2, "gpus": []}),
        (
            {"deviceIds": [0, 2], "minWorkers": 3, "maxWorkers": 9},
            {"kind": "KIND_GPU", "count": 2, "gpus": [0, 2]},
        ),
        (
            {"deviceType": "CPU", "deviceIds": [1], "minWorkers": 3},
            {"kind": "KIND_CPU", "count": 3, "gpus": []},
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
    assert [line[:4] for line in migrated.not_converted] == (["pt2 "] if compiled is None else [])


def test_settings_without_a_counterpart(tmp_path: Path) -> None:
    """They are listed in the report and in config.pbtxt; line breaks do not end a comment."""
    evil = 'x"\nbackend: "python"\r\nmax_batch_size: 99\u2028#'
    settings = {"batchSize": 2, "minWorkers": 1, "maxWorkers": 4, "startupTimeout": evil, evil: 1}
    migrated = _migrate(tmp_path, settings)
    starts = ["maxWorkers 4: no effect here", "startupTimeout 'x"]
    for note, start in zip(migrated.not_converted, starts, strict=True):
        assert note.startswith(start)
        assert f"# - {note}" in migrated.config
    document = _read(tmp_path, migrated)
    assert (document["backend"], document["max_batch_size"]) == ("pytorch_py", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchSize": 0}, "c.yaml says batchSize: 0; expected an integer of at least 1"),
        ({"batchSize": True}, "says batchSize: True"),
        ({"batchSize": 1 << 31}, "says batchSize: 2147483648"),
        ({"maxBatchDelay": -1}, "says maxBatchDelay: -1; expected an integer of at least 0"),
        ({"minWorkers": 1.5}, "says minWorkers: 1.5"),
        ({"deviceType": "neuron"}, "says deviceType: 'neuron'; expected cpu or gpu"),
        ({"deviceIds": [-1]}, "says deviceIds: [-1]; expected a list of GPUs' numbers"),
        ({"deviceIds": 1}, "says deviceIds: 1"),
        ({"pt2": {"compile": "inductor"}}, "expected the name of a compiler, or its settings"),
        ({"pt2": {"options": {"a": b"x"}}}, "expected values that JSON can hold"),
        ({"parallelType": "tp"}, "says parallelType: 'tp'; expected none: it is not supported"),
        (f"batchSize: 0x{'f' * 5000}", "says batchSize: a number of too many digits"),
    ],
)
def test_invalid_and_unsupported_settings(tmp_path: Path, settings: Any, message: str) -> None:
    """Settings that are invalid, or that the handler cannot do without, raise an error."""
    with pytest.raises(ArchiveError, match=r"^net\.mar: ") as error:
        _migrate(tmp_path, settings)
    assert message in str(error.value)


def test_options(tmp_path: Path) -> None:
    """The user's choices: input names, the content type of bodies, and an example."""
    migrated = _migrate(
        tmp_path, inputs=("question", "context"), content_type="application/json", example=True
    )
    document = _read(tmp_path, migrated)
    inputs = [(spec["name"], spec["optional"]) for spec in document["input"]]
    assert inputs == [("question", True), ("context", True)]
    assert _parameters(document) == {"MODEL_KWARGS": '{"content_type": "application/json"}'}


@pytest.mark.parametrize(
    ("source", "handler", "name", "note"),
    [
        ('x = row.get("body")', "handler.py", "body", ""),
        ("x = row['data']", "handler.py", "data", ""),
        ("x = row.get('data') or row.get('body')", "handler.py", "body", ""),
        ("body = data", "handler.py", "body", "handler.py does not say which it reads"),
        ("body = data", "x\ny/handler.py", "body", "does not say which it reads"),
        ("body = data", "image_classifier", "body", ""),
        ("body = data", "base_handler", "body", "import with --content-type application/json"),
    ],
)
def test_fields_of_requests(
    tmp_path: Path, source: str, handler: str, name: str, note: str
) -> None:
    """The field is the key in the handler's source, and the report says what is unknown."""
    migrated = _migrate(tmp_path, {"batchSize": 2}, handler, source=source)
    assert _read(tmp_path, migrated)["input"][0]["name"] == name
    assert migrated.inputs == (name,)
    assert note in "".join(migrated.not_converted)
    assert len(migrated.not_converted) == bool(note)


def test_requirements(tmp_path: Path) -> None:
    """The report has the command that installs the archive's requirements."""
    migrated = _migrate(tmp_path, {"batchSize": 2}, requirements="requirements.txt")
    (note,) = migrated.not_converted
    assert "pip install -r 1/model.mar/requirements.txt" in note
