"""Compiled models before and after they are sealed, and what later starts find of their graphs."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import build
import models
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import clear_inductor_caches

from torch_py_backend.config import threads
from torch_py_backend.engine import compilation, load, runtime, warmup
from torch_py_backend.errors import ConfigError, LoadError, PlatformError
from torch_py_backend.pipeline.run import Counts
from torch_py_backend.processes import private_files

pytestmark = pytest.mark.usefixtures("dynamo")


def triple(x: Tensor) -> Tensor:
    return x * 3


def compiled(parameters: dict[str, Any], module: Any, kind: str = "CPU") -> compilation.Compiled:
    config = build.config(torch_compile_optional_parameters=parameters, kind=kind)
    return compilation.Compiled(config, module)


@pytest.mark.parametrize("parameters", [{"backend": "nope"}, {"Mode": "x"}])
def test_values_that_torch_compile_refuses_fail_the_load(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"OPTIONAL_PARAMETERS: .*(nope|Mode)"):
        compiled(parameters, triple)


def test_a_graph_break_fails_the_load_only_with_fullgraph() -> None:
    def branching(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(LoadError, match=r"torch\.compile failed"):
        compiled({"backend": "eager", "fullgraph": True}, branching)(torch.ones(1))
    torch._dynamo.reset()
    assert compiled({"backend": "eager"}, branching)(torch.ones(1)) == 2


def test_an_error_of_the_compiler_fails_the_load_with_what_to_install() -> None:
    def broken(*_: object) -> Any:
        raise FileNotFoundError("no-such-compiler")

    with pytest.raises(LoadError, match=r"failed: FileNotFoundError: no-such.* such as g\+\+"):
        compiled({"backend": broken}, triple)(torch.ones(1))


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled({"backend": "eager"}, lambda x: x @ torch.ones(3, 3))(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("arguments", "kind", "captures"),
    [
        ({"backend": "cudagraphs"}, "GPU", True),
        ({"mode": "reduce-overhead"}, "GPU", True),
        ({"mode": "max-autotune"}, "MODEL", True),
        ({"options": {"triton.cudagraphs": True}}, "GPU", True),
        ({"mode": "reduce-overhead"}, "CPU", False),
        ({"mode": "max-autotune-no-cudagraphs"}, "GPU", False),
        ({}, "GPU", False),
    ],
)
def test_each_call_begins_a_step_of_cuda_graphs(
    arguments: dict[str, Any], kind: str, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch may write over the outputs of a CUDA graph when the next step begins."""
    steps: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(True))
    model = compiled(arguments, triple, kind)
    for call in (model, model.seal(Counts())):
        call(torch.ones(2, 4))
    assert len(steps) == (2 if captures else 0)


class Broken(nn.Module):
    """Writes to its input and a buffer before a graph break, and after it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x += 1
        torch._dynamo.graph_break()
        self.calls += 1
        return x * 3 if x.shape[0] > 5 else x + 2  # one graph has a guard on the rows


def test_no_part_of_a_model_with_graph_breaks_runs_twice() -> None:
    module = Broken()
    model = compiled({"backend": "eager"}, module)
    model(torch.zeros(8, 4))
    sealed = model.seal(Counts())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for shape in ((8, 4), (3, 4), (1, 4), (2, 5), (2, 4, 4)):
        calls, x = module.calls.item(), torch.zeros(shape)
        assert torch.equal(sealed(x).flatten(), torch.full((x.numel(),), 3.0))
        assert torch.equal(x, torch.ones(shape))
        assert module.calls.item() == calls + 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_sealed_model_that_fails_is_not_run_again() -> None:
    calls: list[Tensor] = []

    def refuse(x: Tensor) -> Tensor:
        calls.append(x)
        if x.sum() < 0:
            raise RuntimeError("negative")
        return x

    apart = torch.compiler.disable(refuse)
    model = compiled({"backend": "eager"}, lambda x: apart(x * 2))
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="negative"):
        model.seal(Counts())(-torch.ones(2, 4))
    assert len(calls) == 2


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


def test_compiled_code_is_in_the_model_s_folder_or_a_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative COMPILE_CACHE_DIR is in the model's folder, wherever the server was started."""
    unusable = mock.Mock(side_effect=PlatformError("the temporary folder cannot be used"))
    monkeypatch.setattr(private_files, "shared_folder", unusable)
    assert used(tmp_path) == tmp_path / "compile_cache"
    for name in ("cache", str(tmp_path / "a" / "b")):
        assert used(tmp_path, compile_cache_dir=name) == tmp_path / name
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
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
    with compilation.cached(build.config(tmp_path)):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home)
        assert not (home / "fxgraph").exists()
    assert f"cannot be kept in {started}" in caplog.text
    assert sorted(started.rglob("*")) == before


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


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_instance_compiles_in_its_turn_and_later_ones_start_at_the_same_time(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    @contextlib.contextmanager
    def turn(model: str) -> Iterator[None]:
        held.append(model)
        if compiled:  # by the instance before, while this one waited
            (tmp_path / "compile_cache" / "fxgraph").mkdir(parents=True)
        yield
        held.remove(model)

    monkeypatch.setattr(private_files, "turn", turn)
    with compilation.cached(build.config(tmp_path)):
        assert held == ([] if compiled else [build.MODEL])


# Tells its version, which is a part of the keys of graphs, and builds nothing.
_IDLE_COMPILER = """#!/bin/sh
case "$1" in --version|-v) exec {compiler} "$@";; esac
exit 1
"""


def _start(folder: Path) -> tuple[list[Any], dict[str, int], dict[str, int]]:
    """Load and warm up a model as a new process; return an answer, our counts and inductor's."""
    torch._dynamo.reset()
    clear_inductor_caches()
    counters.clear()
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
    return answer, engine.counts.compile_cache, dict(counters["inductor"])


@pytest.mark.slow
@pytest.mark.usefixtures("process", "imports")
def test_later_starts_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start, of a copy of the folder at another path, loads every graph."""
    for name in ("model", "moved", "first", "again"):
        (tmp_path / name).mkdir()
    build.write(tmp_path / "model", "model.py", models.source(models.Affine))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "first"))
    answer, *cold = _start(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved" / "model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "again"))
    compiler = tmp_path / "g++"
    compiler.write_text(_IDLE_COMPILER.format(compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    again, *warm = _start(tmp_path / "moved" / "model")
    assert [cold[0], warm[0]] == [{"hit": 0, "miss": 1}, {"hit": 1, "miss": 0}]
    assert again == answer
    assert warm[1]["fxgraph_cache_hit"] == cold[1]["fxgraph_cache_miss"] > 0
    assert not warm[1].keys() & {"fxgraph_cache_miss", "fxgraph_cache_bypass"}
