"""New weights are swapped in between batches, or refused; files are guarded."""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine import weight_watcher
from torch_py_backend.engine.engine import Engine
from torch_py_backend.engine.weight_watcher import WeightWatcher
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import mapped_files
from torch_py_backend.startup import builder
from torch_py_backend.weights import sharing_report

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("nothing", torch.zeros(4))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x):
        return self.linear(x) + self.nothing
"""
X = torch.arange(8.0).reshape(2, 4)


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, value)
        nn.init.constant_(self.linear.bias, value)
        self.nothing: Tensor
        self.register_buffer("nothing", torch.zeros(4))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.nothing
        return result


class Doubled(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = 2 * self.linear(x)
        return result


Writer = Callable[[Path, Net], None]


def _state_dict(path: Path, net: Net) -> None:
    torch.save(net.state_dict(), path)


def _safetensors(path: Path, net: Net) -> None:
    safetensors.torch.save_file(net.state_dict(), path)


def _scripted(path: Path, net: Net) -> None:
    torch.jit.script(net.eval()).save(path)


def _exported(path: Path, net: Net) -> None:
    dynamic = ({0: torch.export.Dim("rows", min=1, max=8)},)
    torch.export.save(torch.export.export(net.eval(), (X,), dynamic_shapes=dynamic), path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_watcher, "_POLL_S", 0.02)


Watch = Callable[[Engine], WeightWatcher]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Starts watchers, which know the digest of the first weights, and closes them."""
    with contextlib.ExitStack() as started:

        def start(engine: Engine) -> WeightWatcher:
            watcher = WeightWatcher(engine)
            started.callback(watcher.close)
            until(lambda: watcher.digest)
            return watcher

        yield start


def replace(path: Path, write: Writer, value: float) -> None:
    """Replace a file in one step."""
    scratch = path.with_name(f"next{path.suffix}")
    write(scratch, Net(value))
    scratch.replace(path)


def served(
    folder: Path, name: str = "model.pt", write: Writer = _state_dict, **options: Any
) -> Engine:
    """An engine of Net(1) as written to a file; of the source in the folder, if there is one."""
    if write in (_state_dict, _safetensors) and not (folder / "1" / "model.py").exists():
        build.write(folder, "model.py", SOURCE)
    (folder / "1").mkdir(parents=True, exist_ok=True)
    write(folder / "1" / name, Net(1))
    return builder.build(build.config(folder, **{"watch_weights": True} | options), Threads(1, 1))


def answer(engine: Engine) -> Tensor:
    (outcome,) = engine.run([{"x": X}])
    assert isinstance(outcome, dict), outcome
    result = outcome["y"]
    assert isinstance(result, Tensor)
    return result


def until(happened: Callable[[], Any]) -> None:
    """Wait for another thread; fail after four minutes."""
    end = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "refused, and the old ones stay" in text]


