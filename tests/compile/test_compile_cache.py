"""Bundles of compiled code are written, loaded, and ignored where they do not match."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import build
import models
import pytest
import starts
import torch

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.compile import compile_cache
from torch_py_backend.compile.compile_cache import Bundle
from torch_py_backend.errors import PlatformError
from torch_py_backend.processes import private_files

CPU = torch.device("cpu")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    weights = build.write(tmp_path, "model.safetensors", b"0123")
    return Artifact(ArtifactType.MODULE, build.write(tmp_path, "model.py", "x = 1\n"), weights)


@pytest.fixture(autouse=True)
def torch_cache(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bundles that were loaded; a few bytes stand for PyTorch's bundle."""
    loaded: list[bytes] = []

    def load(payload: bytes) -> object:
        loaded.append(payload)
        return loaded

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"kernels\n", None))
    return loaded


def find_bundle(folder: Path, artifact: Artifact, **options: Any) -> Bundle:
    bundle = compile_cache.at(build.config(folder, **options), artifact, CPU)
    assert bundle is not None
    return bundle


def test_bundle_is_written_and_loaded(
    tmp_path: Path, artifact: Artifact, torch_cache: list[bytes]
) -> None:
    """The first start writes one file beside the model, and the second one loads it."""
    first = find_bundle(tmp_path, artifact)
    with first.used():
        assert not first.path.exists()
    written = first.path.stat().st_mtime_ns
    assert torch_cache == []
    second = find_bundle(tmp_path, artifact)
    with second.used():
        assert torch_cache == [b"kernels\n"]
    assert second.path.stat().st_mtime_ns == written
    assert {path.suffix for path in (tmp_path / "compile_cache").iterdir()} == {".bundle", ".lock"}


def test_libraries_of_the_cpu_are_kept(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle contains inductor's libraries, which another machine extracts.

    An incomplete library, as a killed start leaves it, is replaced.
    """
    bundle = find_bundle(tmp_path, artifact)
    for name in ("first", "second", "second"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        with bundle.used() as loaded:
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ab"
            if not loaded:
                folder.mkdir(parents=True)
                (folder / "kernel.so").write_bytes(b"code")
                (folder / "kernel.cpp").write_bytes(b"source")
            else:
                kept = {path.name: path.read_bytes() for path in folder.iterdir()}
                assert kept == {"kernel.so": b"code"}
                (folder / "kernel.so").write_bytes(b"co")
        assert loaded is (name == "second")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / name)


def test_bundles_of_the_same_content_are_the_same(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a bundle do not depend on the time."""
    contents = []
    for hour in range(2):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1.8e9 + 3600 * hour)
        bundle = find_bundle(tmp_path, artifact)
        with bundle.used():
            library = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "kernel.so"
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(b"code")
            os.utime(library, (hour, hour))
        contents.append(bundle.path.read_bytes())
        bundle.path.unlink()
    assert contents[0] == contents[1]


@pytest.mark.parametrize("name", ["../../outside.so", "/outside.so"])
def test_library_outside_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A bundle is extracted into its own folder only."""
    target = str(tmp_path / "outside.so") if name.startswith("/") else name
    payload = io.BytesIO()
    with zipfile.ZipFile(payload, "w") as archive:
        archive.writestr("torch.bundle", b"")
        archive.writestr(target, b"code")
    with pytest.raises(ValueError, match="leads out of its folder"):
        compile_cache.unpack(payload.getvalue(), tmp_path / "a" / "b")
    assert not list(tmp_path.glob("**/outside.so"))


def test_full_disk_leaves_nothing_behind(
    tmp_path: Path, artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    """A bundle that cannot be written is logged, and leaves no partial file."""
    error = OSError(28, "No space left on device")
    with (
        mock.patch.object(Path, "replace", side_effect=error),
        find_bundle(tmp_path, artifact).used(),
    ):
        pass
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in (tmp_path / "compile_cache").iterdir()] == [".lock"]


def test_failed_start_keeps_nothing(tmp_path: Path, artifact: Artifact) -> None:
    """A failed warm-up writes no bundle, and releases the lock."""
    bundle = find_bundle(tmp_path, artifact)
    with pytest.raises(ZeroDivisionError), bundle.used():
        _ = 1 / 0
    assert not bundle.path.exists()
    with bundle.used():
        pass
    assert bundle.path.exists()


@pytest.mark.parametrize(
    ("file", "options", "same"),
    [
        ("model.py", {}, False),
        ("model.safetensors", {}, False),
        (None, {"torch_compile_optional_parameters": {"options": {"freezing": True}}}, False),
        (None, {"max_batch_size": 4}, False),
        (None, {"inputs": (build.spec("x", dims=(5,)),)}, False),
        (None, {"num_threads": 3, "warmup": False}, True),
    ],
)
def test_file_name(
    file: str | None, options: dict[str, Any], same: bool, tmp_path: Path, artifact: Artifact
) -> None:
    """The file name changes with the code, the weights' size, and options of compiled code."""
    before = find_bundle(tmp_path, artifact).path
    if file is not None:
        build.write(tmp_path, file, "x = 23\n")
    assert (find_bundle(tmp_path, artifact, **options).path == before) is same


