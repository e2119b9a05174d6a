"""A client of one tritonserver: the states of its models, loads and unloads.

Loads and unloads use gRPC, where Triton has a thread for each load; over HTTP, other connections
would wait for it. Here, no thread waits: a call is a future that is polled.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.server.installation import refuse_in_shell

# With the key of restricted endpoints.
KEY_HEADER = "admin-key"
_REQUEST_S = 10.0
_UNLOAD_S = 30.0
_UNLOADED = "unloaded"
_NOT_POLLED = "failed to poll from model repository"
# What Triton puts before the reason of a failed load (the model, the version, the code), and after.
_NOISE = re.compile(
    r"^(?:(?:load failed for model '.*?'|version \d+ is at UNAVAILABLE state|Unknown|Internal"
    r"|Not found|Invalid argument|Unavailable|Unsupported|Already exists|TritonModelException): )+"
    r"|\n\nAt:.*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of a model in Triton's repository index.

    Attributes:
        ready: whether at least one version serves.
        unloaded: whether none serves, and one was unloaded or is being unloaded.
        reason: why a version does not serve that was not unloaded; it may have failed before.
        versions: the versions that serve; all versions if none serves.
    """

    name: str
    ready: bool = False
    unloaded: bool = False
    reason: str = ""
    versions: str = ""


def states(index: Iterable[Mapping[str, str]]) -> dict[str, ModelState]:
    """Return the state of each model by name from Triton's repository index of all versions."""
    grouped = collections.defaultdict[str, list[Mapping[str, str]]](list)
    for entry in index:
        grouped[entry["name"]].append(entry)
    models = {}
    for name, entries in grouped.items():
        serving = [entry for entry in entries if entry.get("state") == "READY"]
        reasons = [entry.get("reason", "") for entry in entries]
        is_unloaded = _UNLOADED in reasons or any(
            entry.get("state") == "UNLOADING" for entry in entries
        )
        failures = [reason for reason in reasons if reason not in ("", _UNLOADED)]
        versions = [entry.get("version", "") for entry in serving or entries]
        models[name] = ModelState(
            name,
            ready=bool(serving),
            unloaded=is_unloaded and not serving,
            reason=cause(name, failures[0]) if failures else "",
            versions=",".join(versions),
        )
    return models


def cause(model: str, reason: str) -> str:
    """Return Triton's reason for a line that has the model's name, without stack trace."""
    text = _NOISE.sub("", reason).replace(f"model '{model}': ", "")
    return text.strip(".; \n") or "no reason was given"


@dataclass(repr=False)
class TritonClient:
    """A client of one server.

    Attributes:
        key: the key of restricted endpoints; empty: there are none.
        poll_failure: returns why Triton could not read a model's folder; empty: unknown.
    """

    http_address: str
    grpc_address: str
    key: str = ""
    poll_failure: Callable[[str], str] = lambda _model: ""

    def __post_init__(self) -> None:
        self._headers = {KEY_HEADER: self.key} if self.key else {}
        self._metadata = [(f"triton-grpc-protocol-{KEY_HEADER}", self.key)] if self.key else []
        self._channel = grpc.insecure_channel(self.grpc_address)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def models(self, instances: Collection[str] = ()) -> dict[str, ModelState]:
        """Return the current states of the models in the repository, and of those with instances.

        Triton does not list models that were loaded with files under a new name.

        Raises:
            OSError: the server does not answer.
        """
        listed = states(self._request("repository/index", b"{}"))
        loaded = [name for name in instances if name not in listed and self.config(name)]
        return listed | {name: ModelState(name, ready=True) for name in loaded}

    def config(self, model: str) -> dict[str, Any]:
        """Return the config of a model; empty if it is not loaded, or without an answer."""
        with contextlib.suppress(OSError):
            return dict(self._request(f"models/{urllib.parse.quote(model, safe='')}/config"))
        return {}

    def _request(self, path: str, data: bytes | None = None) -> Any:
        url = f"http://{self.http_address}/v2/{path}"
        request = urllib.request.Request(url, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:  # noqa: S310
                # Names of folders are bytes, which need not be UTF-8.
                return json.loads(response.read().decode(errors="replace"))
        except http.client.HTTPException as error:  # it has died during its answer
            raise ConnectionError(repr(error)) from None

    def load(self, model: str, seconds: float) -> grpc.Future:
        """Begin to load a model.

        Raises:
            ToolError: Triton would wait for it forever.
        """
        refuse_in_shell(model)
        request = service_pb2.RepositoryModelLoadRequest
        return self._begin(self._service.RepositoryModelLoad, request, model, seconds)

    def unload(self, model: str) -> grpc.Future:
        """Begin to unload a model; its instances end soon after."""
        request = service_pb2.RepositoryModelUnloadRequest
        return self._begin(self._service.RepositoryModelUnload, request, model, _UNLOAD_S)

    def _begin(
        self,
        method: Any,
        request: Any,
        model: str,
        seconds: float,
    ) -> grpc.Future:
        # The name of a folder need not be UTF-8.
        message = request(model_name=model.encode(errors="replace").decode())
        return method.future(message, timeout=seconds, metadata=self._metadata, wait_for_ready=True)

    def failure(self, model: str, call: grpc.Future) -> str:
        """Return why a call that has ended failed; empty: it succeeded."""
        if call.code() is grpc.StatusCode.OK:
            return ""
        reason = str(call.details() or call.code())
        poll_failure = self.poll_failure(model) if _NOT_POLLED in reason else ""
        return cause(model, poll_failure or reason)

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._channel.close()
