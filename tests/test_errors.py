import inspect
import re

import build
import pytest
import torch

from torch_py_backend import errors
from torch_py_backend.errors import (
    BackendError,
    CancelledError,
    ForwardError,
    InputError,
    InternalError,
    LoadError,
    ModelError,
    OptionError,
    OutOfMemoryError,
    OutputError,
    UnavailableError,
    WeightsError,
    join_names,
    summarize,
)

# TRITONSERVER_Error_Code, as pb_utils.TritonError spells it.
TRITON_CODES = {
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
}


class BrokenTextError(Exception):
    """An exception whose __str__ raises."""

    def __str__(self) -> str:
        raise RuntimeError


CLASSES = [
    one
    for _, one in inspect.getmembers(errors, inspect.isclass)
    if one.__module__ == errors.__name__
]


def drawn_tree() -> dict[str, str]:
    """Return class → parent, from the drawing at the top of errors.py."""
    above: list[str] = []
    parents = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z]\w*Error)\b", line)
        if match is None or (above and not match[1]):
            continue
        depth = len(match[1]) // 4
        above[depth:] = [match[2]]
        if depth:
            parents[match[2]] = above[depth - 1]
    return parents


def test_drawing_is_the_tree() -> None:
    """The drawing at the top of errors.py contains each class below its parent."""
    real = {}
    for one in CLASSES:
        parent = one.__mro__[1]
        # ModelError is how a sentence is built, not a kind of error: the drawing leaves it out.
        real[one.__name__] = (BackendError if parent is ModelError else parent).__name__
    del real["BackendError"], real["ModelError"]

    assert drawn_tree() == real


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_code_is_one_that_triton_has(kind: type[BackendError]) -> None:
    """Each error has the name of a Triton error code."""
    assert kind.code in TRITON_CODES


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        pytest.param(InputError, "INVALID_ARG", id="the client's fault"),
        pytest.param(ForwardError, "INTERNAL", id="the model's fault"),
        pytest.param(OutputError, "INTERNAL", id="the result's fault"),
        pytest.param(InternalError, "INTERNAL", id="our fault"),
        pytest.param(UnavailableError, "UNAVAILABLE", id="the process' fault"),
        pytest.param(OutOfMemoryError, "UNAVAILABLE", id="too little memory"),
        pytest.param(CancelledError, "CANCELLED", id="nobody's fault"),
    ],
)
def test_codes(kind: type[BackendError], code: str) -> None:
    """Codes separate invalid requests, failures, and errors that a retry may solve."""
    assert kind.code == code


def test_fatal_error() -> None:
    """The message has the cause and the cure."""
    assert str(UnavailableError.fatal(build.MODEL, "RuntimeError: it broke")) == (
        "model 'digits': this instance met a fatal error and answers no requests any more"
        " (RuntimeError: it broke). It must be replaced: reload the model."
    )


@pytest.mark.parametrize(
    ("expected", "cure", "sentence"),
    [
        pytest.param("", "", "model 'digits': it is odd.", id="found alone"),
        pytest.param("even", "", "model 'digits': it is odd; expected even.", id="expected"),
        pytest.param("", "Double it.", "model 'digits': it is odd. Double it.", id="cure"),
        pytest.param(
            "even",
            "Double it.",
            "model 'digits': it is odd; expected even. Double it.",
            id="expected and cure",
        ),
    ],
)
def test_message(expected: str, cure: str, sentence: str) -> None:
    """A message names the model, what was found, what was expected and what to do."""
    assert str(ModelError("digits", "it is odd", expected=expected, cure=cure)) == sentence


def test_option_error() -> None:
    """The message has the key, the value and the accepted values."""
    error = OptionError(build.MODEL, "WARMUP", "maybe", "true or false")

    assert isinstance(error, LoadError)
    assert str(error) == (
        "model 'digits': the parameter WARMUP is 'maybe'; expected true or false."
        " Correct it in config.pbtxt."
    )


@pytest.mark.parametrize(
    ("lists", "said", "unsaid"),
    [
        pytest.param(
            {"missing": ["a", "b"]},
            ["missing keys (2): a, b"],
            ["unexpected", "wrong shapes"],
            id="missing",
        ),
        pytest.param(
            {"unexpected": ["c"]},
            ["unexpected keys (1): c"],
            ["missing", "wrong shapes"],
            id="unexpected",
        ),
        pytest.param(
            {"shapes": ["d [1] instead of [2]"]},
            ["wrong shapes (1): d [1] instead of [2]"],
            ["missing", "unexpected"],
            id="shapes",
        ),
        pytest.param(
            {"missing": ["a"], "unexpected": ["c"], "shapes": ["d"]},
            ["missing keys (1): a; unexpected keys (1): c; wrong shapes (1): d"],
            [],
            id="all",
        ),
        pytest.param(
            {"missing": [f"layer{number}" for number in range(100)]},
            ["missing keys (100): layer0,", "layer7 and 92 more"],
            ["layer8"],
            id="a hundred",
        ),
    ],
)
def test_weights_error(lists: dict[str, list[str]], said: list[str], unsaid: list[str]) -> None:
    """Missing keys, unexpected keys and wrong shapes are counted and listed."""
    text = str(WeightsError(build.MODEL, "model.pt", **lists))  # type: ignore[arg-type]

    assert text.startswith("model 'digits': the weights in model.pt do not fit the module: ")
    assert all(part in text for part in said)
    assert not any(part in text for part in unsaid)
    assert "state_dict() of the class that is served" in text


