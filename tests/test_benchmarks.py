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
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from benchmarks import (
    clients,
    contenders,
    execute,
    first_answer,
    gauges,
    harness,
    perf_analyzer,
    report,
    repositories,
    serving,
    stubs,
    tables,
)
from benchmarks.clients import Endpoint
from benchmarks.contenders import PEERS
from benchmarks.harness import Pair
from benchmarks.load_generator import Point, Result, ServerWork
from benchmarks.models import MAX_BATCH_SIZE, MODELS, Model, Parameter
from benchmarks.peers import wire
from benchmarks.report import Report, Row
from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import model_config, pbtxt, threads
from torch_py_backend.errors import ServerError, ToolError
from torch_py_backend.server import triton_installation
from torch_py_backend.startup import builder

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
    engine = builder.build(settings, threads.Threads(1, 1))
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


async def _in_turn(body: bytes, status: int = 200) -> list[Pair]:
    async with _http_server(body, status) as host:
        endpoint = Endpoint("add", "bytes", host, "predict")
        async with clients.connected(endpoint) as ours, clients.connected(endpoint) as other:
            turns = [partial(harness.turn, one, 2, 0.3) for one in (ours, other)]
            return [pair async for pair in harness.in_turn(turns, 3)]


def test_pairs_are_counted() -> None:
    """A comparison has the given number of pairs, each with responses of both servers."""
    pairs = asyncio.run(_in_turn(b"an answer"))
    assert len(pairs) == 3
    assert all(ratio > 0 for ratio in harness.ratios(pairs))
    assert {harness.rows_in_a_call(point) for pair in pairs for point in pair} == {None}


def test_failed_requests_are_no_throughput() -> None:
    """A server that refuses requests is an error with its message."""
    with pytest.raises(ToolError, match=r"503.*too much"):
        asyncio.run(_in_turn(b"too much", status=503))


# Answers as perf_analyzer does: two windows of a load, or a complaint.
_ANALYZER = """\
#!{python}
import json, sys
if "--version" in sys.argv:
    print("Perf Analyzer Version 2.41.1 (commit b752bdd)", file=sys.stderr)
    sys.exit()
options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
if options["-m"] != "add":
    print("error: unknown model")
    sys.exit(99)
tensor = json.load(open(options["--input-data"]))["data"][0]["left"]
assert len(tensor["content"]) == 16 and tensor["shape"] == [16]
requests = [{{"timestamp": 10**9 * n, "response_timestamps": [10**9 * (n + 1)]}} for n in range(4)]
with open(options["--profile-export-file"], "w") as file:
    json.dump({{"experiments": [{{"requests": requests}}]}}, file)
"""


def test_perf_analyzer(tmp_path: Path) -> None:
    """Its list of requests becomes a turn; its last line is the reason of a failure."""
    program = tmp_path / "perf_analyzer"
    program.write_text(_ANALYZER.format(python=sys.executable))
    program.chmod(0o755)
    readings = iter([0, 4])

    async def statistics() -> Any:
        stage = {"count": next(readings), "ns": 0}
        return {"model_stats": [{"inference_stats": {"success": stage}}]}

    async def send() -> None:
        raise AssertionError("perf_analyzer sends the requests")

    async def turn(served: str) -> Point:
        endpoint = Endpoint("add", "grpc", "127.0.0.1:1", served, counts=True)
        return await perf_analyzer.turn(program, endpoint, (send, statistics), 1, 1.0)

    assert perf_analyzer.version(program) == "2.41.1"
    point = asyncio.run(turn("add"))
    assert point.result.throughput == 1
    assert point.result.percentiles(50) == [1.0]
    assert point.server is not None
    assert point.server.requests == 4
    readings = iter([0])
    with pytest.raises(ToolError, match="exit code 99: error: unknown model"):
        asyncio.run(turn("mlp"))


