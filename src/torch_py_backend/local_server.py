"""`serve`: a real server for notebooks, scripts and tests, supervised by this process."""

from __future__ import annotations

import atexit
import functools
import html
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import triton_to_np_dtype

from torch_py_backend.errors import InputError, ToolError, join_names
from torch_py_backend.model_folders import remote_repository
from torch_py_backend.server import serving
from torch_py_backend.server.supervisor import Event
from torch_py_backend.server.tritonserver import Server, create_log

if TYPE_CHECKING:
    from typing_extensions import Self

# Arrays by the names of the outputs.
Outputs: TypeAlias = dict[str, NDArray[Any]]
# Messages of any size, and not through a proxy that variables name.
_UNLIMITED = ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)
_CHANNEL = [*_UNLIMITED, ("grpc.enable_http_proxy", 0)]
_LOGGER = logging.getLogger(__name__)


@dataclass(repr=False)
class LocalServer:
    """A server on this machine that serves a model repository, for a `with` block.

        with torch_py_backend.serve("models") as server:
            outputs = server.infer("net", x)

    The block begins when every model is READY; models that die are reloaded. The server ends with
    the block, and with this process if it is killed.

    Attributes:
        repository: the model repository: a folder, or the URL of one in an object store.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        reload, allow_empty, cache, tritonserver: as the options of `torch-py-backend serve`.
        arguments: more arguments for tritonserver itself.
        timeout: seconds until every model is READY.
        http_address, grpc_address, metrics_address: host and port; empty: the server does not run.
        page_url: the page with the state of the models, which a notebook shows as a link.

    Raises:
        ToolError: there is no server, or a model does not load; with the server's own sentence.
        OSError: a port is in use.
    """

    repository: str | os.PathLike[str]
    _: KW_ONLY
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    reload: bool = False
    allow_empty: bool = False
    cache: Path | None = None
    tritonserver: Path | None = None
    arguments: Sequence[str] = ()
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.http_address = self.grpc_address = self.metrics_address = self.page_url = ""

    def __repr__(self) -> str:
        return f"<LocalServer of {self.repository}: {self.http_address or 'not started'}>"

    def _repr_html_(self) -> str:
        text = html.escape(repr(self))
        return f'{text} <a href="{self.page_url}" target="_blank">{self.page_url}</a>'

    def start(self) -> Self:
        """Start the server, wait until every model is READY, and return the server."""
        if self._thread is not None:
            raise ToolError("the server runs already; stop it first.")
        server = Server(
            remote_repository.local(str(self.repository), self.cache, _report),
            (self.http_port, self.grpc_port, self.metrics_port, 0),
            executable=self.tritonserver,
            arguments=self.arguments,
            own_temporary=True,
        )
        names = serving.take_names(server, allow_empty=self.allow_empty)
        started: futures.Future[None] = futures.Future()
        self._ended.clear()
        # Not this thread, which may end: tritonserver ends with the one that starts it.
        self._thread = threading.Thread(
            target=self._run, args=(server, names, started), daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)
        try:
            started.result(self.timeout)
        except BaseException as error:
            self.stop()
            if isinstance(error, futures.TimeoutError):
                raise ToolError(f"the loads took longer than {self.timeout:g} seconds.") from None
            raise
        self.http_address, self.grpc_address = server.http_address, server.grpc_address
        self.metrics_address = server.metrics_address
        self.page_url = f"http://{server.health_address}"
        _report(f"serving on {self.url} and grpc://{self.grpc_address}; page on {self.page_url}")
        return self

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        if client := self.__dict__.pop("client", None):
            client.close()
        self.http_address = self.grpc_address = self.metrics_address = self.page_url = ""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        atexit.unregister(self.stop)

    def _run(
        self,
        server: Server,
        names: Sequence[str],
        started: futures.Future[None],
    ) -> None:
        """Run the server until `stop`; set the result when every model is READY."""

        def check_loads(reasons: Mapping[str, str]) -> None:
            for name, reason in reasons.items():
                if reason:
                    raise ToolError(f"model '{name}' {reason}.")
            started.set_result(None)

        server.log = log = create_log()
        try:
            serving.run(server, names, _report, check_loads, self._ended.is_set, reload=self.reload)
            if not started.done():
                raise ToolError("the server was stopped during its start.")
        except Exception as error:
            if started.done():
                _LOGGER.exception("the server has ended.")
            else:
                started.set_exception(error)
            if str(log) in str(error):
                return
        log.unlink()

    @property
    def url(self) -> str:
        """The URL of the HTTP endpoint."""
        self._check_started()
        return f"http://{self.http_address}"

    @functools.cached_property
    def client(self) -> InferenceServerClient:
        """A client of the gRPC endpoint."""
        self._check_started()
        return InferenceServerClient(self.grpc_address, channel_args=_CHANNEL)

    def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
    ) -> Outputs:
        """Send one request, and return the outputs by name; strings are arrays of bytes.

        Args:
            model: its name.
            inputs: a dict of values by input name, or the value of the only input: a torch tensor,
                an array, numbers, or a list of str or bytes, with the batch dimension if the model
                has one. Numbers are converted to the type of the input.
            version: by default the latest.

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
        response; a stream whose process dies does not end. To close the iterator cancels it.
        """
        sent = self._inputs(model, inputs, version)
        answers = queue.SimpleQueue[Any]()
        has_ended = False
        # A client has one stream at a time.
        client = InferenceServerClient(self.grpc_address, channel_args=_CHANNEL)
        try:
            client.start_stream(lambda **answer: answers.put(answer), stream_timeout=timeout)
            client.async_stream_infer(model, sent, version, enable_empty_final_response=True)
            while not has_ended:
                answer = answers.get()
                has_ended = True
                if answer["error"] is not None:
                    raise answer["error"]
                parameters = answer["result"].get_response().parameters
                has_ended = parameters["triton_final_response"].bool_param
                if outputs := _outputs(answer["result"]):
                    yield outputs
        finally:
            # Triton waits at its end for a stream that was cancelled after an error.
            client.stop_stream(cancel_requests=not has_ended)
            client.close()

    def _inputs(
        self,
        model: str,
        inputs: Any,
        version: str,
    ) -> list[InferInput]:
        """Return values as inputs of tritonclient, in the types of the model's inputs."""
        metadata = self.client.get_model_metadata(model, version)
        tensors = {tensor.name: tensor for tensor in metadata.inputs}
        if not isinstance(inputs, Mapping) and len(tensors) == 1:
            inputs = dict.fromkeys(tensors, inputs)
        if not isinstance(inputs, Mapping) or inputs.keys() - tensors.keys():
            raise InputError(
                f"the request does not name the inputs of model '{model}'",
                expected=f"a dict of values by the names {join_names(tensors)}",
            )
        sent = []
        for name, value in inputs.items():
            datatype, shape = tensors[name].datatype, tensors[name].shape
            array = _array(name, value, datatype)
            if array.ndim == len(shape) - 1 and shape[-1] == 1:  # one value for each row
                array = array[..., None]
            tensor = InferInput(name, list(array.shape), datatype)
            sent.append(tensor.set_data_from_numpy(array))
        return sent

    def _check_started(self) -> None:
        if not self.grpc_address:
            raise ToolError("the server does not run; call start() first, or use a `with` block.")


serve = LocalServer


def _report(line: str | Event) -> None:
    """Log what happens, and print it on a terminal."""
    _LOGGER.info("%s", line)
    if sys.stderr.isatty():
        print(line, file=sys.stderr)  # noqa: T201


def _outputs(result: InferResult) -> Outputs:
    names = [output.name for output in result.get_response().outputs]
    return {name: result.as_numpy(name).copy() for name in names}  # they are read-only


def _array(name: str, value: Any, datatype: str) -> NDArray[Any]:
    """Return the value of an input as an array of its Triton datatype; strings are bytes."""
    array: NDArray[Any]
    if datatype == "BYTES":
        # tritonclient would send the representation of other objects, also of numpy's own bytes.
        array = np.vectorize(
            lambda text: text.encode() if isinstance(text, str) else b"".join([text]),
            otypes=[object],
        )(value)
        return array
    if hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    given = np.asarray(value)
    array = given.astype(triton_to_np_dtype(datatype))
    if array.dtype.kind in "iu" and not np.array_equal(array, given):
        raise InputError(f"input '{name}' has other values", expected=f"values of {datatype}")
    return array
