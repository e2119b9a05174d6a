"""The error tree: a class takes facts, composes its sentence and carries a Triton code.

BackendError
├── LoadError               the model cannot be served; the load fails with this sentence
│   ├── ConfigError         config.pbtxt contradicts itself or asks for what is not there
│   ├── OptionError         a parameter has a value that is not accepted
│   ├── ArtifactError       the model file is missing, or is not what it should be
│   ├── SourceError         model.py fails, or does not define what is to be served
│   ├── WeightsError        the weights do not fit the module
│   ├── BindingError        names in the config that forward() does not have
│   ├── PlatformError       this process lacks what the model needs: a GPU, a matching numpy
│   ├── CompileError        torch.compile failed, and the config insists on it
│   └── WarmupError         the first calls, before READY, failed
├── InputError              a request is wrong: the client's fault
├── ForwardError            forward() raised, or what is called in its place
├── HookError               a method of the hooks around forward() raised
├── CallError               a call of another model, from within a model, failed
│   └── NoServerError       there is no server to call it on
├── OutputError             forward() returned what the config contradicts
├── InternalError           the backend itself failed
├── UnavailableError        the instance cannot answer, and another one might
│   ├── OutOfMemoryError    not even one row of a request fits in memory
│   └── StateMemoryError    the states of all sequences together would take more than they may
├── CancelledError          a request was cancelled before it was run, or in mid-stream
├── InstallError            a backend folder cannot be written
├── ServerError             a tritonserver cannot be found, started or asked, or answers an error
├── BenchError              what is to be measured contradicts itself, or gave no figures
├── ArchiveError            a TorchServe archive cannot be read, or cannot be served here
├── ProfileError            a model cannot be profiled as asked, or its trace cannot be kept
├── TuneError               a model cannot be tuned as asked, or what was found cannot be kept
└── PackError               a Python environment cannot be packed for a server

A sentence names the model, what was found, what was expected, and what to do. What a client reads
(InputError, ForwardError, HookError, CallError, OutputError, UnavailableError) holds no path of the
server.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable


class BackendError(Exception):
    """Root of the tree.

    Attributes:
        code: the name of a `TritonError` code.
        traceback: the traceback of the cause, where the cause itself is gone; never sent to
            clients.
    """

    code: str = "INTERNAL"
    traceback: str = ""


class ModelError(BackendError):
    """An error about one model.

    Args:
        model: the model's name.
        found: what was found, as a clause.
        expected: what was expected, as a noun phrase.
        cure: what to do, as a sentence.
    """

    def __init__(self, model: str, found: str, *, expected: str = "", cure: str = "") -> None:
        sentence = f"model '{model}': {found}"
        if expected:
            sentence += f"; expected {expected}"
        sentence = sentence.rstrip(".")  # of another error, which ends with its own
        super().__init__(f"{sentence}. {cure}" if cure else f"{sentence}.")


class LoadError(ModelError):
    @classmethod
    def told(cls, sentence: str, traceback: str = "") -> LoadError:
        """An error that another process has put into words."""
        error = cls.__new__(cls)
        Exception.__init__(error, sentence)
        error.traceback = traceback
        return error


class ConfigError(LoadError):
    pass


class OptionError(LoadError):
    def __init__(self, model: str, key: str, value: str, accepted: str) -> None:
        super().__init__(
            model,
            f"the parameter {key} is '{value}'",
            expected=accepted,
            cure="Correct it in config.pbtxt.",
        )


class ArtifactError(LoadError):
    pass


class SourceError(LoadError):
    pass


class WeightsError(LoadError):
    """Lists at most `_SHOWN` keys of each kind: a wrong checkpoint has hundreds."""

    def __init__(
        self,
        model: str,
        file: str,
        *,
        missing: Collection[str] = (),
        unexpected: Collection[str] = (),
        shapes: Collection[str] = (),
        hint: str = "",
    ) -> None:
        lists = [
            f"{title} ({len(names)}): {shown(names)}"
            for title, names in (
                ("missing keys", missing),
                ("unexpected keys", unexpected),
                ("wrong shapes", shapes),
            )
            if names
        ]
        super().__init__(
            model,
            f"the weights in {file} do not fit the module: {'; '.join(lists)}",
            cure=hint
            or "Save module.state_dict() of the class that is served, or change"
            " MODEL_KWARGS so that the constructor builds the module the weights belong to.",
        )


class BindingError(LoadError):
    pass


class PlatformError(LoadError):
    pass


class CompileError(LoadError):
    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            model,
            f"torch.compile failed: {reason}",
            expected="a compiled model: COMPILE_REQUIRED or fullgraph is set",
            cure='Install what the compiler lacks, or set COMPILE_REQUIRED to "false" to serve the'
            " model eagerly.",
        )


class WarmupError(LoadError):
    pass


class InputError(ModelError):
    code = "INVALID_ARG"


class ForwardError(ModelError):
    """An exception of the model's own code.

    Args:
        model: the model's name.
        error: the exception.
        called: the name of the function that raised it.
    """

    def __init__(self, model: str, error: BaseException, called: str = "forward") -> None:
        super().__init__(model, f"{called}() raised {brief(error)}")


class HookError(ModelError):
    def __init__(self, model: str, stage: str, error: BaseException) -> None:
        super().__init__(model, f"{stage}() raised {brief(error)}")


class CallError(ModelError):
    """A call of another model; its code is that of the answer.

    Args:
        model: the model that was called.
        found: what came instead of a result, as a clause.
        code: the name of a `TritonError` code.
    """

    def __init__(
        self, model: str, found: str, *, code: str = "INTERNAL", expected: str = "", cure: str = ""
    ) -> None:
        super().__init__(model, found, expected=expected, cure=cure)
        self.code = code


class NoServerError(CallError):
    def __init__(self, model: str, inputs: Iterable[str]) -> None:
        super().__init__(
            model,
            f"it was called with {shown(inputs) or 'no inputs'} where no server executes requests:"
            " while a model loads, in `check`, or in a test",
            cure="For a test, torch_py_backend.composition.stand_in says what is called instead.",
        )


class OutputError(ModelError):
    pass


class InternalError(ModelError):
    def __init__(self, model: str) -> None:
        super().__init__(
            model, "the backend failed in a way that it does not know; the server's log has more"
        )


class UnavailableError(ModelError):
    code = "UNAVAILABLE"

    @classmethod
    def fatal(cls, model: str, reason: str) -> UnavailableError:
        """What every request is told, once an error has made the process useless."""
        return cls(
            model,
            f"this instance met a fatal error and answers no requests any more ({reason})",
            cure="It must be replaced: load the model anew.",
        )


class OutOfMemoryError(UnavailableError):
    """Without what torch says of it: who else uses how much of the server's memory."""

    def __init__(self, model: str) -> None:
        super().__init__(
            model,
            "the request does not fit in memory, not even a row at a time",
            cure="Try again later, or send less.",
        )


