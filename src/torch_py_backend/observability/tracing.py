"""Triton's traces go on in the model's code: their context is OpenTelemetry's current one there.

OpenTelemetry is imported where somebody has a use for it, and not before.
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
from torch_py_backend.errors import BackendError, PlatformError, brief

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)

_NAME = "torch_py_backend"
_CURE = "pip install 'torch-py-backend[tracing]' where Triton's stub runs, or take TRACING out."
# Where the context has Triton's own handle of the trace, which calls of other models go on with.
_HANDLE = "triton-trace"
# How long an instance that ends waits for its last spans to be sent.
_SECONDS_TO_SEND = 5.0
_SWITCHED_BY = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Traced(dict[str, Value]):
    """An item of a request that is traced.

    Attributes:
        context: the request's.
    """

    __slots__ = ("context",)

    def __init__(self, item: Mapping[str, Value], context: Context) -> None:
        super().__init__(item)
        self.context = context

    def __or__(self, other: Mapping[str, Value]) -> Traced:  # type: ignore[override]
        """The item of a step with its sequence's state."""
        return Traced({**self, **other}, self.context)


def refuse_impossible(config: ModelConfig, *, told: bool) -> None:
    """Find out before a model is loaded whether TRACING asks for what cannot be.

    Args:
        config: the model's config.
        told: whether requests of this server can be asked for their traces.

    Raises:
        PlatformError: it does.
    """
    if not config.options.tracing:
        return
    if not told:
        raise PlatformError(
            config.name,
            "TRACING is set, and this server does not tell models of traces",
            expected="Triton 24.04 or later",
            cure="Take TRACING out.",
        )
    if not _installed():
        raise PlatformError(
            config.name, "TRACING is set, and opentelemetry-sdk is not installed", cure=_CURE
        )


def wanted(config: ModelConfig, *, told: bool) -> bool:
    """Whether the model's requests are to be asked for their traces.

    Unless TRACING says so: where somebody would see the context. Asked when the model is warmed up,
    by when its code has imported what it uses.

    Args:
        config: the model's config.
        told: whether requests of this server can be asked.
    """
    if config.options.tracing is not None:
        return config.options.tracing
    used = "opentelemetry.context" in sys.modules or bool(_names())
    return told and used and _installed()


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.sdk.trace") is not None
    except ImportError:
        return False


