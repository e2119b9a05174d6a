"""A client of one tritonserver: the states of its models, loads and unloads.

Loads use gRPC: over HTTP, other connections would wait for them. A call is a future that is polled.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.server.installation import refuse_in_shell

# With the key of restricted endpoints.
KEY_HEADER = "admin-key"
_REQUEST_S = 10.0
# This machine is not reached through a proxy, which variables may name.
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_UNLOAD_S = 30.0
_UNLOADED = "unloaded"
# What Triton logs where its reason is only this; the parser of protobuf writes the line before.
_NOT_POLLED = "failed to poll from model repository"
_POLL_FAILED = (
    # Other threads may write a few lines between the two.
    r"^(?:.*Error parsing text-format inference\.ModelConfig: (.*)\n(?:.*\n){{0,3}}?)?"
    r".*\] \"?Poll failed for model directory '{}': (.*?)\"?$"
)
# The end of the log in which a reason is searched.
_LOG_BYTES = 1 << 18
# What Triton puts before the reason of a failed load (the model, the version, the code), and after.
_NOISE = re.compile(
    r"^(?:(?:load failed for model '.*?'|version \d+ is at UNAVAILABLE state|Unknown|Internal"
    r"|Not found|Invalid argument|Unavailable|Unsupported|Already exists|TritonModelException): )+"
    r"|\n\nAt:.*",
    re.DOTALL,
)


class ModelState(NamedTuple):
    """The state of a model in Triton's repository index.

    Attributes:
        ready: whether at least one version serves.
        unloaded: whether none serves, and one was unloaded or is being unloaded.
        reason: why a version does not serve that was not unloaded; it may have failed before.
    """

    ready: bool = False
    unloaded: bool = False
    reason: str = ""


def states(index: Iterable[Mapping[str, str]]) -> dict[str, ModelState]:
    """Return the state of each model by name from Triton's repository index of all versions."""
    grouped = collections.defaultdict[str, list[Mapping[str, str]]](list)
    for entry in index:
        grouped[entry["name"]].append(entry)
    found = {}
    for name, entries in grouped.items():
        in_state = [entry.get("state") for entry in entries]
        reasons = [entry.get("reason", "") for entry in entries]
        failures = [reason for reason in reasons if reason not in ("", _UNLOADED)]
        is_ready = "READY" in in_state
        found[name] = ModelState(
            ready=is_ready,
            unloaded=not is_ready and ("UNLOADING" in in_state or _UNLOADED in reasons),
            reason=cause(name, failures[0]) if failures else "",
        )
    return found


def cause(model: str, reason: str) -> str:
    """Return Triton's reason for a line that has the model's name, without stack trace."""
    text = _NOISE.sub("", reason).replace(f"model '{model}': ", "")
    return text.strip(".; \n") or "no reason was given"


def logged(log: Path | None, pattern: str) -> str:
    """Return the groups of the last match of a pattern near the end of a log, if any.

    Only for the text of a reason: no decision depends on the log, which may be on a terminal.
    """
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode(errors="replace")
    text = ""
    for match in re.finditer(pattern, lines, re.MULTILINE):
        text = ": ".join(filter(None, match.groups()[::-1]))
    # Triton escapes a message as a string of C.
    return " ".join(text.replace('\\"', '"').replace("\\n", " ").split())


@dataclass(repr=False)
class TritonClient:
    """A client of one server, with the `key` of restricted endpoints; empty: there are none."""

    http_address: str
    grpc_address: str
    key: str = ""
    log: Path | None = None

    def __post_init__(self) -> None:
        self._headers = {KEY_HEADER: self.key} if self.key else {}
        channel = grpc.insecure_channel(self.grpc_address, [("grpc.enable_http_proxy", 0)])
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.close = channel.close  # pending calls then fail

    def models(self, instances: Collection[str] = ()) -> dict[str, ModelState]:
        """Return the states of the models in the repository; OSError if the server has no answer.

        Triton does not list models of `instances` that were loaded with files under a new name.
        """
        listed = states(self._request("repository/index", b"{}"))
        loaded = [name for name in instances if name not in listed and self.config(name)]
        return listed | dict.fromkeys(loaded, ModelState(ready=True))

    def config(self, model: str) -> dict[str, Any]:
        """Return the config of a model; empty if it is not loaded, or without an answer."""
        with contextlib.suppress(OSError):
            return dict(self._request(f"models/{urllib.parse.quote(model, safe='')}/config"))
        return {}

    def _request(self, path: str, data: bytes | None = None) -> Any:
        url = f"http://{self.http_address}/v2/{path}"
        request = urllib.request.Request(url, data, self._headers)
        try:
            with _OPEN(request, timeout=_REQUEST_S) as response:
                # Names of folders are bytes, which need not be UTF-8.
                return json.loads(response.read().decode(errors="replace"))
        except http.client.HTTPException as error:  # it has died during its answer
            raise ConnectionError(repr(error)) from None

    def load(self, model: str, seconds: float) -> grpc.Future:
        """Begin to load a model; ToolError if Triton would wait for it forever."""
        refuse_in_shell(model)
        return self._begin("RepositoryModelLoad", model, seconds)

    def unload(self, model: str) -> grpc.Future:
        """Begin to unload a model; its instances end soon after."""
        return self._begin("RepositoryModelUnload", model, _UNLOAD_S)

    def _begin(self, method: str, model: str, seconds: float) -> grpc.Future:
        # The name of a folder need not be UTF-8.
        name = model.encode(errors="replace").decode()
        request = getattr(service_pb2, f"{method}Request")(model_name=name)
        metadata = [(f"triton-grpc-protocol-{name}", key) for name, key in self._headers.items()]
        call = getattr(self._service, method)
        return call.future(request, timeout=seconds, metadata=metadata, wait_for_ready=True)

    def failure(self, model: str, call: grpc.Future) -> str:
        """Return why a call that has ended failed; empty: it succeeded."""
        if call.code() is grpc.StatusCode.OK:
            return ""
        reason = str(call.details() or call.code())
        if _NOT_POLLED in reason:
            reason = logged(self.log, _POLL_FAILED.format(re.escape(model))) or reason
        return cause(model, reason)
