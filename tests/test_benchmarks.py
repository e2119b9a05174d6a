"""The comparisons in `benchmarks/`: their models, servers, measurements and report."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from benchmarks import (
    contenders,
    execute,
    first_answer,
    gauges,
    repositories,
    stubs,
)
from benchmarks.clients import Endpoint
from benchmarks.contenders import PEERS
from benchmarks.models import MAX_BATCH_SIZE, MODELS, Model, Parameter
from benchmarks.peers import wire
from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import model_config, pbtxt, threads
from torch_py_backend.engine import load
from torch_py_backend.errors import ToolError

_PEERS = Path(contenders.__file__).parent / "peers"


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """A model of the comparison."""
    return str(request.param)


def test_models_are_the_same_everywhere(name: str) -> None:
    """Weights, example and answer do not depend on torch's own seed, and do not change it."""
    model = MODELS[name]
    torch.manual_seed(1)
    first, example, expected = model.build(), model.example(), model.expected()
    torch.manual_seed(2)
    following = torch.rand(2)
    torch.manual_seed(2)
    second = model.build()
    assert torch.equal(torch.rand(2), following)
    assert first.state_dict().keys() == second.state_dict().keys()
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key
    assert all(map(torch.equal, example, model.example()))
    assert torch.equal(expected, model.expected())
    # An answer that ignores its input would pass every check of a server.
    assert not torch.allclose(expected, expected[0].expand_as(expected))
    # The types and dims that every server is configured with.
    for parameter, tensor in zip(model.inputs, example, strict=True):
        assert tuple(tensor.shape) == parameter.dims
        assert tensor.numpy().dtype == wire.NUMPY_TYPES[parameter.dtype]
    assert tuple(expected.shape) == model.output.dims


@pytest.mark.usefixtures("process")
def test_repository_loads_and_equals_eager(name: str, tmp_path: Path) -> None:
    """Our repository is complete, loads without a server, and answers a batch as eager PyTorch."""
    repositories.write(name, tmp_path)
    document = pbtxt.read(tmp_path / name)
    assert not completion.is_incomplete(document)
    assert document["max_batch_size"] == MAX_BATCH_SIZE
    assert "dynamic_batching" in document
    settings = model_config.parse(pbtxt.arguments(tmp_path / name, "1", document))
    engine = load.build(settings, threads.Threads(1, 1))
    model = MODELS[name]
    named = zip(model.inputs, model.example(), strict=True)
    item: Any = {spec.name: tensor[None] for spec, tensor in named}
    for outcome in engine.run([item, item]):
        assert not isinstance(outcome, Exception)
        torch.testing.assert_close(
            torch.as_tensor(outcome[model.output.name][0]),
            model.expected(),
            rtol=model.tolerance,
            atol=model.tolerance,
        )


@pytest.mark.parametrize("name", ["add", "transformer"])
def test_others_in_the_server_have_the_same_config(name: str, tmp_path: Path) -> None:
    """The floor and the model written by hand differ from ours in nothing that clients see."""
    repositories.write(name, tmp_path)
    floor = repositories.write_floor(name, tmp_path)
    plain = repositories.write_plain(name, tmp_path)
    transfer = repositories.write_transfer(name, tmp_path)
    ours = pbtxt.read(tmp_path / name)
    for other in (floor, transfer, plain):
        theirs = pbtxt.read(tmp_path / other)
        assert theirs["backend"] == "python"
        for key in ("input", "output", "max_batch_size", "dynamic_batching", "instance_group"):
            assert ours[key] == theirs[key], key
    answer = np.load(tmp_path / floor / "1" / "answer.npy")
    assert np.array_equal(answer[0], MODELS[name].expected().numpy())


_GAUGED = [
    (base, place)
    for base, count in (("add", 8), ("lstm", 2))
    for place in range(count)
    if (base, place) != ("add", 1)  # the backend by hand
]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("base", "place"), _GAUGED)
def test_gauged_models(base: str, place: int, tmp_path: Path) -> None:
    """The models whose execute() is measured load, and their answers are the listed ones."""
    import fake_triton

    case = gauges.cases(base)[place]
    case.write(tmp_path / "gauged", "pytorch_py", stubs.ROOT)
    arguments = fake_triton.arguments(tmp_path / "gauged")
    model = TritonPythonModel()
    model.initialize(arguments)
    document = json.loads(arguments["model_config"])
    for step, answers in enumerate(case.answers):
        turns = [fake_triton.Turn(place, starts=step == 0) for place in range(1, gauges.MOST + 1)]
        sent = zip(case.requests, turns, strict=True)
        requests = [fake_triton.request(one, document, turn=turn) for one, turn in sent]
        for response, answer in zip(model.execute(requests), answers, strict=True):
            tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            assert tensors.keys() == answer.keys()
            for name, array in answer.items():
                execute.compare(name, tensors[name], array)


_BASE = """
class TritonPythonModel:
    def initialize(self, args):
        self.double = lambda value: 2 * value

    def execute(self, requests):
        return [self.double(request) for request in requests]
"""


