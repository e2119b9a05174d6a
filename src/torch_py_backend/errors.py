"""The exception tree, and the text of messages. `code` is the name of a Triton code.

A message says what was found, what was expected, and what to do. The adapter and the command line
put the model's name before it, with `about` or `named`. Messages to clients (InputError,
ForwardError, CallError, OutputError, UnavailableError) contain no path of the server.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator


class BackendError(Exception):
    """Root of the tree.

    Attributes:
        traceback: the traceback of the cause, for the log; never sent to clients.
        reported: whether the error of a request is written to the log: not if its client caused it.
        final: whether no item of the batch is run again, as each would fail, or must not run twice.
    """

    code = "INTERNAL"
    traceback = ""
    reported = False
    final = False


class ToolError(BackendError):
    """A command or a server fails. The message is complete: it is not about one model."""


class ModelError(BackendError):
    """An error about one model: what was `found`, what was `expected`, and the `cure`."""

    def __init__(
        self,
        found: str,
        *,
        expected: str = "",
        cure: str = "",
    ) -> None:
        problem = found + (f"; expected {expected}" if expected else "")
        if not problem.endswith((".", "?")):  # as the message of another error does
            problem += "."
        super().__init__(f"{problem} {cure}" if cure else problem)


class LoadError(ModelError):
    """The model cannot be served; the load fails with this message."""


class ConfigError(LoadError):
    """Settings of config.pbtxt conflict, or do not fit the model."""


class ArtifactError(LoadError):
    """The model's file, its source or its weights cannot be used."""


class BindingError(LoadError):
    """Names in the config do not match those of forward()."""


class PlatformError(LoadError):
    """This process lacks what the model needs: a GPU, a matching numpy."""


class SaveError(ModelError):
    """A module cannot be saved as a model folder."""


class InputError(ModelError):
    """A request is invalid."""

    code = "INVALID_ARG"


class ForwardError(ModelError):
    """The model's own code, or a hook, raised in the function `called`."""

    def __init__(
        self,
        error: BaseException,
        called: str = "forward",
    ) -> None:
        super().__init__(f"{called}() raised {summarize(error)}")


class CallError(ModelError):
    """A call of the model `called` failed; `code` is that of its response."""

    def __init__(
        self,
        called: str,
        found: str,
        *,
        code: str = "INTERNAL",
        expected: str = "",
        cure: str = "",
    ) -> None:
        super().__init__(f"model '{called}': {found}", expected=expected, cure=cure)
        self.code = code


class OutputError(ModelError):
    """The result of forward() does not match the config."""


class InternalError(ModelError):
    """The backend itself failed."""

    def __init__(self) -> None:
        super().__init__("the backend raised an unexpected error", cure="See the server's log.")


class UnavailableError(ModelError):
    """The instance cannot answer; another one may be able to."""

    code = "UNAVAILABLE"


class OutOfMemoryError(UnavailableError):
    """Too little memory. The message omits torch's text, which reports the memory of others."""

    def __init__(self) -> None:
        super().__init__(
            "the request does not fit in memory", cure="Try again later, or send less."
        )


class CancelledError(ModelError):
    """A request was cancelled before it ran, or during its stream."""

    code = "CANCELLED"


def named(model: str, error: BackendError) -> str:
    """Return the message of an error about a model, with the model's name before it."""
    names_another = isinstance(error, ToolError | CallError)
    return str(error) if names_another else f"model '{model}': {error}"


@contextlib.contextmanager
def about(model: str) -> Iterator[None]:
    """Put the model's name before the message of an error that the block raises."""
    try:
        yield
    except BackendError as error:
        error.args = (named(model, error),)
        raise


_SHOWN = 8
_LONGEST = 500
# What is searched of a message, which may contain megabytes of a client's text. A search holds the
# GIL, so the patterns below must also take linear time. A path has at most 4,096 bytes.
_SEARCHED = 8192
_REMOVED = (
    # Folders in quotes, whose names may contain blanks.
    (re.compile(r"""(['"])/[^'"]*/(?=[^'"/]+\1)"""), r"\1"),
    # Other absolute folders; not after a letter (1/2/3, ../a/b), and not in a URL.
    (re.compile(r"((?<=file://)|(?<![\w./])(?<!:/))/(?:[\w.@+~-]+/+)+(?=[\w.@+~-])"), ""),
    # Addresses in memory and in a network.
    (re.compile(r"( at)? 0x[0-9a-fA-F]{6,}"), ""),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "(address)"),
)


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
    """Return an exception's type and message in one line that may be sent to clients."""
    try:
        message = str(error).strip()
    except Exception:  # raised by __str__ of a class in the model's code
        message = ""
    if "TorchScript interpreter" in message[:80]:
        message = message.rpartition("\n")[2]  # a traceback, whose last line is the cause
    kind = type(error).__name__
    text = sanitize_line(message).removeprefix(f"{kind}: ")
    return f"{kind}: {text}"[:_LONGEST] if text else kind


def sanitize_line(text: str) -> str:
    """Return the first line of a message, which may be sent to clients.

    It contains no folder or address of the server, and at most `_LONGEST` characters, all
    printable: text that cannot be sent would fail the whole batch.
    """
    line = next(iter(text.strip()[:_SEARCHED].splitlines()), "").rstrip()
    for pattern, replacement in _REMOVED:
        line = pattern.sub(replacement, line)
    return printable(line)[:_LONGEST]


def printable(text: str) -> str:
    """Return the text with "?" for each character that is not printable."""
    return "".join(char if char.isprintable() else "?" for char in text)