def test_a_file_that_is_replaced_during_the_load(tmp_path: Path, watch: Watch) -> None:
    """The new weights are swapped in, and the digest is never that of other weights."""
    engine = served(tmp_path)
    replace(tmp_path / "1" / "model.pt", _state_dict, 2)
    watcher = watch(engine)
    assert torch.equal(answer(engine), Net(2)(X))
    path = tmp_path / "1" / "model.pt"
    assert watcher.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_an_archive_that_is_replaced_during_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused: nothing shows any more whether its code is that of the served model."""
    engine = served(tmp_path, write=_scripted)
    script = torch.jit.script(Doubled(2).eval())
    script.save(tmp_path / "1" / "next")
    (tmp_path / "1" / "next").replace(tmp_path / "1" / "model.pt")
    watcher = WeightWatcher(engine)
    try:
        until(lambda: refusals(caplog))
    finally:
        watcher.close()
    assert watcher.digest == ""
    assert torch.equal(answer(engine), Net(1)(X))


@pytest.mark.parametrize(
    ("name", "write", "optimize"),
    [
        ("model.pt", _state_dict, ()),
        ("model.pt", _state_dict, ("channels_last",)),
        ("model.safetensors", _safetensors, ()),
        ("model.pt", _scripted, ("channels_last",)),
        ("model.pt2", _exported, ()),
    ],
)
def test_a_new_file_is_swapped_in(
    name: str, write: Writer, optimize: tuple[str, ...], tmp_path: Path, watch: Watch
) -> None:
    """Answers use the new weights, the weights are in the new file, and the old one is closed."""
    path = tmp_path / "1" / name
    engine = served(tmp_path, name, write, optimize=optimize)
    watcher = watch(engine)
    assert torch.equal(answer(engine), Net(1)(X))
    for value in (2.0, 3.0):
        replace(path, write, value)
        until(lambda: watcher.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:12])
        assert torch.equal(answer(engine), Net(value)(X))
        # The swap is not a side effect of the model.
        assert not engine.side_effects.writes_buffers()
        sharing = sharing_report.mapped(engine.loaded)
        assert sharing.shared == sharing.total
    until(lambda: f"{path} (deleted)" not in Path("/proc/self/maps").read_text())


def test_new_weights_are_converted(tmp_path: Path, watch: Watch) -> None:
    """OPTIMIZE converts new weights as it converted the first ones."""
    engine = served(tmp_path, optimize=("bf16",))
    watcher = watch(engine)
    before = watcher.digest
    replace(tmp_path / "1" / "model.pt", _state_dict, 2)
    until(lambda: watcher.digest != before)
    expected = Net(2).bfloat16()(X.bfloat16()).float()
    assert torch.equal(answer(engine), expected)


def test_a_compiled_model_takes_new_weights_without_compiling(
    tmp_path: Path, watch: Watch, dynamo: None
) -> None:
    """The compiled graph gets the weights as arguments of each call."""
    engine = served(tmp_path, torch_compile_optional_parameters={"backend": "aot_eager"})
    with engine.preparing():
        answer(engine)  # with copies of its inputs, which torch.compile tells from the inputs
        answer(engine)
    watcher = watch(engine)
    before = watcher.digest
    replace(tmp_path / "1" / "model.pt", _state_dict, 2)
    until(lambda: watcher.digest != before)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.allclose(answer(engine), Net(2)(X))


def test_no_batch_sees_old_and_new_weights(tmp_path: Path, watch: Watch) -> None:
    """While files are replaced, each answer uses the weights of one file."""
    engine = served(tmp_path, "model.safetensors", _safetensors)
    watch(engine)
    ended = threading.Event()
    answered: set[int] = set()

    def replace_often() -> None:
        for value in range(2, 12):
            replace(tmp_path / "1" / "model.safetensors", _safetensors, value)
            time.sleep(0.1)
            if value in (4, 8):  # however slow the machine is, some are taken in between
                until(lambda value=value: value in answered)  # type: ignore[misc]
        ended.set()

    expected = {value: Net(value)(X) for value in range(1, 12)}
    threading.Thread(target=replace_often).start()
    while not ended.is_set() or 11 not in answered:
        result = answer(engine)
        (value,) = [value for value, values in expected.items() if torch.equal(values, result)]
        answered.add(value)
    assert len(answered) > 2


def _other_shape(path: Path) -> None:
    torch.save(nn.Linear(5, 5).state_dict(), path)


def _half_written(path: Path) -> None:
    torch.save(Net(2).state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _pickle_with_code(path: Path) -> None:
    torch.save(Net(2), path)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (_other_shape, "missing"),
        (_half_written, "damaged zip"),
        (Path.touch, "empty"),
        (_pickle_with_code, "pickle of a whole module"),
    ],
)
def test_a_bad_file_is_refused_once_and_the_old_weights_stay(
    write: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has the reason, and a good file afterwards is swapped in."""
    engine = served(tmp_path)
    watcher = watch(engine)
    before, path = watcher.digest, tmp_path / "1" / "model.pt"
    scratch = tmp_path / "bad.pt"
    write(scratch)
    with caplog.at_level(logging.ERROR):
        scratch.replace(path)
        until(lambda: refusals(caplog))
        assert torch.equal(answer(engine), Net(1)(X))
        assert watcher.digest == before
        replace(path, _state_dict, 3)
        until(lambda: watcher.digest != before)
    assert torch.equal(answer(engine), Net(3)(X))
    (refusal,) = refusals(caplog)
    assert reason in refusal


