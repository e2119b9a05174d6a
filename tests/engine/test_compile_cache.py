"""The folder of inductor's cache: where it is, and what later starts find in it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import children
import models
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from torch_py_backend.config import threads
from torch_py_backend.engine import compilation, load, runtime, warmup
from torch_py_backend.processes import private_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model in the user's cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return tmp_path / "home" / ".cache" / "torch-py-backend" / "compile_cache" / build.MODEL


def used(folder: Path, **options: Any) -> Path:
    """Return the folder that inductor uses while a model is compiled."""
    with compilation.cached(build.config(folder, **options)):
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (cache / "fxgraph").mkdir(exist_ok=True)
        (cache / "fxgraph" / "kernel.so").write_bytes(b"code")
    return cache


def test_compiled_code_is_in_the_model_s_folder_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert used(tmp_path) == tmp_path / "compile_cache"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "compile_cache").stat().st_mode) == 0o700
    assert not inductor.cpp_cache_precompile_headers  # they would be in /tmp


_CHANGES: dict[str, Callable[[Path], object]] = {
    "others may add": lambda cache: cache.chmod(0o777),
    "others may write": lambda cache: (cache / "fxgraph/kernel.so").chmod(0o666),
    "another user's": lambda cache: os.chown(cache / "fxgraph/kernel.so", 12345, -1),
    "link": lambda cache: (cache / "fxgraph/linked.so").symlink_to("kernel.so"),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_compiled_code_that_others_could_have_written(
    tmp_path: Path, home: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not loaded: another folder is used with a warning."""
    if change == "another user's" and os.geteuid():
        pytest.skip("only root can give a file away")
    started = used(tmp_path)
    started.chmod(0o755)
    _CHANGES[change](started)
    before = sorted(started.rglob("*"))
    for option in ({}, {"compile_cache_dir": "compile_cache"}):
        caplog.clear()
        with compilation.cached(build.config(tmp_path, **option)):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home)
            assert not (home / "fxgraph").exists()
        assert f"cannot be kept in {started}" in caplog.text
    assert sorted(started.rglob("*")) == before


def test_named_folder(tmp_path: Path) -> None:
    """A relative COMPILE_CACHE_DIR is in the model's folder, wherever the server was started."""
    for name in ("cache", str(tmp_path / "a" / "b")):
        assert used(tmp_path, compile_cache_dir=name) == tmp_path / name


def test_model_folder_that_cannot_be_written(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache is in the user's, or, without one, in the temporary folder."""
    (tmp_path / "compile_cache").touch()
    assert used(tmp_path) == home
    assert f"compiled code cannot be kept in {tmp_path / 'compile_cache'}: " in caplog.text
    temporary = Path(tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HOME", str(tmp_path / "compile_cache"))
    assert used(tmp_path).is_relative_to(temporary)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "found"), [(0o700, False), (0o755, True)])
def test_cache_in_an_image(
    mode: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user starts with the graphs of root's read-only cache if it may read them."""
    with tempfile.TemporaryDirectory() as name:
        home, cache = Path(name, "home"), Path(name, "digits", "compile_cache")
        (cache / "fxgraph").mkdir(parents=True)
        (cache / "fxgraph" / "graph").write_text("compiled")
        cache.chmod(mode)
        home.mkdir()
        os.chown(home, 12345, -1)
        Path(name).chmod(0o755)
        monkeypatch.setenv("HOME", str(home))
        os.seteuid(12345)
        try:
            copy = used(cache.parent)
        finally:
            os.seteuid(0)
        assert copy.is_relative_to(home)
        assert (copy / "fxgraph" / "graph").exists() is found


def _compile(folder: Path, start: Any, others: Any, compiled: Any) -> None:
    start.wait()
    with compilation.cached(build.config(folder)):
        graphs = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fxgraph"
        if graphs.exists():
            others.wait(30)  # raises if one of them waits for the other
            return
        graphs.mkdir()
        with compiled.get_lock():
            compiled.value += 1


def test_one_of_several_instances_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others then start at the same time."""
    server = f"{os.getpid()}-compiles"
    monkeypatch.setattr(private_files, "server_name", lambda _parent: server)
    context = multiprocessing.get_context("fork")
    compiled = context.Value("i", 0)
    arguments = (tmp_path, context.Barrier(3), context.Barrier(2), compiled)
    processes = [context.Process(target=_compile, args=arguments, daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    assert compiled.value == 1


# The compiler, with a log of what it builds.
_COMPILER = """#!/bin/sh
case "$1" in --version|-v) ;; *) echo "$*" >> "{log}";; esac
exec {compiler} "$@"
"""


def _start(folder: Path, scratch: Path) -> tuple[str, list[Any], dict[str, int], dict[str, int]]:
    """Load and warm up a model, with a temporary folder of its own.

    Return the arguments of the compiler's calls, an answer, and the counts of ours and inductor's.
    """
    compiler, log = scratch / "bin" / "g++", scratch / "built"
    compiler.parent.mkdir(parents=True)
    log.touch()
    compiler.write_text(_COMPILER.format(log=log, compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    children.settle(scratch, PATH=f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    settings = build.config(
        folder,
        max_batch_size=1,
        outputs=(build.spec("y", dims=(3,)),),
        torch_compile_optional_parameters={},
        weights="none",
    )
    torch.manual_seed(0)
    engine = load.build(settings, threads.budget(settings))
    with runtime.mode(settings.options):
        warmup.run(engine)
        (outcome,) = engine.run([{"x": torch.ones(1, 4)}])
    assert isinstance(outcome, dict)
    answer = torch.as_tensor(outcome["y"]).tolist()
    return log.read_text(), answer, engine.counts.compile_cache, dict(counters["inductor"])


@pytest.mark.slow
def test_later_starts_compile_nothing(tmp_path: Path) -> None:
    """A second start, of a copy of the folder at another path, loads every graph."""
    build.write(tmp_path / "model", "model.py", models.source(models.Affine))
    built, answer, *cold = children.call(_start, tmp_path / "model", tmp_path / "first")
    assert built
    moved = Path(shutil.copytree(tmp_path / "model", tmp_path / "moved" / "model"))
    built, again, *warm = children.call(_start, moved, tmp_path / "again")
    assert not built
    assert [cold[0], warm[0]] == [{"hit": 0, "miss": 1}, {"hit": 1, "miss": 0}]
    assert again == answer
    assert warm[1]["fxgraph_cache_hit"] == cold[1]["fxgraph_cache_miss"] > 0
    assert not warm[1].keys() & {"fxgraph_cache_miss", "fxgraph_cache_bypass"}
