"""`serve`: a real server for notebooks, scripts and tests, in a child process.

Imports neither torch nor a client until a server is used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from torch_py_backend.errors import InputError, ServerError, about, join_names

if TYPE_CHECKING:
    import tritonclient.grpc
    from typing_extensions import Self

_START = (
    # Replaces the current folder, whose files must not shadow other modules.
    "import sys; sys.path[0] = sys.argv.pop(1);"
    " from torch_py_backend import __main__; __main__.main_of_child()"
)
_SERVING = re.compile(
    r"(?:serving|listening) on http://(\S+) and grpc://(\S+); metrics on http://(\S+)/metrics,"
    r" readiness on http://(\S+)/ready"
)
_POLL_S = 0.05
_REQUEST_S = 30.0
# `serve` itself ends a server that does not stop, after 35 seconds.
_STOP_S = 60.0


class LocalServer:
    """A server on this machine, as a context manager; see `serve`.

    Attributes:
        repository: the absolute path or the URL of the model repository.
        http_address: host and port of the HTTP endpoint.
        grpc_address: host and port of the gRPC endpoint.
        metrics_address: host and port of the Prometheus metrics.
    """

    def __init__(
        self, repository: str | os.PathLike[str], arguments: Sequence[str], timeout: float
    ) -> None:
        is_url = "://" in str(repository)
        self.repository = str(repository) if is_url else str(Path(repository).absolute())
        self._arguments = arguments
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.ExitStack()
        self.http_address = self.grpc_address = self.metrics_address = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and wait until every model is READY.

        Raises:
            ServerError: the server or a model does not start.
        """
        if self._process is not None:
            raise ServerError("the server runs already; stop it first.")
        # For Triton's log, too.
        folder = tempfile.mkdtemp(prefix="torch-py-backend-")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            output = Path(folder) / "serve.log"
            command = [sys.executable, "-c", _START, str(Path(__file__).parents[2]), "serve"]
            with output.open("wb") as file:
                # The pipe is closed when this process ends, also if it is killed; then the child
                # stops the server. In a session of its own, the child does not receive Ctrl-C.
                self._process = subprocess.Popen(  # noqa: S603  this Python, this package
                    [*command, self.repository, *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"TMPDIR": folder, "TERM": "dumb"},
                    start_new_session=True,
                )
            self._wait(self._process, output)
        except BaseException as error:  # also Ctrl-C
            if folder in str(error):  # the message names Triton's log
                self._stack.pop_all()
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        self.__dict__.pop("client", None)
        process, self._process = self._process, None
        with contextlib.closing(self._stack):
            if process is None:
                return
            cast("Any", process.stdin).close()
            process.terminate()  # another child of this process may hold the pipe open
            try:
                process.wait(_STOP_S)
            except BaseException:  # a second Ctrl-C, or it does not end
                process.kill()
                raise

    @functools.cached_property
    def client(self) -> tritonclient.grpc.InferenceServerClient:
        """A client of the gRPC endpoint."""
        client = _grpc().InferenceServerClient(self.grpc_address)
        self._stack.callback(client.close)
        return client

    def infer(self, model: str, inputs: object, *, version: str = "") -> dict[str, NDArray[Any]]:
        """Send one request, and return the outputs by name.

        Args:
            model: the model's name.
            inputs: a dict of values by input name, or the value of the only input: a torch tensor,
                an array, numbers, or a list of str or bytes, with the batch dimension if the model
                has one. Numbers are converted to the type of the input.
            version: the version; by default the latest.

        Returns:
            Arrays; strings are arrays of bytes.

        Raises:
            InputError: the inputs do not fit the model.
            tritonclient.utils.InferenceServerException: the server refuses the request.
        """
        metadata = self.client.get_model_metadata(model, version)
        tensors = {tensor.name: tensor for tensor in metadata.inputs}
        with about(model):
            if not isinstance(inputs, Mapping):
                if len(tensors) != 1:
                    names = join_names(tensors)
                    raise InputError(
                        f"one value was given for the inputs {names}",
                        expected="a dict of values by input name",
                    )
                inputs = dict.fromkeys(tensors, inputs)
            unknown = inputs.keys() - tensors.keys()
            if unknown:
                raise InputError(
                    f"it has no input {join_names(sorted(unknown))}",
                    expected=f"names among {join_names(tensors)}",
                )
            sent = [_input(tensors[name], value) for name, value in inputs.items()]
        result = self.client.infer(model, sent, model_version=version)
        outputs = [output.name for output in result.get_response().outputs]
        return {key: result.as_numpy(key).copy() for key in outputs}  # they are read-only

    def _wait(self, process: subprocess.Popen[bytes], output: Path) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            text = output.read_text(encoding="utf-8", errors="replace")
            match = _SERVING.search(text)
            if match is not None:
                self.http_address, self.grpc_address, self.metrics_address, health = match.groups()
                _check_ready(health)
                return
            if ended:
                _, _, sentence = text.rpartition("error: ")
                boxed = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
                raise ServerError(" ".join(boxed) or sentence.strip() or "serve has ended.")
            time.sleep(_POLL_S)
        raise ServerError(f"the models were not loaded within {self._timeout:g} seconds.")


