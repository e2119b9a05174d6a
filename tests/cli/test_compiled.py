"""`export-compiled` and `import-compiled`: compiled files for the same models elsewhere."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import command_line
import models
import pytest
import scenarios
import starts
import torch
from command_line import refuse, run, tree

from torch_py_backend.artifacts import discovery
from torch_py_backend.compile import compile_cache
from torch_py_backend.config import model_config, pbtxt, tuned_settings
from torch_py_backend.processes import child_process

_COMPILED = scenarios.config(
    {"x": [4]},
    {"y": [2]},
    max_batch_size=2,
    parameters={"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}", "WEIGHTS": "none"},
)
_PACKAGED = scenarios.config({"x": [4]}, {"y": [2]}, parameters={"FALLBACK": "source.py"})
_SOURCE = models.source(models.Compiled)


def _model(folder: Path, config: str, **files: str | bytes) -> Path:
    for name, content in files.items():
        build.write(folder, name.replace("_", "."), content)
    (folder / "config.pbtxt").write_text(config)
    return folder


def _bundle(folder: Path) -> Path:
    """Write a bundle as a start would, without torch's part."""
    config = model_config.parse(pbtxt.arguments(folder, "1", pbtxt.read(folder)))
    config = tuned_settings.apply(config)
    bundle = compile_cache.locate(config, discovery.find(config), torch.device("cpu"))
    assert bundle is not None
    payload = compile_cache.pack(b"", [], folder)
    digest = hashlib.sha256(payload).hexdigest()
    header = {"facts": bundle.facts, "sha256": digest, "vectors": []}
    bundle.path.parent.mkdir(mode=0o700)
    bundle.path.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    return bundle.path