class StateMemoryError(UnavailableError):
    def __init__(self, model: str, name: str, needed: int, limit_mb: int, sequences: int) -> None:
        super().__init__(
            model,
            f"with the new state of sequence {name}, {sequences} sequences would take"
            f" {needed / _MEGABYTE:.1f} MB",
            expected=f"at most {limit_mb} MB, SEQUENCE_MEMORY_MB",
            cure="The state before this request stays. Try again when others have ended.",
        )


class CancelledError(ModelError):
    code = "CANCELLED"

    def __init__(self, model: str, when: str = "before it was run") -> None:
        super().__init__(model, f"the request was cancelled {when}")


class InstallError(BackendError):
    pass


class ServerError(BackendError):
    pass


class BenchError(BackendError):
    pass


class ArchiveError(BackendError):
    """An error about a file that is not a model yet; the arguments are those of ModelError."""

    def __init__(self, archive: str, found: str, *, expected: str = "", cure: str = "") -> None:
        sentence = f"{archive}: {found}"
        if expected:
            sentence += f"; expected {expected}"
        # What an archive says of itself may hold what a terminal takes for commands.
        super().__init__(printable(f"{sentence}. {cure}" if cure else f"{sentence}."))


class ProfileError(BackendError):
    pass


class TuneError(BackendError):
    pass


class PackError(BackendError):
    pass


_MEGABYTE = 1 << 20
_SHOWN = 8
_LONGEST = 500
# Absolute folders before a name; not what follows a letter (1/2/3, ../a/b) or is an address.
_PATH = re.compile(r"((?<=file://)|(?<![\w./])(?<!:/))/(?:[\w.@+~-]+/)+(?=[\w.@+~-])")
# The same in quotes, where folders may have blanks.
_QUOTED_PATH = re.compile(r"""(['"])/(?:[^'"]*/)+(?=[^'"/]+\1)""")
# Where an object lies in memory, and other machines' names in numbers.
_MEMORY_ADDRESS = re.compile(r"( at)? 0x[0-9a-fA-F]{6,}")
_NETWORK_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_TORCHSCRIPT = "TorchScript interpreter"


def shown(names: Iterable[str]) -> str:
    """The names, comma-separated, cut after `_SHOWN`."""
    listed = list(names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest


def brief(error: BaseException) -> str:
    """What an exception says, in one line that may leave the server.

    No traceback, no folder or address of the server, at most `_LONGEST` characters, all of them
    printable: what cannot be sent would fail the whole batch.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # of a class of the model's own
        lines = []
    # TorchScript's message is a traceback; what was raised stands in its last line.
    text = _harmless(lines[-1] if lines and _TORCHSCRIPT in lines[0] else " ".join(lines[:1]))
    kind = type(error).__name__
    if text.startswith(f"{kind}:") or not text:
        return (text or kind)[:_LONGEST]
    return f"{kind}: {text}"[:_LONGEST]


def quoted(text: str) -> str:
    """What another model's error says, in one line that may leave the server."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _harmless(" ".join(lines[:1]))[:_LONGEST]


def _harmless(text: str) -> str:
    text = _PATH.sub("", _QUOTED_PATH.sub(r"\1", text))
    text = _NETWORK_ADDRESS.sub("(address)", _MEMORY_ADDRESS.sub("", text))
    return printable(text)


def printable(text: str) -> str:
    """The text with a mark for each character that a terminal or a log would not show."""
    return "".join(one if one.isprintable() else "?" for one in text)
