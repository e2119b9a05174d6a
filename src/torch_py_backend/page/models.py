"""The page: the state of the models, requests to try them, and buttons to load and unload them.

Only the page itself may POST. What Triton's --restrict closes needs the browser's admin key.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.page import openapi

_REFRESH_S = 2.0
_GET_S = 2.0
# A stream of events ends before its connection does, and browsers connect again.
_EVENTS_S = 7.0
# Of requests of the form.
_MAX_REQUESTS = 4
_REQUEST_S = 10.0
_MAX_BYTES = 1 << 20
_LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(repr=False)
class ModelsPage:
    """The endpoints of the page.

    Attributes:
        address: host and port of Triton's HTTP endpoint, for this process.
        ports: those of Triton's HTTP and gRPC endpoints, for clients.
        key_header, key: the header with the admin key, and the key; an empty one fits no request.
        state: returns a problem of the server, and the state of each model by name.
        report: returns what a model reported when it was loaded.
        change: requests "load" or "unload" of a model.
    """

    address: str
    ports: Sequence[int]
    key_header: str
    key: str
    state: Callable[[], JsonObject]
    report: Callable[[str], JsonObject]
    change: Callable[[str, str], None]

    def __post_init__(self) -> None:
        # Not through a proxy. Triton waits for open connections when it stops.
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=_REQUEST_S,
            trust_env=False,
        )
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        self._collecting = asyncio.Lock()
        self._event, self._due = b"", 0.0
        self.routes = [
            Route("/events", self._events),
            Route("/openapi.json", self._openapi),
            Route("/models/{model}", self._details),
            Route("/models/{model}/infer", self._infer, methods=["POST"]),
            Route("/models/{model}/generate_stream", self._infer, methods=["POST"]),
            Route("/models/{model}/load", self._change, methods=["POST"]),
            Route("/models/{model}/unload", self._change, methods=["POST"]),
            Mount("/", StaticFiles(directory=Path(__file__).with_name("assets"), html=True)),
        ]

    async def _events(self, _request: Request) -> Response:
        return StreamingResponse(self._states(), media_type="text/event-stream")

    async def _states(self) -> AsyncIterator[bytes]:
        """Yield the state of all models; viewers share each event."""
        end = time.monotonic() + _EVENTS_S
        while True:
            async with self._collecting:
                if time.monotonic() >= self._due:
                    state = self.state() | {"key_header": self.key_header, "time": time.monotonic()}
                    state["statistics"] = await self._get(None, "stats")
                    self._event = b"retry: 2000\ndata: %s\n\n" % json.dumps(state).encode()
                    self._due = time.monotonic() + _REFRESH_S / 2
            yield self._event
            if time.monotonic() > end:
                return
            await asyncio.sleep(_REFRESH_S)

    async def _details(self, request: Request) -> Response:
        model = request.path_params["model"]
        config = await self._get(request, model, "config")
        report = {} if "error" in config else self.report(model)
        return JSONResponse({"config": config, "report": report, "ports": self.ports})

    async def _openapi(self, request: Request) -> Response:
        configs = [await self._get(request, name, "config") for name in self.state()["models"]]
        url = f"http://{request.url.replace(port=self.ports[0]).netloc}"
        return JSONResponse(openapi.document([c for c in configs if "error" not in c], url))

    def _url(self, *path: str) -> str:
        # The bytes of a folder's name need not be UTF-8.
        words = [urllib.parse.quote(word, safe="", errors="surrogateescape") for word in path]
        return f"http://{self.address}/v2/models/{'/'.join(words)}"

    async def _get(self, request: Request | None, *path: str) -> JsonObject:
        """Return the JSON of one of Triton's endpoints, as a browser may see it."""
        headers = self._headers(request) if request else []
        try:
            response = await self._client.get(self._url(*path), headers=headers, timeout=_GET_S)
            document: JsonObject = json.loads(response.content.decode(errors="replace"))
        except (httpx.HTTPError, ValueError):
            return {"error": "tritonserver does not answer"}
        return document

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request that are meant for Triton."""
        names = (self.key_header.encode(), _LENGTH_HEADER.lower().encode())
        return [header for header in request.headers.raw if header[0] in names]

    def _check(self, request: Request) -> tuple[str, str]:
        """Return the model and the action of a POST, if the page itself has sent it."""
        host = request.headers.get("Host")
        # Browsers add the origin of the page that sends a request.
        if not host or request.headers.get("Origin", "").partition("://")[2] != host:
            raise HTTPException(403, "Only this page may send requests to itself.")
        model = request.path_params["model"]
        if model not in self.state()["models"]:
            raise HTTPException(404, "There is no such model.")
        return model, request.scope["path"].rpartition("/")[2]

    async def _change(self, request: Request) -> Response:
        model, action = self._check(request)
        key = request.headers.get(self.key_header, "")
        if not key or not secrets.compare_digest(key.encode(), self.key.encode()):
            await asyncio.sleep(1)  # slows down guessing
            raise HTTPException(403, "This is not the admin key of the server.")
        self.change(action, model)
        return Response(status_code=202)

    async def _infer(self, request: Request) -> Response:
        url = self._url(*self._check(request))
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise HTTPException(413, "The request is larger than 1 MB; send it to Triton.")
        headers = self._headers(request)
        sent = self._client.stream("POST", url, content=bytes(body), headers=headers)
        return StreamingResponse(self._answer(sent), media_type="application/octet-stream")

    async def _answer(
        self, sent: AbstractAsyncContextManager[httpx.Response]
    ) -> AsyncIterator[bytes]:
        """Yield a line of JSON with the status of Triton's response, then its body as it comes."""
        end = time.monotonic() + _REQUEST_S
        if self._requests.locked():
            yield b'[429, null]\n{"error": "too many requests are in progress; try it again"}'
            return
        try:
            async with self._requests, sent as response:
                line = [response.status_code, response.headers.get(_LENGTH_HEADER)]
                yield b"%s\n" % json.dumps(line).encode()
                async for chunk in response.aiter_raw():
                    yield chunk
                    if time.monotonic() > end:
                        return
        except httpx.HTTPError as error:
            text = f"tritonserver did not answer ({type(error).__name__})"
            yield b"[504, null]\n%s" % json.dumps({"error": text}).encode()