def test_triton_runtime(tmp_path: Path) -> None:
    """Triton's Python runtime gets the model's class alone, with its weights."""
    runtime = tmp_path / "model.py"
    runtime.write_text("class TritonPythonModel: ...")
    served = repositories.write_runtime("mlp", tmp_path, runtime)
    version = tmp_path / served / "1"
    code = "import network; print([name for name, x in vars(network).items() if type(x) is type])"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=version, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "['Mlp']"
    assert (version / "runtime.py").read_text() == runtime.read_text()
    weights = torch.load(version / "network.pt")
    assert torch.equal(
        weights["layers.0.bias"], MODELS["mlp"].build().state_dict()["layers.0.bias"]
    )


@pytest.mark.server
def test_libtorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tritonserver of its own serves TorchScript by the backend `pytorch` of a folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    triton_installation.populate_backends(triton_installation.find(), tmp_path)
    (tmp_path / "pytorch_py").rename(tmp_path / "pytorch")  # in place of the C++ backend
    words = ["--models", "add,transformer", "--against", "libtorch", "--concurrency", "1"]
    words += ["--seconds", "0.1", "--pairs", "1", "--libtorch", str(tmp_path)]
    assert serving.main(words) == 0
    printed = capsys.readouterr().out
    for model in ("add", "transformer"):
        assert f"|{model}|Triton's LibTorch backend|1|" in printed


# --- the first answer ------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("start", first_answer.WAYS)
def test_first_answer(start: str) -> None:
    """Our programs give the right answer."""
    assert first_answer.seconds(start, first_answer.WAYS[start][0]) > 0


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


def _point(throughput: float, p50: float, p99: float, busy: float, batch: int | None) -> Point:
    latencies = np.sort(np.concatenate([np.full(51, p50), np.full(48, p99), [p99, p99]]))
    server = None if batch is None else ServerWork(0, 0, {}, {batch: 1})
    result = Result(len(latencies) / throughput, latencies, np.empty(0), 0, "", busy)
    return Point(1, result, server)


def _row(model: str, against: str, concurrency: int, ratios: list[float], p99: float) -> Row:
    other = _point(50.0, min(0.004, p99), p99, 0.25, None)
    pairs = tuple((_point(50.0 * ratio, 0.001, 0.002, 0.5, 4), other) for ratio in ratios)
    return Row(model, against, concurrency, pairs)