def _foreign(content: bytes) -> bytes:
    line, _, payload = content.partition(b"\n")
    header = json.loads(line)
    header["facts"]["torch"] = "1.0"
    return json.dumps(header).encode() + b"\n" + payload


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda content: content[:-1] + b"!", "it is damaged", id="changed"),
        pytest.param(lambda content: b"[]\n", "is ignored", id="other JSON"),
        pytest.param(_foreign, "it differs from this start: torch is 1.0 there and ", id="foreign"),
    ],
)
def test_damaged_bundle(
    tmp_path: Path,
    artifact: Artifact,
    torch_cache: list[bytes],
    damage: Callable[[bytes], bytes],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A damaged bundle is not passed to torch, and is replaced."""
    bundle = find_bundle(tmp_path, artifact)
    with bundle.used():
        pass
    content = bundle.path.read_bytes()
    bundle.path.write_bytes(damage(content))
    with bundle.used():
        assert torch_cache == []
    assert message in caplog.text
    assert bundle.path.read_bytes() == content


def test_nothing_to_save(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without anything to save, no file is written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    bundle = find_bundle(tmp_path, artifact)
    with bundle.used():
        pass
    assert not bundle.path.exists()


def test_cache_is_disabled(tmp_path: Path, artifact: Artifact) -> None:
    """COMPILE_CACHE_DIR none writes nothing to the model's folder."""
    assert compile_cache.at(build.config(tmp_path, compile_cache_dir="NONE"), artifact, CPU) is None
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_named_folder(tmp_path: Path, artifact: Artifact) -> None:
    """The folder of COMPILE_CACHE_DIR is created; it is an error if it cannot be written."""
    bundle = find_bundle(tmp_path, artifact, compile_cache_dir=str(tmp_path / "a" / "b"))
    assert bundle.path.parent == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    config = build.config(tmp_path, compile_cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(PlatformError, match=r"COMPILE_CACHE_DIR is .* cannot be written"):
        compile_cache.at(config, artifact, CPU)


def test_folder_beside_the_model_that_cannot_be_written(tmp_path: Path, artifact: Artifact) -> None:
    """A model in a read-only repository is served without a bundle."""
    (tmp_path / "compile_cache").touch()
    assert compile_cache.at(build.config(tmp_path), artifact, CPU) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "kept"), [(0o700, False), (0o755, True)])
def test_folder_beside_the_model_of_root(
    mode: int, kept: bool, artifact: Artifact, tmp_path: Path
) -> None:
    """A bundle of root is loaded by another user if it is readable."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
        folder.chmod(0o755)
        there = dataclasses.replace(
            artifact, path=folder / artifact.path.name, weights=folder / "model.safetensors"
        )
        written = find_bundle(folder, there)
        with written.used():
            pass
        written.path.parent.chmod(mode)
        written.path.chmod(mode & 0o644)
        os.seteuid(12345)
        try:
            bundle = compile_cache.at(build.config(folder), there, CPU)
            assert bundle is None or private_files.read(bundle.path)
        finally:
            os.seteuid(0)
        assert (bundle is not None) is kept


def _compile(folder: Path, artifact: Artifact, barrier: Any, compiled: Any) -> None:
    bundle = find_bundle(folder, artifact)
    barrier.wait()
    with bundle.used():
        if not bundle.path.exists():
            with compiled.get_lock():
                compiled.value += 1


def test_one_of_several_instances_compiles(tmp_path: Path, artifact: Artifact) -> None:
    """Of instances that start together one compiles; the others wait for it and load."""
    context = multiprocessing.get_context("fork")
    barrier, compiled = context.Barrier(4), context.Value("i", 0)
    processes = [
        context.Process(target=_compile, args=(tmp_path, artifact, barrier, compiled))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert compiled.value == 1


# --- with torch's own part ---------------------------------------------------------------------


@pytest.mark.slow
def test_warm_start_compiles_nothing(tmp_path: Path) -> None:
    """A second machine loads every graph from the bundle alone.

    PyTorch does not cache graphs with packed weights; their kernels are cached.
    """
    folders = [tmp_path / "compiled", tmp_path / "frozen"]
    for folder, module in zip(folders, (models.Compiled, models.Convolved), strict=True):
        build.write(folder, "model.py", models.source(module))
    built, tried, (cold, cold_frozen) = starts.start(folders, tmp_path / "first")
    assert built == 2
    assert cold["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_hit" not in cold
    assert cold_frozen["fxgraph_cache_bypass"] > 0

    built, tried_again, (warm, warm_frozen) = starts.start(folders, tmp_path / "second")
    assert built == 0
    assert "fxgraph_cache_miss" not in warm
    assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
    # The families that depend on AVX-512 (BF16, VNNI) are tried in each start.
    assert tried_again < tried
    assert (warm["y"], warm_frozen["y"]) == (cold["y"], cold_frozen["y"])
