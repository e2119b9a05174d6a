"""Continues Triton's traces in the model's code, as OpenTelemetry's current context.

OpenTelemetry is imported only if tracing is enabled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.batching.grouping import Group
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, PlatformError, summarize

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)

_NAME = "torch_py_backend"
_CURE = "pip install 'torch-py-backend[tracing]' where Triton's stub runs, or remove TRACING."
# The context's key of Triton's trace, which calls of other models continue.
_HANDLE = "triton-trace"
# How long an instance that is unloaded waits until its last spans are sent.
_SECONDS_TO_SEND = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENTRY_POINTS = "opentelemetry_traces_exporter"
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class TracedItem(dict[str, Value]):
    """An item of a traced request.

    Attributes:
        context: the request's OpenTelemetry context.
    """

    __slots__ = ("context",)

    def __init__(self, item: Mapping[str, Value], context: Context) -> None:
        super().__init__(item)
        self.context = context

    def __or__(self, other: Mapping[str, Value]) -> TracedItem:  # type: ignore[override]
        """Return the item with other values, such as the state of a sequence."""
        return TracedItem({**self, **other}, self.context)


def check_available(config: ModelConfig, *, traced: bool) -> None:
    """Check, before the model is loaded, that TRACING can work.

    `traced` says whether requests of this server have traces.

    Raises:
        PlatformError: the server is too old, or opentelemetry-sdk is not installed.
    """
    if not config.options.tracing:
        return
    if not traced:
        raise PlatformError(
            config.name,
            "TRACING is set, and this server does not pass traces to models",
            expected="Triton 24.04 or later",
            cure="Remove TRACING.",
        )
    if not _installed():
        raise PlatformError(
            config.name, "TRACING is set, and opentelemetry-sdk is not installed", cure=_CURE
        )


def is_enabled(config: ModelConfig, *, traced: bool) -> bool:
    """Return whether to trace the model's requests.

    If TRACING is unset: yes if the model's code has imported OpenTelemetry, or if OTEL_* variables
    name an exporter. Called after the warm-up, when the code has imported what it uses.

    `traced` says whether requests of this server have traces.
    """
    if config.options.tracing is not None:
        return config.options.tracing
    used = "opentelemetry.context" in sys.modules or bool(_exporter_names())
    return traced and used and _installed()


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.sdk.trace") is not None
    except ImportError:
        return False


class Tracing:
    """Passes the trace contexts of an instance's requests to the code of its model.

    Code that is called for a batch runs in one span: a child of the first request's span, with
    links to those of the others. Code that is called for one request runs in its context.

    A tracer provider that the model's code has set is used.

    Raises:
        PlatformError: an exporter that OTEL_* variables name is not available.
    """

    def __init__(self, engine: Engine) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._model = engine.config.name
        self._provider = _create_provider(engine.config)
        self._api, self._context = trace, context
        self._extract = tracecontext.TraceContextTextMapPropagator().extract
        self._tracer = trace.get_tracer(_NAME)
        self._attributes = {
            "triton.model_name": engine.config.name,
            "triton.model_version": engine.config.version,
        }
        self._contexts: Sequence[Context | None] = ()
        engine.instrument(self._traced)

    def close(self) -> None:
        """Send the remaining spans. Closing twice is allowed."""
        provider, self._provider = self._provider, None
        if provider is not None:
            # In a thread: the exporter retries for long if the collector is not reachable.
            thread = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
            thread.start()
            thread.join(_SECONDS_TO_SEND)

    # --- requests ------------------------------------------------------------------------------

    def carry(self, item: Item, context_json: str, handle: Any) -> Item:
        """Return the item with the context of its request.

        `context_json` has the fields of a carrier, and `handle` is the trace in Triton's utilities.
        """
        context = self._context.set_value(_HANDLE, handle, self._context.Context())
        try:
            context = self._extract(json.loads(context_json), context)
        except Exception as error:  # the client sends parts of it; they must not fail the request
            log.warning("model '%s': a trace cannot be read: %s.", self._model, summarize(error))
            return item
        return TracedItem(item, context)

    def handle(self) -> Any:
        """Return the trace for calls of other models; None: no request is traced."""
        return self._context.get_value(_HANDLE)

    @contextlib.contextmanager
    def streaming(self, item: Item) -> Iterator[Callable[[BackendError | None], None]]:
        """Start a span for a stream that begins within this context.

        Yields:
            A function that ends the span. Its argument is the error of the stream, or None.
        """
        context: Context | None = getattr(item, "context", None)
        if context is None:
            yield lambda _: None
            return
        span = self._tracer.start_span("stream", context, attributes=self._attributes)

        def end(error: BackendError | None) -> None:
            if error is not None:
                span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
            span.end()

        with self._attached(self._api.set_span_in_context(span, context)):
            yield end

    # --- stages of the engine ------------------------------------------------------------------

    def _traced(self, stage: str, function: Callable[..., object]) -> Callable[..., object]:
        """Return a stage with its contexts and spans."""
        wrappers: Mapping[str, Callable[..., object]] = {
            "run": self._run,
            "hook": self._hook,
            "call": self._call,
        }
        return partial(wrappers[stage], function) if stage in wrappers else function

    def _run(self, function: Callable[..., object], items: Sequence[Item]) -> object:
        contexts: list[Context | None] = [getattr(item, "context", None) for item in items]
        if not any(contexts):
            return function(items)
        self._contexts = contexts
        try:
            return function(items)
        finally:
            self._contexts = ()

    def _hook(self, function: Callable[..., object], position: int, *args: object) -> object:
        """Run a hook in the context of its request."""
        context = self._contexts[position] if self._contexts else None
        if context is None:
            return function(position, *args)
        with self._attached(context):
            return function(position, *args)

    def _call(self, function: Callable[..., object], group: Group, *, copy_outputs: bool) -> object:
        """Run the call of a group in a span."""
        contexts = [
            context
            for position in (group.positions if self._contexts else ())
            if (context := self._contexts[position]) is not None
        ]
        if not contexts:
            return function(group, copy_outputs=copy_outputs)
        first, *others = contexts
        spans = (self._api.get_current_span(context) for context in others)
        with (
            self._attached(first),
            self._tracer.start_as_current_span(
                "forward",
                links=[self._api.Link(span.get_span_context()) for span in spans],
                attributes={**self._attributes, "torch_py_backend.requests": len(group.items)},
            ),
        ):
            return function(group, copy_outputs=copy_outputs)

    @contextlib.contextmanager
    def _attached(self, context: Context) -> Iterator[None]:
        token = self._context.attach(context)
        try:
            yield
        finally:
            self._context.detach(token)


# --- exporters ---------------------------------------------------------------------------------


def _create_provider(config: ModelConfig) -> Any:
    """Set a tracer provider for the exporters that OTEL_* variables name, and return it.

    Returns:
        None if the model's code has set a provider, or if no exporter is named.

    Raises:
        PlatformError: an exporter is not installed, or fails with its variables.
    """
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider, export  # noqa: PLC0415

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    exporters = [_create_exporter(config, name) for name in _exporter_names()]
    if not exporters:
        return None
    provider = TracerProvider(shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def _exporter_names() -> list[str]:
    """Return the exporters that OTEL_* variables name."""
    default = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    value = os.environ.get("OTEL_TRACES_EXPORTER") or default
    names = [name.strip() for name in value.split(",")]
    return [name for name in names if name not in ("", "none")]


def _create_exporter(config: ModelConfig, name: str) -> Any:
    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
        name = _OTLP.get(protocol, protocol)
    points = list(entry_points(group=_ENTRY_POINTS, name=name))
    if not points:
        installed = sorted({point.name for point in entry_points(group=_ENTRY_POINTS)})
        raise PlatformError(
            config.name,
            f"OTEL_* variables name the exporter {name}, which is not installed",
            expected=f"one of {', '.join(installed)}",
            cure=_CURE,
        )
    try:
        return points[0].load()()
    except Exception as error:  # any error of an exporter with its variables
        raise PlatformError(
            config.name, f"the exporter {name} that OTEL_* variables name fails: {summarize(error)}"
        ) from error
