"""Record the outputs of all scenario models bit for bit, and compare another version with them.

    python tests/recordings.py record FILE [--checkout FOLDER] [NAME …]
    python tests/recordings.py compare FILE [--checkout FOLDER] [NAME …]

The tables of scenarios are this checkout's; `--checkout` names the version of the backend that
answers them, by default this one. So two versions are compared by

    python tests/recordings.py record old.pickle --checkout ../old
    python tests/recordings.py compare old.pickle

Requests are sent alone, together with others that the model answers, beside one that fails, and as
the batches of the table. Of an error only its code is recorded. Bits depend on the machine and on
the version of torch: record and compare on one machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "examples")]
# Each model runs in a fork of this process, which must have no threads.
torch.set_num_threads(1)

import fake_triton  # noqa: E402
import hooked  # noqa: E402
import kinds  # noqa: E402
import numpy as np  # noqa: E402
import scenarios  # noqa: E402
from scenarios import Call, Refused, Scenario  # noqa: E402

TABLE = {one.name: one for one in (*scenarios.TABLE, *kinds.TABLE, *hooked.TABLE)}
_LONGEST_S = 300
_FOREIGN_TURN = fake_triton.Turn(99_991, starts=True, ends=True)

# By the way in which requests are sent, for each batch the outcome of each request: the code of an
# error, or arrays by name.
Outcomes: TypeAlias = dict[str, list[list[Any]]]


def batches(scenario: Scenario, rows: int) -> dict[str, list[list[Call | None]]]:
    """Return what is sent at once, by the way in which it is sent.

    Args:
        scenario: the model and its requests; None is a request that cannot be read.
        rows: its max_batch_size.
    """
    good = [call for call in scenario.calls if not isinstance(call.expected, Refused)]
    together = list(_groups(good, rows)) if rows else []
    if len(good) < len(scenario.calls):
        failing = list(_groups(scenario.calls, rows)) if rows else []
    else:
        failing = [[*group[:1], None, *group[1:]] for group in together]
    return {
        "alone": [[call] for call in scenario.calls],
        "together": together,
        "beside a failure": failing,
        "batches": [list(batch) for batch in scenario.batches],
    }


def _groups(calls: Sequence[Call], rows: int) -> Iterator[list[Call | None]]:
    """Yield batches of at most so many rows; a batch has one request of a sequence."""
    group: list[Call] = []
    for call in calls:
        sizes = [len(next(iter(one.inputs.values()))) for one in (*group, call)]
        sequences = {one.turn.id for one in group if one.turn is not None}
        if group and (sum(sizes) > rows or (call.turn is not None and call.turn.id in sequences)):
            yield [*group]
            group = []
        group.append(call)
    if group:
        yield [*group]


class _Unreadable(fake_triton.Tensor):
    def as_numpy(self) -> Any:
        raise fake_triton.TritonModelException("the tensor cannot be read")

    to_dlpack = __dlpack__ = __dlpack_device__ = as_numpy  # type: ignore[assignment]


def record(names: Sequence[str], checkout: Path) -> dict[str, Outcomes]:
    """Return the outcomes of scenarios, each in a process of its own."""
    sys.path.insert(0, str(checkout / "src"))
    sys.modules["triton_python_backend_utils"] = fake_triton
    path = checkout / "backends" / "pytorch_py" / "model.py"
    spec = importlib.util.spec_from_file_location("backend_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    recorded = {}
    with tempfile.TemporaryDirectory(prefix="recordings-") as folder:
        for name in names:
            result = Path(folder, f"{name}.pickle")
            child = os.fork()
            if child == 0:
                signal.alarm(_LONGEST_S)  # a version may hang where this one does not
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what models print
                try:
                    # Only here: the backend takes the parent of the process for the server.
                    spec.loader.exec_module(module)
                    outcomes = _outcomes(TABLE[name], Path(folder), module.TritonPythonModel())
                    result.write_bytes(pickle.dumps(outcomes))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            ended: Outcomes = {"load": [["the process ended"]]}
            recorded[name] = pickle.loads(result.read_bytes()) if result.exists() else ended
            print(".", end="", flush=True)
    print()
    return recorded


def _outcomes(scenario: Scenario, folder: Path, model: Any) -> Outcomes:
    arguments = fake_triton.arguments(scenario.lay_out(folder))
    try:
        arguments = fake_triton.completed(model, arguments)
        model.initialize(arguments)
    except fake_triton.TritonModelException:
        return {"load": [["refused"]]}
    document = json.loads(arguments["model_config"])
    outcomes: Outcomes = {}
    for way, sent in batches(scenario, document["max_batch_size"]).items():
        outcomes[way] = []
        for calls in sent:
            responses = model.execute([_request(call, calls, document) for call in calls])
            outcomes[way].append([_outcome(response) for response in responses])
    model.finalize()
    return outcomes


def _request(call: Call | None, calls: Sequence[Call | None], document: dict[str, Any]) -> Any:
    like = call or next(one for one in calls if one is not None)
    turn = like.turn or fake_triton.Turn(0)
    if call is None and like.turn:
        turn = _FOREIGN_TURN
    request = fake_triton.request(like.inputs, document, "", turn, like.parameters)
    if call is None:
        for tensor in request.inputs():
            tensor.__class__ = _Unreadable
    return request


def _outcome(response: Any) -> Any:
    error = response.error()
    if error is not None:
        return f"error {error.code()}"
    return {tensor.name(): _array(tensor) for tensor in response.output_tensors()}


def _array(tensor: Any) -> Any:
    try:
        return tensor.as_numpy()
    except fake_triton.TritonModelException:  # BF16, which numpy does not have
        value = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
        return value.view(torch.int16).numpy()


def differences(old: dict[str, Outcomes], new: dict[str, Outcomes]) -> Iterator[str]:
    """Yield a line for each outcome that differs, and for each scenario that only one has."""
    for name in sorted({*old} ^ {*new}):
        yield f"{name}: only in the {'old' if name in old else 'new'} recording"
    for name in sorted({*old} & {*new}):
        for way in {**old[name], **new[name]}:
            sent = (old[name].get(way, []), new[name].get(way, []))
            for place, (before, after) in enumerate(itertools.zip_longest(*sent)):
                pairs = itertools.zip_longest(before or [], after or [])
                for number, (first, second) in enumerate(pairs):
                    if difference := _difference(first, second):
                        yield f"{name}, {way}, batch {place}, request {number}: {difference}"


def _difference(old: Any, new: Any) -> str:
    """Return what became of an outcome; empty if it is the same."""
    if not isinstance(old, dict) or not isinstance(new, dict) or old.keys() != new.keys():
        return "" if old == new else f"{old} became {new}"
    for name, before in old.items():
        after = new[name]
        if before.dtype != after.dtype or before.shape != after.shape:
            return f"{name} {before.dtype} {before.shape} became {after.dtype} {after.shape}"
        same = before.tolist() == after.tolist()
        if before.dtype != np.object_:
            same = before.tobytes() == after.tobytes()
        if not same:
            return f"{name} {before} became {after}"
    return ""


def main() -> int:
    """Record, or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios; all by default")
    parser.add_argument("--checkout", type=Path, default=_ROOT)
    settings = parser.parse_intermixed_args()
    recorded = record(settings.names or list(TABLE), settings.checkout.absolute())
    if settings.action == "record":
        settings.file.write_bytes(pickle.dumps(recorded))
        print(f"{len(recorded)} scenarios")
        return 0
    old = pickle.loads(settings.file.read_bytes())
    if settings.names:
        old = {name: old[name] for name in settings.names if name in old}
    found = list(differences(old, recorded))
    print("\n".join(found))
    print(f"{len(recorded)} scenarios, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