def _package(**metadata: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("model/data/aotinductor/model/abc.wrapper.so", "")
        file.writestr("model/data/aotinductor/model/abc_metadata.json", json.dumps(metadata))
    return content.getvalue()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of models in this process."""
    monkeypatch.setattr(child_process, "run", command_line.here)


@pytest.fixture
def repository(tmp_path: Path, here: None) -> Path:
    """A repository with a bundle, a package, a tuned.json, and models without any."""
    folder = tmp_path / "repository"
    _bundle(_model(folder / "compiled", _COMPILED, model_py=_SOURCE))
    _model(folder / "packaged", _PACKAGED, model_pt2=_package(), source_py=_SOURCE)
    entry = {"machine": tuned_settings.machine_facts(), "chosen": None}
    tuned_settings.save(folder / "compiled", entry)
    tuned_settings.save(folder / "compiled", entry | {"machine": {"processor": "another"}})
    _model(folder / "whole", _PACKAGED.partition("parameters")[0], model_pt2=_package())
    _model(folder / "other", 'backend: "python"\n', model_py="")
    return folder


def _plain(repository: Path, target: Path) -> Path:
    """Copy a repository without its compiled files."""
    ignored = shutil.ignore_patterns("compile_cache", "tuned.json", "model.pt2")
    shutil.copytree(repository, target, ignore=ignored)
    return target


def test_round_trip(repository: Path, tmp_path: Path) -> None:
    """Bundle, package and tuned settings arrive; a second import changes nothing."""
    done = run("export-compiled", "repository", "export", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "whole: model.pt2 is the whole model: copy its folder" in done.stdout
    target = _plain(repository, tmp_path / "target")
    refused = run("import-compiled", "export", "target", cwd=tmp_path)
    assert refused.returncode == 0, refused.stdout + refused.stderr
    expected = {name: data for name, data in tree(repository).items() if "whole" not in name}
    expected["compiled/tuned.json"] = (target / "compiled" / "tuned.json").read_bytes()
    assert {name: data for name, data in tree(target).items() if "whole" not in name} == expected
    here = tuned_settings.fingerprint(tuned_settings.machine_facts())
    assert tuned_settings.entries(target / "compiled").keys() == {here}
    (bundle,) = (target / "compiled" / "compile_cache").iterdir()
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert bundle.parent.stat().st_mode & 0o777 == 0o700
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()}
    again = run("import-compiled", "export", "target", cwd=tmp_path)
    assert again.stdout.count("(unchanged)") == 3
    assert before == {path: path.stat().st_mtime_ns for path in before}


def _manifest(export: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((export / "manifest.json").read_bytes())
    return manifest


def test_folder(repository: Path, tmp_path: Path) -> None:
    """The files have the paths of the repository, and the manifest has the SHA-256 of each."""
    export = tmp_path / "export"
    run("export-compiled", str(repository), str(export))
    (bundle,) = (repository / "compiled" / "compile_cache").iterdir()
    cached = f"compiled/compile_cache/{bundle.name}"
    files = {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file()}
    assert files == {cached, "compiled/tuned.json", "packaged/1/model.pt2", "manifest.json"}
    listed = {
        f"{name}/{path}": digest
        for name, model in _manifest(export)["models"].items()
        for path, digest in model["files"].items()
    }
    assert listed.keys() == files - {"manifest.json"}
    for path in (cached, "packaged/1/model.pt2"):
        assert (export / path).read_bytes() == (repository / path).read_bytes()
        assert listed[path] == hashlib.sha256((repository / path).read_bytes()).hexdigest()


def test_nothing_to_export(here: None, tmp_path: Path) -> None:
    """Without anything compiled or tuned, one sentence says so, and nothing is written."""
    _model(tmp_path / "repository" / "net", _COMPILED, model_py=_SOURCE)
    refuse(
        "nothing that was compiled or tuned", "export-compiled", "repository", "out", cwd=tmp_path
    )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "repository" / "net" / "compile_cache").exists()
    refuse("is not a folder", "export-compiled", "nowhere", "out", cwd=tmp_path)


def test_bundle_of_another_user(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that another user could have written is not passed on."""
    (bundle,) = (repository / "compiled" / "compile_cache").iterdir()
    bundle.chmod(0o666)
    done = run("export-compiled", str(repository), str(tmp_path / "export"))
    assert "compiled: its bundle is ignored: others may write to it" in done.stdout
    assert not list((tmp_path / "export").rglob("*.bundle"))
    assert ".bundle" not in str(_manifest(tmp_path / "export"))


def _source(target: Path) -> None:
    (target / "compiled" / "1" / "model.py").write_text(_SOURCE + "\n")


def _options(target: Path) -> None:
    text = _COMPILED + pbtxt.parameter("OPTIMIZE", "freeze")
    (target / "compiled" / "config.pbtxt").write_text(text)


def _rows(target: Path) -> None:
    config = target / "compiled" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 2", "max_batch_size: 4"))


def _missing(target: Path) -> None:
    shutil.rmtree(target / "compiled")


def _program(target: Path) -> None:
    (target / "packaged" / "1" / "source.py").write_text("pass\n")


def _newer(target: Path) -> None:
    build.write(target / "packaged", "model.pt2", _package(torch_version=torch.__version__))


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (
            _source,
            "compiled",
            "the bundle is of no use: ValueError: it differs from this start: the model's code or",
        ),
        (_options, "compiled", "start: OPTIMIZE is () there and ('freeze',) here. Compile it here"),
        (_rows, "compiled", "start: max_batch_size is 2 there and 4 here. Compile it here"),
        (_missing, "compiled", "has no model 'compiled'"),
        (_program, "packaged", "the export is of a model with other files"),
        (_newer, "packaged", "it has another model.pt2, which was built for such a machine"),
    ],
)
def test_other_model(
    repository: Path, tmp_path: Path, change: Callable[[Path], None], model: str, message: str
) -> None:
    """A model that is another one is refused with one sentence; the others are imported."""
    run("export-compiled", str(repository), str(tmp_path / "export"))
    target = _plain(repository, tmp_path / "target")
    change(target)
    before = {name: data for name, data in tree(target).items() if name.startswith(model)}
    done = run("import-compiled", "export", "target", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("REFUSED") == done.stdout.count("IMPORTED") == 1
    assert message in done.stdout
    after = {name: data for name, data in tree(target).items() if name.startswith(model)}
    assert after == before
    assert not [path for path in target.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize("key", ["torch", "python", "device"])
def test_other_machine(repository: Path, tmp_path: Path, key: str) -> None:
    """An export of other versions or another processor is refused."""
    export = tmp_path / "export"
    run("export-compiled", str(repository), str(export))
    (bundle,) = export.rglob("*.bundle")
    line, _, payload = bundle.read_bytes().partition(b"\n")
    header = json.loads(line)
    here, header["facts"][key] = header["facts"][key], "7"
    bundle.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    manifest = _manifest(export)
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    manifest["models"]["compiled"]["files"][f"compile_cache/{bundle.name}"] = digest
    (export / "manifest.json").write_text(json.dumps(manifest))
    target = _plain(repository, tmp_path / "target")
    done = run("import-compiled", "export", "target", cwd=tmp_path)
    assert done.returncode == 1
    assert "model 'compiled': the bundle is of no use: ValueError: it differs" in done.stdout
    assert f"this start: {key} is 7 there and {here} here. Compile it here" in done.stdout
    assert "IMPORTED packaged" in done.stdout
    assert not (target / "compiled" / "compile_cache").exists()


_CACHED, _TUNED = "compile_cache/x.bundle", "tuned.json"


@pytest.mark.parametrize(
    ("model", "path", "content", "message"),
    [
        ("compiled", "../outside/x", b"", "it is not in the folder"),
        ("compiled", "/etc/passwd", b"", "it is not in the folder"),
        ("compiled", "", b"", "it is not in the folder"),
        ("compiled", "model.py", b"", "contains files that no export writes: model.py"),
        ("compiled", "1/model.py", b"", "a model with other files"),
        ("unknown", _CACHED, b"", "has no model 'unknown'"),
        ("../target/compiled", _CACHED, b"", "it is not in the folder"),
        ("compiled", _CACHED, b"junk", "the bundle is of no use: JSONDecodeError"),
        ("compiled", _CACHED, b'{"facts": 1}\n', "the bundle is of no use: TypeError"),
        ("compiled", "1/x", b"junk", "the export is of a model with other files"),
        ("compiled", _TUNED, b"[]", "tuned.json is refused"),
        ("compiled", _TUNED, b'{"machines": {"a": {}}}', "tuned.json is refused: KeyError"),
        ("compiled", _TUNED, b'{"machines": {"a": {"machine": NaN}}}', "tuned.json is refused"),
        ("compiled", _TUNED, b"[" * 99_999, "tuned.json is refused"),
    ],
)
def test_hostile_file(
    repository: Path, tmp_path: Path, model: str, path: str, content: bytes, message: str
) -> None:
    """No path leads out of a model; files that are not what an export writes are refused."""
    run("export-compiled", str(repository), str(tmp_path / "export"))
    _plain(repository, tmp_path / "target")
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    digest = hashlib.sha256(content).hexdigest()
    manifest = {"models": {model: {"beside": {}, "files": {path: digest}}}}
    (hostile / "manifest.json").write_text(json.dumps(manifest))
    if path and not path.startswith("/"):
        (hostile / model / path).parent.mkdir(parents=True)
        (hostile / model / path).write_bytes(content)
    before = tree(tmp_path)
    done = run("import-compiled", "hostile", "target", cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert tree(tmp_path) == before


def test_no_space(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that does not fit on the disk is refused, and no part of it is left."""
    run("export-compiled", str(repository), str(tmp_path / "export"))
    target = _plain(repository, tmp_path / "target")

    def fill(_source: Path, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fill)
    done = run("import-compiled", "export", "target", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("cannot be written: [Errno 28] No space left") == 2
    assert not [path for path in target.rglob("*") if path.is_file() and "-import" in path.name]


def test_tuned_settings_decide(repository: Path, tmp_path: Path) -> None:
    """With OPTIMIZE auto, the bundle is that of the imported settings."""
    shutil.rmtree(repository)
    net = _model(
        repository / "net",
        _COMPILED.replace(
            "instance_group", pbtxt.parameter("OPTIMIZE", "auto") + "\ninstance_group"
        ),
        model_py=_SOURCE,
    )
    chosen = {"parameters": {"OPTIMIZE": "freeze"}, "instances": 1}
    machine = tuned_settings.machine_facts()
    tuned_settings.save(net, {"machine": machine, "chosen": chosen})
    target = _plain(repository, tmp_path / "target")
    tuned_settings.save(target / "net", {"machine": {"processor": "another"}, "chosen": None})
    bundle = _bundle(net)
    run("export-compiled", str(repository), str(tmp_path / "export"))
    done = run("import-compiled", "export", "target", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (target / "net" / "compile_cache" / bundle.name).is_file()
    assert len(tuned_settings.entries(target / "net")) == 2


def test_own_tuned_settings_decide(repository: Path, tmp_path: Path) -> None:
    """With OPTIMIZE auto, a bundle without settings does not fit a model that has its own."""
    automatic = _COMPILED + pbtxt.parameter("OPTIMIZE", "auto")
    (repository / "compiled" / "config.pbtxt").write_text(automatic)
    shutil.rmtree(repository / "compiled" / "compile_cache")
    (repository / "compiled" / "tuned.json").unlink()
    _bundle(repository / "compiled")
    target = _plain(repository, tmp_path / "target")
    chosen = {"parameters": {"OPTIMIZE": "freeze"}, "instances": 1}
    entry = {"machine": tuned_settings.machine_facts(), "chosen": chosen}
    tuned_settings.save(target / "compiled", entry)
    run("export-compiled", str(repository), str(tmp_path / "export"))
    done = run("import-compiled", "export", "target", cwd=tmp_path)
    assert "start: OPTIMIZE is () there and ('freeze',) here" in done.stdout
    assert not (target / "compiled" / "compile_cache").exists()


@pytest.mark.slow
def test_start_with_an_import_compiles_nothing(tmp_path: Path) -> None:
    """A start in another repository, with an empty cache of torch's, builds no code."""
    first, second = (
        _model(tmp_path / name / build.MODEL, _COMPILED, model_py=_SOURCE) for name in "ab"
    )
    built, _, (cold,) = starts.start([first], tmp_path / "first")
    assert built == 1
    assert run("export-compiled", "a", "export", cwd=tmp_path).returncode == 0
    done = run("import-compiled", "export", "b", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built, _, (warm,) = starts.start([second], tmp_path / "second")
    assert built == 0
    assert "fxgraph_cache_miss" not in warm
    assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
    assert warm["y"] == cold["y"]
