"""Liveness and readiness over HTTP, for Kubernetes and load balancers.

GET /live           200 while the models are monitored and tritonserver answers; else 503
GET /ready          200 if every model that should serve does; else 503
GET /ready/MODEL    the same for one model, with the warnings of its load; else 404
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torch_py_backend.errors import sanitize_line


class Snapshot(NamedTuple):
    """The readiness of all models at one moment.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        warnings: the warnings of the last load of each model that serves.
        others: the models of the repository that are not to serve.
    """

    models: Mapping[str, str]
    problem: str
    warnings: Mapping[str, Sequence[str]]
    others: Sequence[str] = ()


class Probes:
    """The endpoints; while `stopping`, they report that nothing is ready: the server is stopped."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.stopping = False
        self._snapshot = snapshot
        self.routes = [
            Route("/live", self._live),
            Route("/ready", self._ready),
            Route("/ready/{model}", self._ready),
        ]

    async def _live(self, _request: Request) -> Response:
        return _response("live", self._snapshot().problem)

    async def _ready(self, request: Request) -> Response:
        snapshot = self._snapshot()
        model = request.path_params.get("model")
        if problem := "the server is being stopped" if self.stopping else snapshot.problem:
            return _response("ready", problem)
        if model is None:
            models = snapshot.models.items()
            reasons = {name: sanitize_line(reason) for name, reason in models if reason}
            return _response("ready", "models do not serve" if reasons else "", models=reasons)
        if model not in snapshot.models:
            return _response("ready", "no such model should serve", 404)
        warnings = [sanitize_line(text) for text in snapshot.warnings.get(model, ())]
        return _response("ready", sanitize_line(snapshot.models[model]), warnings=warnings)


def _response(
    key: str,
    reason: str,
    status: int = 503,
    **more: object,
) -> Response:
    """Return 200 without a reason, else the status; empty values are left out."""
    details = {"reason": reason, **more}
    body = {name: value for name, value in details.items() if value}
    # In ASCII: a name given on the command line need not be UTF-8.
    text = json.dumps({key: not reason} | body)
    return Response(text, status if reason else 200, media_type="application/json")