def test_weights_error_with_a_hint() -> None:
    """A hint replaces the general cure."""
    text = str(WeightsError(build.MODEL, "model.pt", missing=["a"], hint="Strip `module.`."))

    assert text.endswith("missing keys (1): a. Strip `module.`.")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        pytest.param(0, "", id="none"),
        pytest.param(1, "n0", id="one"),
        pytest.param(8, "n0, n1, n2, n3, n4, n5, n6, n7", id="eight"),
        pytest.param(9, "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more", id="nine"),
        pytest.param(500, "n0, n1, n2, n3, n4, n5, n6, n7 and 492 more", id="many"),
    ],
)
def test_shown(count: int, text: str) -> None:
    """At most eight names are shown, with the number of the others."""
    assert join_names(f"n{number}" for number in range(count)) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(ValueError("too small"), "ValueError: too small", id="plain"),
        pytest.param(ValueError(), "ValueError", id="without a text"),
        pytest.param(ValueError(" \n "), "ValueError", id="only blanks"),
        pytest.param(KeyError("x"), "KeyError: 'x'", id="KeyError"),
        pytest.param(ValueError("one\n  two"), "ValueError: one", id="several lines"),
        pytest.param(ValueError("\n\n one"), "ValueError: one", id="blank lines first"),
        pytest.param(ValueError("ValueError: twice"), "ValueError: twice", id="kind in the text"),
        pytest.param(
            ValueError("no /srv/models/digits/1/a.txt here"),
            "ValueError: no a.txt here",
            id="path",
        ),
        pytest.param(
            ValueError("'/srv/a/b.pt', (/srv/c/d.pt)"), "ValueError: 'b.pt', (d.pt)", id="paths"
        ),
        pytest.param(ValueError("file=/srv/a/b.pt"), "ValueError: file=b.pt", id="path after ="),
        pytest.param(ValueError("error:/srv/a/b.pt"), "ValueError: error:b.pt", id="path after :"),
        pytest.param(ValueError("at file:///srv/a/b.pt"), "ValueError: at file://b.pt", id="file:"),
        pytest.param(ValueError("no ../../a/b.pt"), "ValueError: no ../../a/b.pt", id="relative"),
        pytest.param(ValueError("a is 1/2/3"), "ValueError: a is 1/2/3", id="division"),
        pytest.param(
            ValueError("see https://pytorch.org/docs/stable"),
            "ValueError: see https://pytorch.org/docs/stable",
            id="address",
        ),
        pytest.param(SystemExit(3), "SystemExit: 3", id="SystemExit"),
        pytest.param(
            ValueError("'/srv/my models/a.pt' and \"/srv/b c/d.pt\""),
            "ValueError: 'a.pt' and \"d.pt\"",
            id="blanks in paths",
        ),
        pytest.param(
            ValueError('File "/srv/models/model.py", line 3'),
            'ValueError: File "model.py", line 3',
            id="a traceback's line",
        ),
        pytest.param(
            ValueError("no <Thing object at 0x7f5fe7f604a0>"),
            "ValueError: no <Thing object>",
            id="memory address",
        ),
        pytest.param(
            ValueError("fault, address 0x7F5FE7F60000 read"),
            "ValueError: fault, address read",
            id="bare memory address",
        ),
        pytest.param(ValueError("mask is 0xff"), "ValueError: mask is 0xff", id="a number"),
        pytest.param(
            ConnectionError("no answer from 10.1.2.3:8080, 10.1.2.4"),
            "ConnectionError: no answer from (address), (address)",
            id="network address",
        ),
        pytest.param(ValueError("torch 2.13.0"), "ValueError: torch 2.13.0", id="a version"),
        pytest.param(ValueError("a\x00b\x1b[31m"), "ValueError: a?b?[31m", id="control characters"),
        pytest.param(ValueError("bad \udcff"), "ValueError: bad ?", id="a lone surrogate"),
        pytest.param(ValueError("Größe 3, 大"), "ValueError: Größe 3, 大", id="other alphabets"),
        pytest.param(BrokenTextError(), "BrokenTextError", id="without a working text"),
    ],
)
def test_brief(error: BaseException, text: str) -> None:
    """The text is one line with type and message, without folders of the server."""
    assert summarize(error) == text


def test_brief_can_be_sent() -> None:
    """The text can be encoded as UTF-8, whatever the message contains."""
    text = "".join(map(chr, range(0x3000))) + "\ud800"

    assert summarize(ValueError(text.replace("\n", ""))).encode()


def test_brief_has_a_bound() -> None:
    """The length of the text is limited."""
    assert len(summarize(ValueError("x" * 10_000))) == 500


def test_brief_of_torchscript() -> None:
    """Of a TorchScript traceback only the message of the error is kept."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(RuntimeError) as raised:
        torch.jit.script(forward)(torch.ones(1, 3))

    assert __file__ in str(raised.value)
    assert summarize(raised.value) == (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 1x3)"
    )


def test_forward_error() -> None:
    """The message has the type and text of the exception."""
    error = ForwardError(build.MODEL, ZeroDivisionError("by zero"))

    assert str(error) == "model 'digits': forward() raised ZeroDivisionError: by zero."


def test_one_full_stop() -> None:
    """A message that ends with another error's message has one full stop there."""
    inner = errors.ConfigError("other", "no such part")
    told = errors.ConfigError("digits", f"it failed: {inner}", cure="Go on.")
    assert str(told) == "model 'digits': it failed: model 'other': no such part. Go on."
