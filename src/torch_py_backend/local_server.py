"""`serve`: a real server for notebooks, scripts and tests, supervised by this process."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import triton_to_np_dtype

from torch_py_backend.errors import InputError, ToolError, about, join_names
from torch_py_backend.model_folders import remote_repository
from torch_py_backend.server import tritonserver
from torch_py_backend.server.serving import Serving
from torch_py_backend.server.supervisor import Event

if TYPE_CHECKING:
    from typing_extensions import Self

# Arrays by the names of the outputs.
Outputs: TypeAlias = dict[str, NDArray[Any]]
_LOGGER = logging.getLogger(__name__)


class LocalServer:
    """A server on this machine that serves a model repository, for a `with` block.

        with torch_py_backend.serve("models") as server:
            outputs = server.infer("net", x)

    The block begins when every model is READY. The server ends with the block, and with this
    process if it is killed. Models that die meanwhile are reloaded.

    Args:
        repository: the model repository: a folder, or the URL of one in an object store.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        reload, allow_empty, cache, tritonserver: as the options of `torch-py-backend serve`.
        arguments: more arguments for tritonserver itself.
        timeout: seconds until every model is READY.

    Attributes:
        http_address, grpc_address, metrics_address: host and port; empty: the server does not run.

    Raises:
        ToolError: there is no server, or a model does not load; with the server's own sentence.
        OSError: a port is in use.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        reload: bool = False,
        allow_empty: bool = False,
        cache: Path | None = None,
        tritonserver: Path | None = None,
        arguments: Sequence[str] = (),
        timeout: float = 600.0,
    ) -> None:
        is_url = "://" in str(repository)
        self.repository = str(repository) if is_url else str(Path(repository).absolute())
        self._timeout, self._cache = timeout, cache
        self._options: dict[str, Any] = {
            "ports": (http_port, grpc_port, metrics_port, 0),
            "reload": reload,
            "allow_empty": allow_empty,
            "tritonserver": tritonserver,
            "arguments": arguments,
        }
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._serving: Serving | None = None
        self.http_address = self.grpc_address = self.metrics_address = ""

    def __repr__(self) -> str:
        if self._serving is None:
            return f"<LocalServer of {self.repository}: not started>"
        models = self._serving.supervisor.snapshot.models
        states = ", ".join(f"{name} ({reason or 'serves'})" for name, reason in models.items())
        addresses = f"{self.url} and grpc://{self.grpc_address}"
        return f"<LocalServer on {addresses}: {states or 'no models'}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and wait until every model is READY."""
        if self._thread is not None:
            raise ToolError("the server runs already; stop it first.")
        path = remote_repository.local(self.repository, self._cache, _report)
        serving = Serving(path, _report, **self._options)
        log = serving.server.log = tritonserver.create_log()
        started: futures.Future[None] = futures.Future()
        self._ended.clear()
        # Not this thread, which may end: tritonserver ends with the one that starts it.
        self._thread = threading.Thread(target=self._run, args=(serving, log, started), daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        try:
            started.result(self._timeout)
            for name, reason in serving.supervisor.snapshot.models.items():
                if reason:
                    raise ToolError(f"model '{name}' {reason}.")
        except BaseException as error:
            self.stop()
            if isinstance(error, futures.TimeoutError):
                raise ToolError(f"the loads took longer than {self._timeout:g} seconds.") from None
            raise
        self._serving, server = serving, serving.server
        self.http_address, self.grpc_address = server.http_address, server.grpc_address
        self.metrics_address = server.metrics_address
        _report(f"serving on {self.url} and grpc://{self.grpc_address}")

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        if client := self.__dict__.pop("client", None):
            client.close()
        self._serving = None
        self.http_address = self.grpc_address = self.metrics_address = ""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        atexit.unregister(self.stop)

    def _run(
        self,
        serving: Serving,
        log: Path,
        started: futures.Future[None],
    ) -> None:
        """Run the server until `stop`; set the result when all loads have ended."""
        try:
            # What instances write into their temporary folder is removed with them.
            with tempfile.TemporaryDirectory(prefix="torch-py-backend-") as folder:
                serving.server.variables["TMPDIR"] = folder
                code = serving.run(lambda: started.set_result(None), self._ended.is_set)
                if code is not None:
                    raise ToolError(f"tritonserver has ended; its log says why: {log}.")
                if not started.done():
                    raise ToolError("the server was stopped during its start.")
            log.unlink()
        except Exception as error:
            if str(log) not in str(error):
                log.unlink()
            if started.done():
                _LOGGER.exception("the server has ended.")
            else:
                started.set_exception(error)

    @property
    def url(self) -> str:
        """The URL of the HTTP endpoint."""
        self._check_started()
        return f"http://{self.http_address}"

    @functools.cached_property
    def client(self) -> tritonclient.grpc.InferenceServerClient:
        """A client of the gRPC endpoint."""
        self._check_started()
        return tritonclient.grpc.InferenceServerClient(self.grpc_address)

    def infer(self, model: str, inputs: Any, *, version: str = "") -> Outputs:
        """Send one request, and return the outputs by name.

        Args:
            model: its name.
            inputs: a dict of values by input name, or the value of the only input: a torch tensor,
                an array, numbers, or a list of str or bytes, with the batch dimension if the model
                has one. Numbers are converted to the type of the input.
            version: by default the latest.

        Returns:
            Arrays; strings are arrays of bytes.

        Raises:
            InputError: the inputs do not fit the model.
            ToolError: the server was not started.
            tritonclient.utils.InferenceServerException: the server refuses the request.
        """
        sent = self._inputs(model, inputs, version)
        return _outputs(self.client.infer(model, sent, model_version=version))

    def stream(
        self, model: str, inputs: Any, *, version: str = "", timeout: float | None = None
    ) -> Iterator[Outputs]:
        """Send one request to a decoupled model, and yield the outputs of each response.

        The arguments and errors are those of `infer`, and `timeout` the seconds until the last
        response; a stream whose process dies does not end. The request is cancelled when the
        iterator is closed.
        """
        sent = self._inputs(model, inputs, version)
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        has_ended = False
        # A client has one stream at a time.
        client = tritonclient.grpc.InferenceServerClient(self.grpc_address)
        try:
            client.start_stream(
                lambda result, error: answers.put((result, error)), stream_timeout=timeout
            )
            client.async_stream_infer(
                model, sent, model_version=version, enable_empty_final_response=True
            )
            while not has_ended:
                result, error = answers.get()
                has_ended = True
                if error is not None:
                    raise error
                parameters = result.get_response().parameters
                has_ended = parameters["triton_final_response"].bool_param
                if outputs := _outputs(result):
                    yield outputs
        finally:
            # Triton waits at its end for a stream that was cancelled after an error.
            client.stop_stream(cancel_requests=not has_ended)
            client.close()

    def _inputs(self, model: str, inputs: Any, version: str) -> list[Any]:
        metadata = self.client.get_model_metadata(model, version)
        tensors = {tensor.name: tensor for tensor in metadata.inputs}
        with about(model):
            if not isinstance(inputs, Mapping) and len(tensors) == 1:
                inputs = dict.fromkeys(tensors, inputs)
            if not isinstance(inputs, Mapping) or inputs.keys() - tensors.keys():
                raise InputError(
                    "the request does not name the model's inputs",
                    expected=f"a dict of values by the names {join_names(tensors)}",
                )
            return [_input(tensors[name], value) for name, value in inputs.items()]

    def _check_started(self) -> None:
        if self._serving is None:
            raise ToolError(
                "the server was not started; use it in `with torch_py_backend.serve(...) as"
                " server:`, or call start() first."
            )


serve = LocalServer


def _report(line: str | Event) -> None:
    """Log what happens, and print it on a terminal."""
    _LOGGER.info("%s", line)
    if sys.stderr.isatty():
        print(line, file=sys.stderr)  # noqa: T201


def _outputs(result: Any) -> Outputs:
    names = [output.name for output in result.get_response().outputs]
    return {name: result.as_numpy(name).copy() for name in names}  # they are read-only


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
        for place, item in enumerate(array.flat):
            if isinstance(item, bytes):
                array.flat[place] = bytes(item)
    else:
        given = np.asarray(value)
        fits = given.dtype.kind not in "OSU"
        if fits:
            with np.errstate(over="ignore", invalid="ignore"):
                array = given.astype(triton_to_np_dtype(tensor.datatype))
            # Floating-point numbers may be rounded, integers may not.
            error = 0.0 if array.dtype.kind in "biu" else 0.01
            fits = np.allclose(array, given, rtol=error, atol=error, equal_nan=True)
    if not fits:
        raise InputError(
            f"input '{tensor.name}' has other values", expected=f"values of {tensor.datatype}"
        )
    shape = list(tensor.shape)
    if array.ndim == len(shape) - 1 and shape[-1:] == [1]:  # one value for each row
        array = array[..., None]
    sent = tritonclient.grpc.InferInput(tensor.name, list(array.shape), tensor.datatype)
    sent.set_data_from_numpy(array)
    return sent