class Tracing:
    """Carries the traces of one instance's requests into the code of its model.

    What is called for several requests runs in one span, a child of the first one's that links to
    the others; what is called for one runs in the context of that one.

    Args:
        engine: the model, loaded: what its code has set up is used.

    Raises:
        PlatformError: OTEL_* variables ask for what is not there.
    """

    def __init__(self, engine: Engine) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._model = engine.config.name
        self._provider = _provide(engine.config)
        self._api, self._context = trace, context
        self._extract = tracecontext.TraceContextTextMapPropagator().extract
        self._tracer = trace.get_tracer(_NAME)
        self._attributes = {
            "triton.model_name": engine.config.name,
            "triton.model_version": engine.config.version,
        }
        self._contexts: Sequence[Context | None] = ()
        engine.surround(self._around)

    def close(self) -> None:
        """Send what was not sent yet; to call it twice is no error."""
        provider, self._provider = self._provider, None
        if provider is not None:
            # A collector that is gone would be asked again and again.
            sending = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
            sending.start()
            sending.join(_SECONDS_TO_SEND)

    # --- requests ------------------------------------------------------------------------------

    def carry(self, item: Item, told: str, handle: Any) -> Item:
        """An item with its request's trace.

        Args:
            item: what the request brought.
            told: the trace's context, as Triton has it: a carrier's fields as JSON.
            handle: the trace, as Triton's utilities have it.
        """
        context = self._context.set_value(_HANDLE, handle, self._context.Context())
        try:
            context = self._extract(json.loads(told), context)
        except Exception as error:  # part of it comes from the client: not the request's fault
            log.warning("model '%s': a trace cannot be read: %s.", self._model, brief(error))
            return item
        return Traced(item, context)

    def handle(self) -> Any:
        """The trace that a call of another model belongs to; None: none."""
        return self._context.get_value(_HANDLE)

    @contextlib.contextmanager
    def streaming(self, item: Item) -> Iterator[Callable[[BackendError | None], None]]:
        """Within it, what begins a stream is started; what it yields is called at its end.

        With the error that the stream has ended with, if it has.
        """
        context: Context | None = getattr(item, "context", None)
        if context is None:
            yield lambda _: None
            return
        span = self._tracer.start_span("stream", context, attributes=self._attributes)
        with self._attached(self._api.set_span_in_context(span, context)):
            yield partial(self._ended, span)

    def _ended(self, span: Any, error: BackendError | None) -> None:
        if error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        span.end()

    # --- around the engine's stages ------------------------------------------------------------

    def _around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A stage with contexts and spans around it."""
        wrap = {"run": self._run, "hook": self._hook, "call": self._call}.get(stage)
        return function if wrap is None else wrap(function)

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(items: Sequence[Item]) -> Any:
            contexts: list[Context | None] = [getattr(item, "context", None) for item in items]
            if not any(contexts):
                return function(items)
            self._contexts = contexts
            try:
                return function(items)
            finally:
                self._contexts = ()

        return run

    def _hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """For one request: it runs in the context of that one."""

        def hook(place: int, *stage: Any) -> Any:
            context = self._contexts[place] if self._contexts else None
            if context is None:
                return function(place, *stage)
            with self._attached(context):
                return function(place, *stage)

        return hook

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """For several requests: it runs in a span."""

        def call(group: Group, *, more: bool) -> Any:
            if not self._contexts:
                return function(group, more=more)
            found = (self._contexts[place] for place in group.positions)
            contexts = [context for context in found if context is not None]
            if not contexts:
                return function(group, more=more)
            with self._span(contexts, len(group.items)):
                return function(group, more=more)

        return call

    @contextlib.contextmanager
    def _span(self, contexts: Sequence[Context], requests: int) -> Iterator[None]:
        first, *others = contexts
        spans = (self._api.get_current_span(one) for one in others)
        with (
            self._attached(first),
            self._tracer.start_as_current_span(
                "forward",
                links=[self._api.Link(one.get_span_context()) for one in spans],
                attributes={**self._attributes, "torch_py_backend.requests": requests},
            ),
        ):
            yield

    @contextlib.contextmanager
    def _attached(self, context: Context) -> Iterator[None]:
        token = self._context.attach(context)
        try:
            yield
        finally:
            self._context.detach(token)


# --- where spans go ----------------------------------------------------------------------------


def _provide(config: ModelConfig) -> Any:
    """What sends spans where OTEL_* variables say; None: the model's code sees to it, or nobody.

    Raises:
        PlatformError: an exporter is not installed, or refuses its variables.
    """
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider, export  # noqa: PLC0415

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    exporters = [_exporter(config, name) for name in _names()]
    if not exporters:
        return None
    provider = TracerProvider(shutdown_on_exit=False)
    for one in exporters:
        provider.add_span_processor(export.BatchSpanProcessor(one))
    trace.set_tracer_provider(provider)
    return provider


def _names() -> list[str]:
    """The exporters that the environment asks for."""
    switched = "otlp" if any(os.environ.get(name) for name in _SWITCHED_BY) else "none"
    wished = os.environ.get("OTEL_TRACES_EXPORTER") or switched
    names = [name.strip() for name in wished.split(",")]
    return [name for name in names if name not in ("", "none")]


def _exporter(config: ModelConfig, name: str) -> Any:
    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
        name = _OTLP.get(protocol, protocol)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        known = sorted({one.name for one in entry_points(group="opentelemetry_traces_exporter")})
        raise PlatformError(
            config.name,
            f"OTEL_* variables ask for the exporter {name}, which is not installed",
            expected=f"one of {', '.join(known)}",
            cure=_CURE,
        )
    try:
        return found[0].load()()
    except Exception as error:  # whatever an exporter has against its variables
        raise PlatformError(
            config.name, f"the exporter {name} that OTEL_* variables ask for fails: {brief(error)}"
        ) from error
