"""Manifests and settings of archives."""

from __future__ import annotations

import sys
from pathlib import Path

import archives
import pytest

from torch_py_backend.errors import ArchiveError
from torch_py_backend.torchserve.manifest import Manifest


def _manifest(tmp_path: Path, manifest: str, settings: str = "") -> Manifest:
    files = {"handler.py": "", "c.yaml": settings, archives.MANIFEST: manifest}
    folder = archives.write_folder(tmp_path / "net", files)
    return Manifest.read(folder, "net.mar")


@pytest.mark.parametrize(
    ("handler", "module", "function"),
    [
        ("../handler.py", "handler", "handle"),
        ("handler:answer", "handler", "answer"),
        ("image_classifier", "image_classifier", "handle"),
    ],
)
def test_manifest(tmp_path: Path, handler: str, module: str, function: str) -> None:
    """A handler is a file, a module, a function in it, or a handler of TorchServe."""
    manifest = _manifest(tmp_path, archives.manifest(handler))
    assert (manifest.model_name, manifest.handler) == ("net", handler)
    assert (manifest.handler_module, manifest.handler_function) == (module, function)
    assert (manifest.requirements_file, manifest.config_file) == ("", "")
    assert manifest.settings() == {}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        (" " * (2 << 20), "MANIFEST.json is too large; expected at most 1048576 bytes"),
        ("[]", "no object 'model'"),
        ('{"workflow": {"workflowName": "w"}}', "no object 'model'. Of a workflow (.war), import"),
        ('{"runtime": "LSP", "model": {}}', "its runtime is 'LSP'; expected a handler written"),
        ('{"model": {"handler": "handler.py"}}', "no text for 'modelName'"),
        ('{"model": {"modelName": "net", "handler": 3}}', "no text for 'handler'"),
        (archives.manifest("gone.py"), "its handler is 'gone.py', which it does not hold"),
        (archives.manifest("import os"), "its handler is 'import os'"),
        (archives.manifest("vllm_handler"), "Triton's vLLM backend"),
        (archives.manifest("text_classifier"), "Serve the model with hooks that call a tokenizer"),
        (archives.manifest(serializedFile="no.pt"), "the serializedFile no.pt, which the archive"),
        (archives.manifest(configFile="../x.yaml"), "holds the name '../x.yaml'"),
        (archives.manifest(sourceVocab=["a"]), "names the sourceVocab ['a'], which"),
    ],
)
def test_invalid_manifests(tmp_path: Path, manifest: str, message: str) -> None:
    """An invalid manifest raises an error with the reason."""
    with pytest.raises(ArchiveError) as error:
        _manifest(tmp_path, manifest)
    assert message in str(error.value)


def _references(doubled: str) -> str:
    """Return values that refer to each other: each doubles the previous one, sixty times."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{number}: &a{number} {doubled.format(number - 1)}" for number in range(1, 60)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("- 1\n- 2", "c.yaml holds a list; expected keys and values"),
        ("a: !!python/object/apply:os.system ['true']", "cannot be read: could not determine"),
        ("a: " + "[" * 1000, "c.yaml cannot be read"),
        ("#" * (2 << 20), "c.yaml is too large"),
        (_references("[*a{0}, *a{0}]"), "expand to more than 100000 values"),
        (_references("{{<<: [*a{0}, *a{0}]}}"), "expand to more than 100000 values"),
        ("a: &a [*a, *a]", "expand to more than 100000 values"),
    ],
)
def test_invalid_settings(tmp_path: Path, written: str, message: str) -> None:
    """Settings that are not keys and values, or would run code or fill memory, raise an error."""
    with pytest.raises(ArchiveError) as error:
        _settings(tmp_path, written)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def _settings(tmp_path: Path, written: str) -> dict[str, object]:
    return _manifest(tmp_path, archives.manifest(configFile="c.yaml"), written).settings()


def test_settings_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyYAML, an archive with settings raises an error that says what to install."""
    assert _settings(tmp_path, "# none") == {}
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ArchiveError, match=r"pip install 'torch-py-backend\[torchserve\]'"):
        _settings(tmp_path, "batchSize: 4")
