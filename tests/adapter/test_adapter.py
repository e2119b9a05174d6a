"""The adapter: requests, responses, and checks before READY."""

from __future__ import annotations

import dataclasses
import importlib.util
import locale
import logging
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import fake_triton
import instances
import models
import numpy as np
import pytest
import scenarios
import torch
from instances import logged, request

from torch_py_backend import adapter
from torch_py_backend.adapter import TritonPythonModel, logs, messages
from torch_py_backend.processes import instance_status

pytestmark = pytest.mark.usefixtures("process")


def test_numpy_that_garbles_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_triton.Tensor, "as_numpy", lambda self: np.zeros(4, np.float32))
    with pytest.raises(fake_triton.TritonModelException, match=r"garbles tensors.*numpy<2"):
        instances.load(tmp_path, instances.named("function"))


@pytest.mark.parametrize("change", ["write", "truncate", "rename"])
def test_weights_that_are_written_in_place(change: str, tmp_path: Path) -> None:
    """Requests get 503 with the file's name; a file that is replaced by renaming is no matter."""
    model = instances.load(tmp_path, instances.named("module_pt"))
    (path,) = tmp_path.glob("*/1/model.pt")
    if change == "rename":
        shutil.copyfile(path, path.with_name("new"))
        path.with_name("new").replace(path)
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 1 if change == "truncate" else None)
            file.seek(0, os.SEEK_END)
            file.write(b"\0")
    model._engine._looks_at = 0.0
    for _ in range(2):
        (response,) = model.execute([request(1)])
        error = response.error()
        assert (error is None) == (change == "rename")
        if error is not None:
            assert error.code() == fake_triton.TritonError.UNAVAILABLE
            assert "model.pt was written in place" in error.message()
    assert len(logged()) == (change != "rename")
    model.finalize()


def test_python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the Python of Triton's stub and the command that installs what it lacks."""
    find = importlib.util.find_spec
    hide = lambda name: None if name == "torch" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    python = re.escape(sys.executable)
    with pytest.raises(fake_triton.TritonModelException, match=f"{python} -m pip install torch"):
        instances.load(tmp_path, instances.named("function"))


def test_load_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervised instance reports what it loaded and each warning; the end removes the file."""
    status = tmp_path / "status"
    status.mkdir()
    monkeypatch.setenv(instance_status.VARIABLE, str(status))
    config = scenarios.x_to_y(NUM_THREADS="1", NUM_THREAD="1")
    model = instances.load(
        tmp_path, dataclasses.replace(instances.named("function"), config=config)
    )
    (path,) = instance_status.files(status)
    assert path.stem == str(os.getpid())
    reader = instance_status.Reader(path)
    assert reader.identity.model == "function"
    report = reader.report()
    assert [len(entry.pop("data")) for entry in report["request"]] == [4]
    assert report == {
        "artifact": "model.py: Python source and weights",
        "device": "cpu",
        "threads": [1, torch.get_num_interop_threads()],
        "weights": "0.0 MB of 0.0 MB shared by the instances",
        "options": {"NUM_THREADS": 1},
        "warnings": ["the parameter NUM_THREAD is unknown and ignored. Did you mean NUM_THREADS?"],
        "request": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}],
    }
    model.finalize()
    assert list(status.iterdir()) == []


def test_the_locale_is_utf8(tmp_path: Path) -> None:
    """Triton's stub runs in the C locale, but a model may read UTF-8 files."""
    locale.setlocale(locale.LC_ALL, "C")
    instances.load(tmp_path, instances.named("function"))
    assert locale.nl_langinfo(locale.CODESET) == "UTF-8"


def test_logs_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message that Triton cannot receive any more goes to standard error."""
    logs.install("net")
    monkeypatch.setattr(os, "getppid", lambda: -1)
    logging.getLogger("torch_py_backend").warning("late")
    assert capsys.readouterr().err == "model 'net': late\n"
    assert not fake_triton.Logger.lines


@pytest.mark.parametrize("name", ["other.pt2", "model.pt", "net"])
@pytest.mark.parametrize(
    ("member", "asked"),
    [("net/data/aotinductor/model/net.wrapper.so", False), ("net/models/model.json", True)],
)
def test_readiness_of_packages(
    name: str, member: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer servers do not ask models with AOTInductor packages, which hold the GIL in a call."""
    version = tmp_path / "1"
    (version / "folder").mkdir(parents=True)
    monkeypatch.setattr(fake_triton, "_model_dir", str(version))
    with zipfile.ZipFile(version / name, "w") as archive:
        archive.writestr(member, "")
    assert hasattr(TritonPythonModel(), "is_ready") is asked
    (tmp_path / "config.pbtxt").write_text(scenarios.option("OPTIMIZE", "aoti"))
    assert not hasattr(TritonPythonModel(), "is_ready")


def test_bfloat16_inputs_are_copied() -> None:
    """Triton's memory is invalid after execute()."""
    memory = torch.ones(4, dtype=torch.bfloat16)
    value = messages.read_tensor(fake_triton.Tensor.from_dlpack("x", memory))
    memory.fill_(7)
    assert value.tolist() == [1.0] * 4


def test_threads_are_reserved_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads its environment variables once, when torch is imported."""
    reserved = []

    class Watch:
        """Looks when the first module that imports torch is imported."""

        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch_py_backend.adapter.answering":
                reserved.extend([os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]])

    monkeypatch.delitem(sys.modules, "torch_py_backend.adapter.answering")
    monkeypatch.delattr(adapter, "answering")
    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    config = scenarios.x_to_y(NUM_THREADS="3", NUM_INTEROP_THREADS="5")
    negate = scenarios.Scenario("negate", scenarios.python(models.Negate), config)
    instances.load(tmp_path, negate)
    assert reserved == ["3", "3"]
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (3, 5)