def test_spread() -> None:
    """A spread is the median with the extremes."""
    assert tables.spread([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0..3.0)"


def test_markdown() -> None:
    """The report has the facts, medians, spreads, versions and reasons."""
    document = report.markdown(
        Report(
            command="python -m benchmarks.serving",
            facts={"machine": "a box"},
            versions={"litserve": "0.2"},
            rows=[_row("mlp", "litserve", 32, [2.0, 4.0, 3.0], p99=0.008)],
            missing={("mlp", "litserve"): "it ended\nwith a | in its log"},
        )
    )
    assert "|machine|a box|" in document
    assert (
        "|mlp|LitServe|32|**3.00** (2.00..4.00)|150|50|1.00/2.00|4.00/8.00|4.0/?|0.50/0.25|"
    ) in document
    assert "|mlp|litserve|it ended<br>with a \\| in its log|" in document
    assert f"|LitServe|0.2|{PEERS['litserve'].words}|" in document
    assert "interrupted" not in document
    assert "interrupted" in report.markdown(Report("", {}, interrupted=True))


@pytest.mark.parametrize(
    ("row", "met"),
    [
        pytest.param(_row("add", "floor", 32, [0.95], 1.0), "yes", id="floor"),
        pytest.param(_row("add", "floor", 32, [0.94], 1.0), "**no**", id="below the floor"),
        pytest.param(_row("mlp", "runtime", 8, [1.2], 1.0), "**no**", id="Triton's runtime"),
        pytest.param(_row("mlp", "litserve", 32, [2.0], 0.002), "yes", id="peer"),
        pytest.param(_row("mlp", "litserve", 32, [1.9], 0.002), "**no**", id="too slow"),
        pytest.param(_row("mlp", "litserve", 32, [9.0], 0.001), "**no**", id="worse p99"),
        pytest.param(_row("mlp", "litserve", 8, [9.0], 0.002), None, id="another concurrency"),
        pytest.param(_row("mlp", "floor", 32, [0.1], 0.002), None, id="another model"),
    ],
)
def test_targets(row: Row, met: str | None) -> None:
    """A target is judged by the figures; other rows have no target."""
    document = report.markdown(Report("", {}, rows=[row]))
    assert ("## Targets" in document) == (met is not None)
    if met is not None:
        assert f"|{met}|" in document.partition("## Targets")[2]


def test_reasons() -> None:
    """A missed target has the figures that explain it; a kept one has no reason."""
    rows = [
        _row("add", "floor", 1, [0.8], 1.0),
        _row("add", "transfer", 1, [0.9], 1.0),
        _row("add", "plain", 8, [1.0], 1.0),
        _row("mlp", "litserve", 32, [1.9], 0.002),
        _row("add", "plain", 32, [0.9, 0.8, 1.1], 1.0),
        _row("transformer", "plain", 32, [0.9], 1.0),
    ]
    document = report.markdown(Report("", {}, rows=rows))
    lines = document.partition("## Targets")[2].partition("\n## ")[0].splitlines()
    floor, kept, peer, noisy, slow = [line.split("|") for line in lines if line.startswith("|")][2:]
    assert floor[1] == "add, no-op floor at 1: at least 0.85"
    assert floor[3:5] == ["**no**", "reads and writes only: 0.89"]
    assert kept[3:5] == ["yes", ""]
    assert peer[4] == "the client takes 0.50 and 0.25 of a core"
    assert noisy[3:5] == ["**no**", "within the spread"]
    assert slow[3:5] == ["**no**", ""]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--models", "bert"], "'bert' is not known; expected some of add"),
        (["--against", "floor,nginx"], "'nginx' is not known; expected some of floor"),
        (["--concurrency", "1,none"], "'none' is no whole number above 0"),
        (["--seconds", "nan"], "'nan' is no number above 0"),
        (["--seconds", "-1"], "'-1' is no number above 0"),
        (["--output", "/nowhere/benchmarks.md"], "is no file that can be written"),
        (["--runtime", "/nowhere/model.py"], "'/nowhere/model.py' is no file"),
        (["--against", "runtime"], "--against runtime needs --runtime model.py"),
        (["--against", "libtorch"], "--against libtorch needs --libtorch FOLDER"),
        (["--libtorch", "/nowhere"], "'/nowhere' is no folder"),
        (["--client", "no-perf-analyzer"], "'no-perf-analyzer' is no program"),
        (["--client", "true"], "true does not print its version"),
    ],
)
def test_bad_settings(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option is refused before anything is started, with the accepted values."""
    with pytest.raises(SystemExit) as end:
        serving.main(words)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@contextlib.contextmanager
def _no_server(_model: str, _settings: serving.Settings) -> Iterator[serving.Ours]:
    there = Endpoint("add", "grpc", "127.0.0.1:1", "add")
    yield serving.Ours(there, {"floor": there, "plain": there, "http": there}, "2.0")


def test_what_fails_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contender that fails is listed with its error; a run without any row is an error."""

    def fail(model: str, against: str, *_: object) -> None:
        raise ServerError(f"{against} did not want {model}.")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(serving, "_serving", _no_server)
    monkeypatch.setattr(serving, "_against", fail)
    assert serving.main(["--models", "add", "--against", "floor,litserve"]) == 1
    printed = capsys.readouterr().out
    assert "|add|floor|floor did not want add.|" in printed
    assert "|add|litserve|litserve did not want add.|" in printed


def test_interrupt_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C during the second contender keeps the first one's row."""

    def once(
        model: str, against: str, ours: object, settings: object, results: Report, advance: object
    ) -> None:
        if results.rows:
            raise KeyboardInterrupt
        results.rows.append(_row(model, against, 1, [1.0], 0.002))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(serving, "_serving", _no_server)
    monkeypatch.setattr(serving, "_against", once)
    output = tmp_path / "benchmarks.md"
    assert serving.main(["--against", "floor,litserve", "--output", str(output)]) == 0
    document = output.read_text()
    assert "|add|no-op floor|1|" in document
    assert "interrupted" in document
