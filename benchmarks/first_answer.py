"""Count the lines, and measure the time, from a model to the first answer of a server.

    python -m benchmarks.first_answer [--turns 3] [--output FILE]

What a user writes is in `starts`, for four starting points: a module in a file, a TorchScript file,
a Hugging Face folder, a repository of Triton's LibTorch backend. Each program
sends one request; its answer is compared with eager PyTorch. All of them batch requests. Lines are
those of the programs, without blank ones, and the commands. The time begins when the server, or
the program that starts it, is started, and ends with the answer; a client runs again until it gets
one. Packages are installed before.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import contenders, harness
from benchmarks.starts.given import net
from benchmarks.tables import markdown, write_table
from torch_py_backend.errors import ToolError

# Their types are not complete.
tokenizers: Any = importlib.import_module("tokenizers")
transformers: Any = importlib.import_module("transformers")
_STARTS = Path(__file__).parent / "starts"
_COLUMNS = ("starting point", "with", "programs", "lines", "seconds")
_WORDS = ("[PAD]", "[UNK]", "a", "fine", "dull", "film")
_TEXT = "a fine film"
_WAIT_SECONDS = 180
_TOLERANCE = 1e-4
_CONFIG = """\
platform: "pytorch_libtorch"
max_batch_size: 8
input [{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 64, 64 ] }]
output [{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] }]
instance_group [{ kind: KIND_CPU }]
"""
# LitServe's program for TorchScript differs from the one for the module in these texts.
_OF_TORCHSCRIPT = {"import net\n": "", "net.trained()": 'torch.jit.load("net.pt")'}
_SED = 's/platform: "pytorch_libtorch"/backend: "pytorch_py"/'


@dataclass(frozen=True)
class Way:
    """What a user runs in one place to get an answer.

    Attributes:
        title: the server.
        environment: the peer whose environment it needs; empty: this one.
        before: a command that ends before the others.
        server: the command that serves, with {python}; the last command prints the answer.
        client: the command that prints the answer.
        files: the programs that a user writes.
    """

    title: str
    environment: str
    client: str
    files: tuple[str, ...]
    server: str = ""
    before: str = ""

    @property
    def commands(self) -> int:
        return 1 + bool(self.server) + bool(self.before)


_INIT = "{python} -m torch_py_backend init net.pt --repository models --input image:FP32:3x64x64"
_OURS = Way("torch-py-backend", "", "{python} ours.py", ("ours.py",))
_LITSERVE = Way(
    "LitServe",
    "litserve",
    "{python} litserve_client.py",
    ("litserve_server.py", "litserve_client.py"),
    "{python} litserve_server.py",
)
WAYS = {
    "module": (_OURS, _LITSERVE),
    "torchscript": (dataclasses.replace(_OURS, before=_INIT), _LITSERVE),
    "huggingface": (_OURS, _LITSERVE),
    "libtorch": (
        dataclasses.replace(_OURS, before=f"sed -i '{_SED}' libtorch_models/net/config.pbtxt"),
    ),
}


def lines(start: str, way: Way) -> int:
    """Return the lines that a user writes: of programs, and commands."""
    texts = [program(start, name) for name in way.files]
    return way.commands + sum(bool(line.strip()) for text in texts for line in text.splitlines())


def program(start: str, name: str) -> str:
    """Return the text of a program."""
    if (_STARTS / start / name).exists():
        return (_STARTS / start / name).read_text()
    text = program("module", name)
    for old, new in _OF_TORCHSCRIPT.items():
        text = text.replace(old, new)
    return text


def given(folder: Path) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Write what a user has at each starting point; return the right answers."""
    shutil.copy(_STARTS / "given" / "net.py", folder)
    module = net.trained()
    script = torch.jit.script(module)
    script.save(folder / "net.pt")
    version = folder / "libtorch_models" / "net" / "1"
    version.mkdir(parents=True)
    script.save(version / "model.pt")
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(_WORDS)}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_WORDS[0])
    tokenizer.save_pretrained(folder / "reviews")
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=len(_WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        num_labels=3,
    )
    reviews = transformers.BertForSequenceClassification(settings).eval()
    reviews.save_pretrained(folder / "reviews")
    with torch.inference_mode():
        scores = module(torch.ones(1, 3, 64, 64)).numpy()
        logits = reviews(**tokenizer([_TEXT], return_tensors="pt")).logits.numpy()
    return {"module": scores, "torchscript": scores, "libtorch": scores, "huggingface": logits}


def seconds(start: str, way: Way) -> float:
    """Return the time to the first answer, in a new folder.

    Raises:
        ToolError: there is no answer, or it is wrong.
    """
    python = contenders.environment(way.environment) if way.environment else sys.executable

    def command(text: str) -> list[str]:
        return shlex.split(text.replace("{python}", shlex.quote(str(python))))

    with harness.scratch() as scratch:
        folder = Path(scratch)
        expected = given(folder)[start]
        for name in way.files:
            (folder / name).write_text(program(start, name))
        began = time.perf_counter()
        if way.before:
            subprocess.run(command(way.before), check=True, cwd=folder)  # noqa: S603  ours
        with _serving(command(way.server), folder):
            while True:
                output, answered = _run(command(way.client), folder, expected)
                if answered is not None:
                    return answered - began
                if not way.server or time.perf_counter() > began + _WAIT_SECONDS:
                    raise ToolError(f"{way.title} answers {output[-2000:]}; expected {expected}.")


@contextmanager
def _serving(command: Sequence[str], folder: Path) -> Iterator[None]:
    """Run a server, if there is a command, and end it with all of its processes."""
    if not command:
        yield
        return
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603  ours
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            contenders.stop(server)


def _run(
    command: Sequence[str], folder: Path, expected: np.ndarray[Any, Any]
) -> tuple[str, float | None]:
    """Run a client; return its output, and when the right answer was printed, if it was."""
    output, answered = "", None
    with subprocess.Popen(  # noqa: S603  ours
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as program:
        for line in program.stdout or ():
            output += line
            if answered is None and _has(output, expected):
                answered = time.perf_counter()
    return output, answered


def _has(output: str, expected: np.ndarray[Any, Any]) -> bool:
    """Return whether a list with the expected numbers was printed."""
    for text in re.findall(r"\[([^\[\]]*)\]", output):
        numbers = [float(word) for word in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", text)]
        if len(numbers) == expected.size:
            return np.allclose(numbers, expected.ravel(), atol=_TOLERANCE)
    return False


def main() -> None:
    """Measure all in turn, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--starts", default=",".join(WAYS))
    parser.add_argument("--output", type=Path, help="a document with the marks of this table")
    settings = parser.parse_args()
    rows = []
    for start in settings.starts.split(","):
        times: dict[Way, list[float]] = {way: [] for way in WAYS[start]}
        for _ in range(settings.turns):
            for way, values in times.items():
                values.append(seconds(start, way))
                print(f"{start}, {way.title}: {values[-1]:.1f} s", file=sys.stderr)
        for way, values in times.items():
            figures = f"{statistics.median(values):.0f} ({min(values):.0f}..{max(values):.0f})"
            programs = ", ".join(way.files)
            rows.append((start, way.title, programs, str(lines(start, way)), figures))
    table = markdown(_COLUMNS, rows)
    print(table)
    if settings.output is not None:
        write_table(settings.output, "first_answer", table)


if __name__ == "__main__":
    main()
