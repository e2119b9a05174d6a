"""Ranks that die, fail alone, or cannot load: no other waits for ever, and none remains."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import parallel
import pytest
import torch
import torch.distributed as dist
import transformers

from torch_py_backend import artifacts, faults, ranks, workers
from torch_py_backend.errors import ConfigError, LoadError, PlatformError, WorkerError
from torch_py_backend.loaders import Loaded

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder of the test's own: instances of others meet elsewhere."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def load(folder: Path, **options: Any) -> Loaded:
    config = build.config(folder, tensor_parallel=2, **options)
    return ranks.load(config, artifacts.find(config))


def nothing_remains() -> None:
    assert parallel.workers(os.getpid()) == []
    assert not dist.is_initialized()
    assert not list(Path(tempfile.gettempdir()).glob("torch-py-backend-*/servers/*"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        pytest.param(
            102.0,
            "(answered for 2 seconds after|than the first process,) ValueError: one refuses this",
            id="the first fails alone",
        ),
        # Torch's own error, of a connection that is closed, is of the same class.
        pytest.param(103.0, "after RuntimeError: one cannot", id="a worker fails alone"),
        pytest.param(104.0, "worker 1 has ended with signal SIGKILL", id="a worker dies"),
    ],
)
def test_a_rank_goes_its_own_way(
    value: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends with an error after which this process is of no use, as do all that follow."""
    monkeypatch.setattr(workers, "GRACE_S", 2.0)
    parallel.write(tmp_path / "1")
    loaded = load(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(loaded.leave)
        for one in (value, 1.0):
            with pytest.raises(WorkerError, match=says) as raised, torch.inference_mode():
                loaded.module(torch.full((1, 4), one))
            assert faults.is_sticky(raised.value)
    nothing_remains()


class Unknown:
    """Of a module that workers do not find."""


def test_what_a_worker_cannot_read(tmp_path: Path) -> None:
    """It ends at once, and with it the call in which the first would wait for it."""
    parallel.write(tmp_path / "1")
    loaded = load(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(loaded.leave)
        with pytest.raises(WorkerError, match="worker 1 came to another end, ModuleNotFoundError"):
            loaded.module(torch.ones(1, 4), Unknown())
    nothing_remains()


def _source(change: Callable[[str], str]) -> str:
    changed = change(parallel.SOURCE)
    assert changed != parallel.SOURCE
    return changed


_WORKER = "from pathlib import Path\nif 'workers.attend' in Path('/proc/self/cmdline').read_text():"
_OWN_GROUP = "\ndist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
_DIES = "dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        pytest.param(
            lambda text: text.replace("def tensor_parallel_plan", "def plan"),
            ConfigError,
            "Wide has no tensor_parallel_plan",
            id="no plan",
        ),
        pytest.param(
            lambda text: text.replace('"down": R', '"": R'),
            ConfigError,
            "names '', and Wide has no such module",
            id="the module itself",
        ),
        pytest.param(
            lambda text: text.replace(
                "return {", 'self.add_module("norm", nn.LayerNorm(4)); return {"norm": "rowwise", '
            ),
            ConfigError,
            "tensor_parallel_plan cannot be put into effect: NotImplementedError",
            id="a style for others",
        ),
        pytest.param(
            lambda text: text + f"\n{_WORKER}\n    raise ValueError('not here')\n",
            LoadError,
            r"model.py fails at line \d+: ValueError: not here",
            id="a worker cannot load it",
        ),
        pytest.param(
            lambda text: text + f"\n{_WORKER}\n    os._exit(3)\n",
            LoadError,
            "worker 1 has ended with exit code 3",
            id="a worker dies",
        ),
        pytest.param(
            lambda text: text + f"\n{_WORKER}\n    {_DIES}\n",
            WorkerError,
            "worker 1 has ended with signal SIGKILL",
            id="a worker dies while they meet",
        ),
        pytest.param(
            lambda text: text + _OWN_GROUP,
            LoadError,
            "the processes of TENSOR_PARALLEL cannot meet: ValueError: trying to initialize",
            id="a group of the model's own",
        ),
    ],
)
def test_what_does_not_load(
    source: Callable[[str], str], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    """It is refused with the reason, and no process remains."""
    parallel.write(tmp_path / "1")
    build.write(tmp_path, "model.py", _source(source))
    with pytest.raises((kind, WorkerError), match=says):
        load(tmp_path)
    nothing_remains()


def test_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a GPU of its own, where there are GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parallel.write(tmp_path / "1")
    with pytest.raises(PlatformError, match=r"TENSOR_PARALLEL is 2, and torch .* sees 1 GPUs"):
        load(tmp_path, kind="MODEL")


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    """Its own plan will do, and its answers are those of one process."""
    small = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    whole: Any = transformers.LlamaForCausalLM(small)
    whole.eval()
    whole.save_pretrained(tmp_path / "1")
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    loaded = load(tmp_path, model_factory="transformers:LlamaForCausalLM")
    with contextlib.ExitStack() as stack, torch.inference_mode():
        stack.callback(loaded.leave)
        made = loaded.module(input_ids=ids)["logits"]
        torch.testing.assert_close(made, whole(input_ids=ids)["logits"])
    nothing_remains()
