"""Wraps a handler in a module that takes the columns of a batch and returns bytes."""

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
from torch_py_backend.errors import InputError, OutputError, UnavailableError, summarize
from torch_py_backend.torchserve.context import Context

# A handler: called with (requests, context).
Handle: TypeAlias = "Callable[[Any, Any], Any]"

_JSON, _TEXT = "application/json", "text/"
# Ranges of HTTP status codes: client errors, overload, server errors.
_CLIENT_ERROR = 400
_UNAVAILABLE = (429, 503, 507)
_SERVER_ERROR = 500


class Served(nn.Module):
    """Calls a handler with the rows of a batch and returns one answer for each.

    Args:
        config: the model's config.
        handle: the handler.
        context: the handler's context.
        content_type: the content type of bodies; empty: bytes.
        modules: the modules that the handler calls; their weights are the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        handle: Handle,
        context: Context,
        content_type: str,
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self._model = config.name
        self._handle = handle
        self._context = context
        self._decode = _decoder(content_type)
        self._prediction_error: type[Exception] = importlib.import_module(
            "ts.utils.util"
        ).PredictionException
        self._held = nn.ModuleList(modules)

    def forward(self, **fields: list[bytes]) -> Strings:
        """Return the handler's answers as bytes.

        Raises:
            InputError: the handler answers with a client error.
            UnavailableError: the handler answers with 429, 503 or 507.
            OutputError: the handler does not return one answer for each request.
        """
        decode = self._decode
        requests = [
            {name: decode(value) for name, value in zip(fields, row, strict=True)}
            for row in zip(*fields.values(), strict=True)
        ]
        self._context.receive(len(requests))
        try:
            answers = self._handle(requests, self._context)
        except self._prediction_error as error:
            self._raise_status(getattr(error, "error_code", None), getattr(error, "message", error))
            raise
        self._check(answers, len(requests))
        encoded: Strings = np.empty(len(answers), dtype=np.object_)
        encoded[:] = [self._encode(answer) for answer in answers]
        return encoded

    def _check(self, answers: Any, rows: int) -> None:
        if not isinstance(answers, list) or len(answers) != rows:
            count = f" of {len(answers)}" if isinstance(answers, list) else ""
            raise OutputError(
                self._model,
                f"the handler returned a {type(answers).__name__}{count} for {rows} requests",
                expected="a list with one answer for each request",
            )
        for processor in self._context.request_processor:
            if processor.status >= _CLIENT_ERROR:
                self._raise_status(processor.status, processor.phrase)
                raise OutputError(self._model, _message(processor.status, processor.phrase))

    def _raise_status(self, status: Any, message: Any) -> None:
        """Raise the error for a status; nothing if it is a server error."""
        if status in _UNAVAILABLE:
            raise UnavailableError(self._model, _message(status, message))
        if isinstance(status, int) and _CLIENT_ERROR <= status < _SERVER_ERROR:
            raise InputError(self._model, _message(status, message))

    def _encode(self, answer: Any) -> bytes:
        """Return an answer as the bytes that TorchServe sends."""
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
                f"the handler returned a {type(answer).__name__} that is no JSON:"
                f" {summarize(error)}",
                expected="bytes, text, a tensor, or what JSON can hold",
            ) from None


def _message(status: Any, message: Any) -> str:
    """Return an error message with the handler's status and message, without traceback or paths."""
    text = summarize(Exception(message)).removeprefix("Exception: ") if message else ""
    return f"the handler answered {status}" + (f": {text}" if text else "")


def _decoder(content_type: str) -> Callable[[bytes], Any]:
    """Return the decoder of bodies of this type; invalid bodies stay bytes."""
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