def serve(
    repository: str | os.PathLike[str],
    *,
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    arguments: Sequence[str] = (),
    timeout: float = 600.0,
) -> LocalServer:
    """Serve a model repository in a child process until the end of a `with` block.

        with torch_py_backend.serve("models") as server:
            outputs = server.infer("net", x)

    The block begins when every model is READY. The server ends with the block, and with this
    process if it is killed.

    Args:
        repository: the model repository: a folder, or the URL of one in an object store.
        http_port: the port for HTTP; 0 takes a free one, here and below.
        grpc_port: the port for gRPC.
        metrics_port: the port for the metrics.
        arguments: more arguments of the command `torch-py-backend serve`.
        timeout: seconds until every model is READY.

    Raises:
        ServerError: on entering the block: there is no server, a port is in use, or a model does
            not load; with the server's own sentence.
    """
    ports = (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port), ("health", 0))
    options = [f"--{service}-port={port}" for service, port in ports]
    return LocalServer(repository, [*options, *arguments], timeout)


def _check_ready(health: str) -> None:
    """Raise ServerError with the reason why the first model does not serve."""
    try:
        with urllib.request.urlopen(f"http://{health}/ready", timeout=_REQUEST_S):
            return
    except urllib.error.HTTPError as error:
        document = json.loads(error.read())
    reasons = document.get("models") or {"": document.get("reason", "not ready")}
    name, reason = next(iter(reasons.items()))
    _, model, text = reason.partition(f"model '{name}'")
    raise ServerError(f"{model}{text}" if model else f"model '{name}' {reason}")


def _grpc() -> Any:
    try:
        import tritonclient.grpc  # noqa: PLC0415  in an extra
    except ImportError as error:
        raise ServerError(
            f"requests need Triton's client: {error}."
            " Install it with pip install 'torch-py-backend[server]'."
        ) from None
    return tritonclient.grpc


def _input(tensor: Any, value: Any) -> Any:
    """Return a value as an input of tritonclient, in the type of the model's input."""
    if hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if tensor.datatype == "BYTES":
        # Objects: numpy's own types for text drop zeros at the end.
        array = np.array(value, dtype=object)
        fits = all(isinstance(item, (bytes, str)) for item in array.flat)
        # tritonclient would send the representation of numpy's own bytes.
        array.flat[:] = [bytes(item) if isinstance(item, bytes) else item for item in array.flat]
        problem = "" if fits else f"is {np.asarray(value).dtype}"
    else:
        array, problem = _converted(np.asarray(value), tensor.datatype)
    if problem:
        raise InputError(
            f"input '{tensor.name}' {problem}",
            expected=f"values of {tensor.datatype}",
        )
    shape = list(tensor.shape)
    if array.ndim == len(shape) - 1 and shape[-1:] == [1]:  # one value for each row
        array = array[..., None]
    sent = _grpc().InferInput(tensor.name, list(array.shape), tensor.datatype)
    sent.set_data_from_numpy(array)
    return sent


def _converted(array: NDArray[Any], datatype: str) -> tuple[NDArray[Any], str]:
    """Return numbers in a type of Triton, and what prevents that; empty: nothing."""
    from tritonclient.utils import triton_to_np_dtype  # noqa: PLC0415  in an extra

    dtype = np.dtype(triton_to_np_dtype(datatype))
    # Integers of any type may have values that fit.
    is_integer = array.dtype.kind in "iu" and dtype.kind in "iu"
    has_kind = is_integer or datatype == "BF16" or np.can_cast(array.dtype, dtype, "same_kind")
    if array.dtype.kind in "OSU" or not has_kind:
        return array, f"is {array.dtype}"
    with np.errstate(over="ignore"):
        numbers = array.astype(dtype)
    changed = numbers != array if is_integer else np.isinf(numbers) & np.isfinite(array)
    return numbers, f"has values beyond {datatype}" if changed.any() else ""
