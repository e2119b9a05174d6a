import inspect
import subprocess
import sys

import pytest
import torch

from torch_py_backend import errors
from torch_py_backend.errors import BackendError, ModelError, join_names, summarize


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_codes_separate_invalid_requests_failures_and_what_a_retry_may_solve() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    codes = {name: kind.code for name, kind in classes if issubclass(kind, BackendError)}
    assert {name: code for name, code in codes.items() if code != "INTERNAL"} == {
        "InputError": "INVALID_ARG",
        "UnavailableError": "UNAVAILABLE",
        "OutOfMemoryError": "UNAVAILABLE",
        "CancelledError": "CANCELLED",
    }


def test_a_message_says_what_was_found_and_expected_and_what_to_do() -> None:
    assert str(ModelError("it is odd")) == "it is odd."
    both = ModelError("it is odd", expected="even", cure="Add 1.")
    assert str(both) == "it is odd; expected even. Add 1."
    # The message of another error ends with a full stop already.
    with pytest.raises(ModelError) as raised, errors.about("digits"):
        raise ModelError("no part.", cure="Go.")
    assert str(raised.value) == "model 'digits': no part. Go."
    # One about no model, or about a called one, does not get the name.
    for error in (errors.ToolError("no folder."), errors.CallError("other", "it answers: no.")):
        assert errors.named("digits", error) == str(error)


def test_at_most_eight_names_are_shown() -> None:
    eight = "n0, n1, n2, n3, n4, n5, n6, n7"
    assert join_names(f"n{number}" for number in range(8)) == eight
    assert join_names(f"n{number}" for number in range(9)) == f"{eight} and 1 more"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (" \n ", ""),
        ("\n one\n  two", ": one"),
        ("ValueError: twice", ": twice"),
        # folders of the server
        ("no /srv/models/digits/1/a.txt here", ": no a.txt here"),
        ("'/srv/a/b.pt', (/srv//c/d.pt)", ": 'b.pt', (d.pt)"),
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
def test_a_summary_is_one_line_without_folders_of_the_server(message: str, text: str) -> None:
    assert summarize(ValueError(message)) == f"ValueError{text}"


_LONG_TEXTS = """
import itertools
from torch_py_backend import errors

parts = ("/", "/a", "/@/", "//a ", "/a/b ", "'/", "'/a/b", "0x", "1.1.", " at ", "file:///", "\\n")
for quote, part in itertools.product(("", "'", '"', "'\\""), parts):
    text = f"invalid: {quote}{part * 20_000}"
    assert len(errors.summarize(ValueError(text))) <= 500
    assert len(errors.summarize(ValueError(f"TorchScript interpreter\\n{text}"))) <= 500
    assert len(errors.sanitize_line(text)) <= 500
"""


def test_a_message_with_a_clients_text_is_read_in_linear_time() -> None:
    # In a process of its own: a search holds the GIL, so nothing here could end it.
    subprocess.run([sys.executable, "-c", _LONG_TEXTS], check=True, timeout=120)


def test_any_summary_is_bounded_and_can_be_sent() -> None:
    assert summarize(KeyError("x")) == "KeyError: 'x'"
    assert summarize(ValueError()) == "ValueError"
    assert summarize(BrokenTextError()) == "BrokenTextError"
    text = "".join(map(chr, range(0x3000))) + "\ud800"
    assert summarize(ValueError(text.replace("\n", ""))).encode()
    assert len(summarize(ValueError("x" * 10_000))) == 500


def test_of_a_traceback_of_torchscript_the_message_is_kept() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(RuntimeError) as raised:
        torch.jit.script(forward)(torch.ones(1, 3))
    assert __file__ in str(raised.value)
    with pytest.raises(RuntimeError) as plain:
        forward(torch.ones(1, 3))
    assert summarize(raised.value) == f"RuntimeError: {plain.value}"
