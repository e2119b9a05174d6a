"""Makes the trace contexts of requests OpenTelemetry's current context in the model's code.

Triton makes the spans of a request. Code of the model that makes spans, or calls other services,
continues its trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch_py_backend import values
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

    def carry(self, item: Item, context_json: str, handle: object) -> Item:
        """Return the item with the context of its request.

        `context_json` has the fields of a carrier, and `handle` is the trace in Triton's utilities.
        """
        context = self._api.set_value(_HANDLE, handle, self._api.Context())
        try:
            context = self._extract(json.loads(context_json), context)
        except Exception as error:  # the client sends parts of it; they must not fail the request
            log.warning("a trace cannot be read: %s.", summarize(error))
            return item
        attached = partial(self._attached, context)
        return RequestItem(item, attached, values.parameters(item), values.step(item))

    def handle(self) -> object:
        """Return the trace for calls of other models; None: the current request has none."""
        return self._api.get_value(_HANDLE)

    @contextlib.contextmanager
    def _attached(self, context: Context) -> Iterator[None]:
        token = self._api.attach(context)
        try:
            yield
        finally:
            self._api.detach(token)
