"""The exception tree. A class has the name of a Triton code.

A message says what was found, what was expected, and what to do. The adapter and the command line
put the model's name before it, with `about` or `named`. Messages to clients (InputError,
ForwardError, HookError, CallError, OutputError, UnavailableError) contain no path of the server.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator


class BackendError(Exception):
    """Root of the tree.

    Attributes:
        code: the name of a `TritonError` code.
        traceback: the traceback of the cause, for the log; never sent to clients.
        reported: whether the error of a request is written to the log: not if its client caused it.
    """

    code: str = "INTERNAL"
    traceback: str = ""
    reported: bool = False


class ModelError(BackendError):
    """An error about one model, whose name the message does not have yet.

    Args:
        found: what was found, as a clause; kept as an attribute.
        expected: what was expected, as a noun phrase.
        cure: what to do, as a sentence; kept as an attribute.
    """

    def __init__(self, found: str, *, expected: str = "", cure: str = "") -> None:
        self.found, self.cure = found, cure
        problem = found + (f"; expected {expected}" if expected else "")
        if not problem.endswith((".", "?")):  # as the message of another error does
            problem += "."
        super().__init__(f"{problem} {cure}" if cure else problem)


class LoadError(ModelError):
    """The model cannot be served; the load fails with this message."""


class ConfigError(LoadError):
    """Settings of config.pbtxt conflict, or do not fit the model."""


class ArtifactError(LoadError):
    """The model file is missing, or has an unsupported type."""


class SourceError(LoadError):
    """`model.py` fails, or does not define the model."""


class BindingError(LoadError):
    """Names in the config do not match those of forward()."""


class PlatformError(LoadError):
    """This process lacks what the model needs: a GPU, a matching numpy."""


class InputError(ModelError):
    """A request is invalid."""

    code = "INVALID_ARG"


class ForwardError(ModelError):
    """An exception of the model's own code, raised by the function `called`."""

    def __init__(self, error: BaseException, called: str = "forward") -> None:
        summary, cure = summarize(error), ""
        if isinstance(error, UnicodeDecodeError):  # of torch, for a string in a result
            cure = "TorchScript can return only UTF-8 strings; return other bytes as a tensor."
        elif summary.removeprefix("RuntimeError: ").startswith(_NO_GRADIENTS):
            cure = (
                'Gradients need the parameter INFERENCE_MODE "false", and torch.enable_grad() in'
                f" {called}()."
            )
        super().__init__(f"{called}() raised {summary}", cure=cure)


class HookError(ModelError):
    """A hook raised."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(f"{stage}() raised {summarize(error)}")


class CallError(ModelError):
    """A failed call of the model `called`; `code` is that of its response."""

    def __init__(
        self, called: str, found: str, *, code: str = "INTERNAL", expected: str = "", cure: str = ""
    ) -> None:
        super().__init__(f"model '{called}': {found}", expected=expected, cure=cure)
        self.code = code


class NoServerError(CallError):
    """No server executes calls of other models."""

    def __init__(self, called: str, inputs: Iterable[str]) -> None:
        super().__init__(
            called,
            f"it was called with {join_names(inputs) or 'no inputs'} where no server executes"
            " requests: while a model loads, in `check`, or in a test",
            cure="In a test, replace the model with torch_py_backend.composition.stand_in.",
        )


class OutputError(ModelError):
    """The result of forward() does not match the config."""


class InternalError(ModelError):
    """The backend itself failed."""

    def __init__(self) -> None:
        super().__init__(
            "the backend raised an unexpected error; the server's log has the traceback"
        )


class UnavailableError(ModelError):
    """The instance cannot answer; another one may be able to."""

    code = "UNAVAILABLE"

    @classmethod
    def fatal(cls, reason: str) -> UnavailableError:
        """Return the answer to every request after an error that makes the process unusable."""
        return cls(
            f"this instance met a fatal error and answers no requests any more ({reason})",
            cure="It must be replaced: reload the model.",
        )


class OutOfMemoryError(UnavailableError):
    """Too little memory. The message omits torch's text, which reports the memory of others."""

    def __init__(self) -> None:
        super().__init__(
            "the request does not fit in memory", cure="Try again later, or send less."
        )