@pytest.mark.parametrize("gauge", ["time", "calls"])
def test_gauge(gauge: str, tmp_path: Path) -> None:
    """Each call of execute() is written down with its requests, and its time or its calls."""
    (tmp_path / "base.py").write_text(_BASE)
    (tmp_path / "model.py").write_text(stubs.GAUGE.read_text())
    code = "import model; one = model.TritonPythonModel(); one.initialize({'model_name': 'net'});"
    code += "assert [one.execute([1] * count) for count in (3, 1)] == [[2] * 3, [2]];"
    code += "one.finalize()"
    variables = os.environ | {"GAUGE": gauge, "GAUGE_FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, check=True)
    (first, three, spent), (last, one, _) = json.loads((tmp_path / "net.json").read_text())
    assert (three, one) == (3, 1)
    assert first < last
    if gauge == "time":
        assert spent > 0
    else:  # execute() and three others; a list comprehension is none
        assert spent == ["base.py"] * 4


@pytest.mark.server
def test_execute(capsys: pytest.CaptureFixture[str]) -> None:
    """Two versions of the backend take turns in stubs, with each number of requests."""
    words = ["--models", "lstm", "--against", str(stubs.ROOT), "--turns", "2", "--bursts", "9"]
    execute.main(words)
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    features = itertools.product(("plain", "sequence"), execute.SIZES)
    assert [row[:3] for row in rows] == [["lstm", name, str(size)] for name, size in features]
    for row in rows:
        _, _, _, spent, against_plain, _, against_other = row
        assert float(spent.split()[0]) > 0
        assert float(against_other.split()[0]) > 0
        assert (against_plain == "") == (row[1] == "plain")


@pytest.mark.parametrize(("name", "rows"), [("add", 1), ("mlp", 3), ("transformer", 2)])
def test_wire_answers_bodies(name: str, rows: int) -> None:
    """The peers over HTTP answer as eager PyTorch does, in any batch."""
    model = MODELS[name]
    answers = wire.Forward(name)([wire.body(model)] * rows)
    assert len(answers) == rows
    for content in answers:
        np.testing.assert_allclose(
            wire.answer(model, content),
            model.expected().numpy(),
            rtol=model.tolerance,
            atol=model.tolerance,
        )


def test_wire_keeps_inputs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's inputs are taken from its own body, by their types."""

    class Pick(torch.nn.Module):
        def forward(self, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return values.gather(1, index)

    inputs = (Parameter("values", "FP32", (2,)), Parameter("index", "INT64", (1,)))
    pick = Model(Pick, inputs, Parameter("picked", "FP32", (1,)), 0.0, "")
    monkeypatch.setitem(MODELS, "pick", pick)
    bodies = [
        np.array([1, 2], np.float32).tobytes() + np.array([1], np.int64).tobytes(),
        np.array([3, 4], np.float32).tobytes() + np.array([0], np.int64).tobytes(),
    ]
    answers = [wire.answer(pick, content).item() for content in wire.Forward("pick")(bodies)]
    assert answers == [2.0, 3.0]


def test_peers() -> None:
    """A peer has a script that parses, and requirements that pin what it is; no other file has."""
    for peer, facts in PEERS.items():
        script = (_PEERS / f"{peer}.py").read_text()
        assert ast.get_docstring(ast.parse(script))
        pinned = (_PEERS / f"requirements-{peer}.txt").read_text()
        assert f"{facts.package}==" in pinned.replace("[serve]", "")
    files = {path.stem.removeprefix("requirements-") for path in _PEERS.glob("requirements-*.txt")}
    assert files == set(PEERS)


@contextlib.asynccontextmanager
async def _http_server(answer: bytes, status: int = 200) -> AsyncIterator[str]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=answer, status=status)

    application = web.Application()
    application.router.add_post("/predict", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def _check(answer: bytes, protocol: str = "bytes") -> None:
    async def run() -> None:
        async with _http_server(answer) as host:
            endpoint = Endpoint("add", protocol, host, "predict")
            await asyncio.to_thread(contenders.check, endpoint)

    asyncio.run(run())


def test_check_of_an_answer() -> None:
    """A right answer passes in each form in which a peer may give it; a wrong one does not."""
    expected = MODELS["add"].expected().numpy()
    _check(expected.tobytes())
    _check(json.dumps([expected.tolist()]).encode(), "json")
    for value in (0, np.nan):
        with pytest.raises(ToolError, match="as eager PyTorch says"):
            _check(np.full(16, value, np.float32).tobytes())


# --- the first answer ------------------------------------------------------------------------


def test_lines_of_the_first_answer() -> None:
    """Each program is valid Python, and ours have the fewest lines."""
    for start, (ours, *others) in first_answer.WAYS.items():
        for way in (ours, *others):
            for name in way.files:
                ast.parse(first_answer.program(start, name))
        lines = [first_answer.lines(start, way) for way in others]
        assert all(first_answer.lines(start, ours) < count for count in lines)
    for way in first_answer.WAYS["torchscript"]:
        texts = [first_answer.program("torchscript", name) for name in way.files]
        assert "net.pt" in " ".join([way.before, *texts])
        assert "import net\n" not in "".join(texts)


@pytest.mark.parametrize(
    "name", ["execute", "first_answer", "recovery", "sequences", "serving", "sharing"]
)
def test_help(name: str) -> None:
    """Each command says what it measures."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=stubs.ROOT, capture_output=True, text=True, check=True)
    assert "--" in done.stdout