REPLACES = (
    SOURCE[: SOURCE.index("    def forward")]
    + """
    def forward(self, x):
        result = self.linear(x) + self.nothing
        if bool((x == 0).all()):
            %s
        return result
"""
)


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        pytest.param("self.nothing = self.nothing + 0", "", id="in inference mode"),
        pytest.param("self.nothing = torch.zeros(2, 4)", "nothing float32 [4]", id="shape"),
        pytest.param(
            "self.nothing = torch.zeros(1).expand(4); self.kept = self.nothing[:2]",
            "single memory location",
            id="overlaps itself",
        ),
    ],
)
def test_a_buffer_that_forward_has_replaced(
    statement: str,
    refusal: str,
    tmp_path: Path,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """New weights are swapped in completely or not at all, and the watcher continues."""
    build.write(tmp_path, "model.py", REPLACES % statement)
    engine = served(tmp_path)
    watcher = watch(engine)
    before = watcher.digest
    engine.run([{"x": torch.zeros(1, 4)}])
    with caplog.at_level(logging.ERROR):
        replace(tmp_path / "1" / "model.pt", _state_dict, 2)
        until(lambda: refusals(caplog) or watcher.digest != before)
    assert [refusal in text for text in refusals(caplog)] == ([True] if refusal else [])
    assert torch.equal(_linear(engine), Net(1 if refusal else 2).linear(X))
    # A further poll finds the thread alive.
    replace(tmp_path / "1" / "model.pt", _state_dict, 3)
    until(lambda: len(refusals(caplog)) == 2 if refusal else torch.equal(answer(engine), Net(3)(X)))


def _linear(engine: Engine) -> Tensor:
    assert engine.loaded.owner is not None
    with torch.no_grad(), engine.lock:
        result: Tensor = engine.loaded.owner.get_submodule("linear")(X)
        return result


def test_an_answer_that_is_a_weight_stays_the_same(tmp_path: Path, watch: Watch) -> None:
    """New weights do not change an answer that has not been sent yet."""
    weight = "self.linear.weight[: x.shape[0]]"
    build.write(tmp_path, "model.py", SOURCE.replace("self.linear(x) + self.nothing", weight))
    engine = served(tmp_path)
    watcher = watch(engine)
    before, unsent = watcher.digest, answer(engine)
    replace(tmp_path / "1" / "model.pt", _state_dict, 2)
    until(lambda: watcher.digest != before)
    assert torch.equal(unsent, torch.ones(2, 4))
    assert torch.equal(answer(engine), torch.full((2, 4), 2.0))


@pytest.mark.parametrize(
    ("name", "write"), [("model.pt", _scripted), ("model.pt2", _exported)], ids=["script", "export"]
)
def test_an_archive_with_other_code_is_refused(
    name: str,
    write: Writer,
    tmp_path: Path,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An archive whose weights fit but whose program differs is refused."""

    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x) * 2
            return result

    engine = served(tmp_path, name, write)
    watch(engine)
    with caplog.at_level(logging.ERROR):
        write(tmp_path / f"other{name}", Other(2))
        (tmp_path / f"other{name}").replace(tmp_path / "1" / name)
        until(lambda: refusals(caplog))
    assert torch.equal(answer(engine), Net(1)(X))
    (refusal,) = refusals(caplog)
    assert "differs in more than its weights: " in refusal
    assert "Load the model again" in refusal


def test_a_file_written_in_place_is_read_when_complete(tmp_path: Path, watch: Watch) -> None:
    """Until the file is complete the old weights are used, copied before the write."""
    engine = served(tmp_path)
    watcher = watch(engine)
    before, path = watcher.digest, tmp_path / "1" / "model.pt"
    _state_dict(tmp_path / "new.pt", Net(2))
    content = (tmp_path / "new.pt").read_bytes()
    with path.open("wb") as file:
        file.write(content[:700])
        file.flush()
        os.fsync(file.fileno())
        assert torch.equal(answer(engine), Net(1)(X))
        file.write(content[700:])
    until(lambda: watcher.digest != before)
    assert torch.equal(answer(engine), Net(2)(X))


def test_without_the_option_files_are_guarded_and_not_watched(tmp_path: Path) -> None:
    """A new file waits for the next load, and a write in place has no effect."""
    engine = served(tmp_path, watch_weights=False)
    watcher = WeightWatcher(engine)
    (tmp_path / "1" / "model.pt").write_bytes(b"")
    assert torch.equal(answer(engine), Net(1)(X))
    assert watcher.digest == ""
    watcher.close()
    watcher.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "none"}, "no file of weights"),
        ({"optimize": ("freeze",)}, "freezing makes them"),
    ],
)
def test_a_model_whose_weights_cannot_be_replaced_is_not_loaded(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """WATCH_WEIGHTS is refused with the reason."""
    engine = served(tmp_path, "model.safetensors", _safetensors, **options)
    with pytest.raises(ConfigError, match=reason):
        WeightWatcher(engine)


def test_the_digest_of_shards_is_of_all_files(tmp_path: Path, watch: Watch) -> None:
    """A new shard changes the digest, and is swapped in like a single file."""
    build.write(tmp_path, "model.py", SOURCE)
    folder = tmp_path / "1"

    def write(value: float) -> None:
        for key, tensor in Net(value).state_dict().items():
            safetensors.torch.save_file({key: tensor}, folder / "next")
            (folder / "next").replace(folder / f"{key}.safetensors")

    write(1)
    names = {key: f"{key}.safetensors" for key in Net(1).state_dict()}
    build.write(tmp_path, "model.safetensors.index.json", json.dumps({"weight_map": names}))
    engine = builder.build(build.config(tmp_path, watch_weights=True), Threads(1, 1))
    watcher = watch(engine)
    before = watcher.digest
    write(2)
    until(lambda: watcher.digest != before and torch.equal(answer(engine), Net(2)(X)))
    assert len(watcher.digest) == 12
    assert len(discovery.find(engine.config).weight_files()) == 5
    assert mapped_files.measure(engine.loaded.weights).shared
