"""A handler as a module: the columns of a batch become requests, its answers become bytes."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from torch_py_backend.batching.gather_scatter import Strings
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import InputError, OutputError, UnavailableError, brief
from torch_py_backend.torchserve.context import Context

# What is called with (requests, context).
Handle: TypeAlias = "Callable[[Any, Any], Any]"

_JSON, _TEXT = "application/json", "text/"
# HTTP: who refuses, who is busy, and where a server's own failures begin.
_REFUSED = 400
_UNAVAILABLE = (429, 503, 507)
_SERVER_FAILED = 500


class Served(nn.Module):
    """A handler as a module: called with the columns of a batch, it gives one answer for each row.

    Args:
        config: the model's config.
        handle: the handler.
        context: what the handler is told.
        content_type: what bodies are; empty: bytes.
        held: the modules that the handler calls: their weights are the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        handle: Handle,
        context: Context,
        content_type: str,
        held: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self._model = config.name
        self._handle = handle
        self._context = context
        self._decode = _decoder(content_type)
        self._refusal: type[Exception] = importlib.import_module(
            "ts.utils.util"
        ).PredictionException
        self._held = nn.ModuleList(held)

    def forward(self, **fields: list[bytes]) -> Strings:
        """The handler's answers.

        Raises:
            InputError, UnavailableError: the handler refuses the requests with such a status.
            OutputError: it returns something else than an answer for each request.
        """
        decode = self._decode
        requests = [
            {name: decode(value) for name, value in zip(fields, row, strict=True)}
            for row in zip(*fields.values(), strict=True)
        ]
        self._context.receive(len(requests))
        try:
            answers = self._handle(requests, self._context)
        except self._refusal as error:
            self._refuse(getattr(error, "error_code", None), getattr(error, "message", error))
            raise
        self._check(answers, len(requests))
        encoded: Strings = np.empty(len(answers), dtype=np.object_)
        encoded[:] = [self._encode(answer) for answer in answers]
        return encoded

    def _check(self, answers: Any, rows: int) -> None:
        if not isinstance(answers, list) or len(answers) != rows:
            many = f" of {len(answers)}" if isinstance(answers, list) else ""
            raise OutputError(
                self._model,
                f"the handler returned a {type(answers).__name__}{many} for {rows} requests",
                expected="a list with one answer for each request",
            )
        for one in self._context.request_processor:
            if one.status >= _REFUSED:
                self._refuse(one.status, one.phrase)
                raise OutputError(self._model, _said(one.status, one.phrase))

    def _refuse(self, status: Any, message: Any) -> None:
        """Raise what the client gets for such a status, unless it says that the server failed."""
        if status in _UNAVAILABLE:
            raise UnavailableError(self._model, _said(status, message))
        if isinstance(status, int) and _REFUSED <= status < _SERVER_FAILED:
            raise InputError(self._model, _said(status, message))

    def _encode(self, answer: Any) -> bytes:
        """An answer as TorchServe sends it."""
        if isinstance(answer, bytes | bytearray):
            return bytes(answer)
        if isinstance(answer, torch.Tensor):
            file = io.BytesIO()
            torch.save(answer, file)
            return file.getvalue()
        try:
            text = answer if isinstance(answer, str) else json.dumps(answer, indent=2)
            return text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise OutputError(
                self._model,
                f"the handler returned a {type(answer).__name__} that is no JSON: {brief(error)}",
                expected="bytes, text, a tensor, or what JSON can hold",
            ) from None


def _said(status: Any, message: Any) -> str:
    """A handler's own words, as far as they may leave the server."""
    text = brief(Exception(message)).removeprefix("Exception: ") if message else ""
    return f"the handler answered {status}" + (f": {text}" if text else "")


def _decoder(content_type: str) -> Callable[[bytes], Any]:
    """What TorchServe makes of a body of this type; what is not of its type stays bytes."""
    if content_type == _JSON:
        return _json
    return _text if content_type.startswith(_TEXT) else bytearray


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return bytearray(body)


def _text(body: bytes) -> Any:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return bytearray(body)
