"""Makes the trace contexts of requests OpenTelemetry's current context in the model's code.

Triton makes the spans of a request. Code of the model that makes spans, or calls other services,
continues its trace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter.messages import Read, Request
from torch_py_backend.errors import summarize
from torch_py_backend.values import Item, RequestItem

log = logging.getLogger(__name__)


def traced(read: Read) -> Read | None:
    """Return a function that reads requests and adds the trace contexts of those that have one.

    None: the server (before 24.04), or the process, which lacks opentelemetry-api, has no traces.
    """
    try:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    except ImportError:
        return None
    if not hasattr(pb_utils.InferenceRequest, "trace"):
        return None
    extract = tracecontext.TraceContextTextMapPropagator().extract

    def read_traced(requests: Sequence[Request]) -> list[Item]:
        items = read(requests)
        for place, (request, item) in enumerate(zip(requests, items, strict=True)):
            fields = request.trace().get_context()
            if fields:
                try:
                    span = trace.get_current_span(extract(json.loads(fields)))
                except Exception as error:  # the client sends parts of it
                    log.warning("a trace cannot be read: %s.", summarize(error))
                    continue
                found = item if isinstance(item, RequestItem) else RequestItem(item)
                found.context = partial(trace.use_span, span)
                items[place] = found
        return items

    return read_traced
