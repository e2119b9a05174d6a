"""Makes the trace contexts of requests OpenTelemetry's current context in the model's code.

Triton makes the spans of a request. Code of the model that makes spans, or calls other services,
continues its trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from torch_py_backend import values
from torch_py_backend.adapter.messages import Read, Request
from torch_py_backend.errors import summarize
from torch_py_backend.values import Item, RequestItem

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)

# The context's key of Triton's trace, which calls of other models continue.
_HANDLE = "triton-trace"


class TraceContexts:
    """The trace contexts of a model's requests.

    Raises:
        ImportError: the process has no opentelemetry-api.
    """

    def __init__(self) -> None:
        from opentelemetry import context  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._api = context
        self._extract = tracecontext.TraceContextTextMapPropagator().extract

    def added(self, read: Read, *, kept: bool = False) -> Read:
        """Return a function that adds the contexts of traced requests to the items that it reads.

        `kept`: items are used after execute() has returned; Triton owns its handle of a trace.
        """

        def read_traced(requests: Sequence[Request]) -> list[Item]:
            items = read(requests)
            for place, request in enumerate(requests):
                trace = request.trace()
                fields = trace.get_context()
                if fields:
                    items[place] = self._add(items[place], fields, None if kept else trace)
            return items

        return read_traced

    def handle(self) -> Any:
        """Return the trace for calls of other models; None: the current request has none."""
        return self._api.get_value(_HANDLE)

    def _add(self, item: Item, fields: str, handle: Any) -> Item:
        context = self._api.set_value(_HANDLE, handle, self._api.Context())
        try:
            context = self._extract(json.loads(fields), context)
        except Exception as error:  # the client sends parts of it; they must not fail the request
            log.warning("a trace cannot be read: %s.", summarize(error))
            return item
        attached = partial(self._attached, context)
        return RequestItem(item, attached, values.parameters(item), values.step(item))

    @contextlib.contextmanager
    def _attached(self, context: Context) -> Iterator[None]:
        token = self._api.attach(context)
        try:
            yield
        finally:
            self._api.detach(token)


def contexts() -> TraceContexts | None:
    """Return what carries traces; None: the server (before 24.04) or the process has none."""
    if not hasattr(getattr(pb_utils, "InferenceRequest", None), "trace"):
        return None
    try:
        return TraceContexts()
    except ImportError:
        return None