class CancelledError(ModelError):
    """A request was cancelled before it ran, or during its stream."""

    code = "CANCELLED"

    def __init__(self, when: str = "before it ran") -> None:
        super().__init__(f"the request was cancelled {when}")


class SaveError(ModelError):
    """A module cannot be saved as a model folder."""


class ExampleError(SaveError):
    """Example inputs are missing, or do not fit the module."""


class InstallError(BackendError):
    """A backend folder cannot be written."""


class ServerError(BackendError):
    """A tritonserver cannot be found, started or reached, or fails."""


class ToolError(BackendError):
    """A command, `save_model` or a benchmark cannot work, or cannot write its result."""


_SHOWN = 8
_LONGEST = 500
# What is searched of a message, which may contain megabytes of a client's text. A search holds the
# GIL, so the patterns below must also take linear time. A path has at most 4,096 bytes.
_SEARCHED = 8192
# Absolute folders before a name; not after a letter (1/2/3, ../a/b), and not in a URL.
_PATH = re.compile(r"((?<=file://)|(?<![\w./])(?<!:/))/(?:[\w.@+~-]+/)+(?=[\w.@+~-])")
# The same in quotes, where names of folders may contain blanks.
_QUOTED_PATH = re.compile(r"""(['"])/[^'"]*/(?=[^'"/]+\1)""")
_MEMORY_ADDRESS = re.compile(r"( at)? 0x[0-9a-fA-F]{6,}")
_NETWORK_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_TORCHSCRIPT = "TorchScript interpreter"
# What torch says where gradients are not recorded.
_NO_GRADIENTS = (
    "element 0 of tensors does not require grad",
    "Setting requires_grad=True on inference tensor",
    "Inference tensors cannot be saved for backward",
    "can't retain_grad on Tensor that has requires_grad=False",
)


def named(model: str, error: BackendError) -> str:
    """Return the message of an error about a model, with the model's name before it."""
    names_another = isinstance(error, CallError)
    is_named = isinstance(error, ModelError) and not names_another
    return f"model '{model}': {error}" if is_named else str(error)


@contextlib.contextmanager
def about(model: str) -> Iterator[None]:
    """Put the model's name before the message of an error that the block raises."""
    try:
        yield
    except ModelError as error:
        error.args = (named(model, error),)
        raise


def join_names(names: Iterable[str]) -> str:
    """Return the names, comma-separated, cut after `_SHOWN`."""
    listed = list(names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest


def a_type(value: object) -> str:
    """Return the name of a value's type with its article: "an int", "a str"."""
    name = type(value).__name__
    return f"{'an' if name == 'ndarray' or name[0] in 'aeioAEIO' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summarize(error: BaseException) -> str:
    """Return an exception's type and message in one line that may be sent to clients.

    It contains no traceback, folder or address of the server, and at most `_LONGEST` characters,
    all printable: text that cannot be sent would fail the whole batch.
    """
    try:
        message = str(error).strip()
    except Exception:  # raised by __str__ of a class in the model's code
        message = ""
    text = _first_line(message)
    if _TORCHSCRIPT in text:  # a traceback, whose last line is the message of the cause
        text = message.rpartition("\n")[2][:_SEARCHED]
    text = _sanitized(text)
    kind = type(error).__name__
    if text.startswith(f"{kind}:") or not text:
        return (text or kind)[:_LONGEST]
    return f"{kind}: {text}"[:_LONGEST]


def sanitize_line(text: str) -> str:
    """Return the message of another model's error in one line that may be sent to clients."""
    return _sanitized(_first_line(text.strip()))[:_LONGEST]


def _first_line(text: str) -> str:
    """Return the first line of a stripped text, at most `_SEARCHED` characters of it."""
    return next(iter(text[:_SEARCHED].splitlines()), "").rstrip()


def _sanitized(text: str) -> str:
    text = _PATH.sub("", _QUOTED_PATH.sub(r"\1", text))
    text = _NETWORK_ADDRESS.sub("(address)", _MEMORY_ADDRESS.sub("", text))
    return printable(text)


def printable(text: str) -> str:
    """Return the text with "?" for each character that is not printable."""
    return "".join(char if char.isprintable() else "?" for char in text)
