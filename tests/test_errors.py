import inspect
import subprocess
import sys

import pytest
import torch

from torch_py_backend import errors
from torch_py_backend.errors import (
    BackendError,
    ModelError,
    join_names,
    summarize,
)


class BrokenTextError(Exception):
    """An exception whose __str__ raises."""

    def __str__(self) -> str:
        raise RuntimeError


def test_codes() -> None:
    """Codes separate invalid requests, failures, and errors that a retry may solve."""
    classes = inspect.getmembers(errors, inspect.isclass)
    codes = {name: kind.code for name, kind in classes if issubclass(kind, BackendError)}
    assert {name: code for name, code in codes.items() if code != "INTERNAL"} == {
        "InputError": "INVALID_ARG",
        "UnavailableError": "UNAVAILABLE",
        "OutOfMemoryError": "UNAVAILABLE",
        "CancelledError": "CANCELLED",
    }


@pytest.mark.parametrize(
    ("found", "expected", "cure", "message"),
    [
        ("it is odd", "", "", "it is odd."),
        ("it is odd", "even", "", "it is odd; expected even."),
        ("it is odd", "even", "Add 1.", "it is odd; expected even. Add 1."),
        # the message of another error ends with a full stop already
        ("no part.", "", "Go.", "no part. Go."),
    ],
)
def test_message(found: str, expected: str, cure: str, message: str) -> None:
    """A message says what was found, what was expected and what to do; `about` adds the model."""
    error = ModelError(found, expected=expected, cure=cure)
    assert str(error) == message
    with pytest.raises(ModelError) as raised, errors.about("digits"):
        raise error
    assert str(raised.value) == f"model 'digits': {message}"


@pytest.mark.parametrize(
    "error", [errors.ToolError("no folder."), errors.CallError("other", "it answers: no.")]
)
def test_no_name(error: BackendError) -> None:
    """An error about no model, or about a called one, does not get the model's name."""
    assert errors.named("digits", error) == str(error)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8, "n0, n1, n2, n3, n4, n5, n6, n7"),
        (9, "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more"),
    ],
)
def test_joined_names(count: int, text: str) -> None:
    """At most eight names are shown, with the number of the others."""
    assert join_names(f"n{number}" for number in range(count)) == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (" \n ", ""),
        ("\n one\n  two", ": one"),
        ("ValueError: twice", ": twice"),
        # folders of the server
        ("no /srv/models/digits/1/a.txt here", ": no a.txt here"),
        ("'/srv/a/b.pt', (/srv/c/d.pt)", ": 'b.pt', (d.pt)"),
        ("error:/srv/a/b.pt", ": error:b.pt"),
        ("at file:///srv/a/b.pt", ": at file://b.pt"),
        ("'/srv/my models/a.pt' and \"/srv/b c/d.pt\"", ": 'a.pt' and \"d.pt\""),
        ("no ../../a/b.pt, 1/2/3", ": no ../../a/b.pt, 1/2/3"),
        ("see https://pytorch.org/docs/stable", ": see https://pytorch.org/docs/stable"),
        # addresses
        ("no <Thing object at 0x7f5fe7f604a0>", ": no <Thing object>"),
        ("fault, address 0x7F5FE7F60000 read", ": fault, address read"),
        ("mask is 0xff, torch 2.13.0", ": mask is 0xff, torch 2.13.0"),
        ("no answer from 10.1.2.3:8080, 10.1.2.4", ": no answer from (address), (address)"),
        # characters that cannot be sent or shown
        ("a\x00b\x1b[31m", ": a?b?[31m"),
        ("bad \udcff", ": bad ?"),
        ("Größe 3, 大", ": Größe 3, 大"),
    ],
)
def test_summary(message: str, text: str) -> None:
    """The text is one line with type and message, without folders of the server."""
    assert summarize(ValueError(message)) == f"ValueError{text}"


_LONG_TEXTS = """
import itertools
from torch_py_backend import errors

parts = ("/", "/a", "/@/", "//a ", "/a/b ", "'/", "'/a/b", "0x", "1.1.", " at ", "file:///", "\\n")
for quote, part, count in itertools.product(("", "'", '"', "'\\""), parts, (10_000, 1_000_000)):
    text = f"invalid: {quote}{part * count}"
    assert len(errors.summarize(ValueError(text))) <= 500
    assert len(errors.summarize(ValueError(f"TorchScript interpreter\\n{text}"))) <= 500
    assert len(errors.sanitize_line(text)) <= 500
"""


def test_summary_of_long_texts() -> None:
    """A message with a client's text of 10,000 slashes, or of others, is read in linear time."""
    # In a process of its own: a search holds the GIL, so nothing here could end it.
    subprocess.run([sys.executable, "-c", _LONG_TEXTS], check=True, timeout=120)


def test_any_summary_can_be_sent() -> None:
    """The text is bounded and can be encoded as UTF-8, whatever the message contains.

    A KeyError has its key, an exception without a working text its type.
    """
    assert summarize(KeyError("x")) == "KeyError: 'x'"
    assert summarize(ValueError()) == "ValueError"
    assert summarize(BrokenTextError()) == "BrokenTextError"
    text = "".join(map(chr, range(0x3000))) + "\ud800"
    assert summarize(ValueError(text.replace("\n", ""))).encode()
    assert len(summarize(ValueError("x" * 10_000))) == 500


def test_summary_of_torchscript() -> None:
    """Of a TorchScript traceback only the message of the error is kept."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(RuntimeError) as raised:
        torch.jit.script(forward)(torch.ones(1, 3))
    assert __file__ in str(raised.value)
    assert summarize(raised.value) == (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 1x3)"
    )
