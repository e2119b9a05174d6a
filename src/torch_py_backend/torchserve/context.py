"""The context of a handler: `ts.context` of TorchServe.

It has the attributes and methods that TorchServe documents for handlers.
https://docs.pytorch.org/serve/custom_service.html
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.torchserve.manifest import Manifest

# The release of TorchServe whose interface this is.
VERSION = "0.12.0"
_OK = 200

# The config of the model that this process serves, for handlers, which load weights themselves.
current_config: ContextVar[ModelConfig] = ContextVar("current_config")


class Dimension:
    """`ts.metrics.dimension.Dimension`: a name and a value."""

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.value = value


class Metrics:
    """`context.metrics`, and the metrics that it returns: accepts calls and records nothing."""

    def add_metric(self, *_args: object, **_named: object) -> Metrics:
        return self

    add_counter = add_time = add_size = add_percent = add_error = add_metric
    get_metric = add_metric_to_cache = add_or_update = update = reset = add_metric


class RequestProcessor:
    """The headers of a request, and the status and headers of its response."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)
        self.response_headers: dict[str, str] = {}
        self.status = _OK
        self.phrase: str | None = None

    def get_request_property(self, key: str) -> str | None:
        return self.headers.get(key)

    def get_request_properties(self) -> dict[str, str]:
        return self.headers

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self.status, self.phrase = code, reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        self.response_headers[key] = value


class Context:
    """The argument of `initialize` and `handle`.

    Args:
        config: the model's config.
        manifest: the manifest of the unpacked archive.
        yaml_config: the contents of its model-config.yaml.
        gpu: the GPU to use; None: none, or the handler's own choice.
        headers: the headers that every request gets.
    """

    def __init__(
        self,
        config: ModelConfig,
        manifest: Manifest,
        yaml_config: Mapping[str, object],
        gpu: int | None,
        headers: Mapping[str, str],
    ) -> None:
        self.model_name = config.name
        # The values below are any JSON or YAML.
        self.manifest: dict[str, Any] = dict(manifest.document)
        self.model_yaml_config = dict(yaml_config)
        self.system_properties: dict[str, Any] = {
            "model_dir": str(manifest.folder),
            "gpu_id": gpu,
            "batch_size": max(1, config.max_batch_size),
            "server_name": "MMS",  # the name that TorchServe reports
            "server_version": VERSION,
            "limit_max_image_pixels": True,
        }
        self.metrics = Metrics()
        self.stopping_criteria: object = None
        self.request_ids: dict[int, str] | None = None
        self.request_processor: Sequence[RequestProcessor] = ()
        self._headers = headers
        self._numbers = itertools.count()

    def receive(self, rows: int) -> None:
        """Prepare for a batch of `rows` requests."""
        self.request_ids = {row: str(next(self._numbers)) for row in range(rows)}
        self.request_processor = [RequestProcessor(self._headers) for _ in range(rows)]

    def get_request_id(self, idx: int = 0) -> str | None:
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.request_processor[idx].headers.get(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].headers

    def get_sequence_id(self, idx: int) -> str | None:
        return self.get_request_header(idx, "ts_request_sequence_id")

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].response_headers[key] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].response_headers

    def set_response_status(self, code: int = _OK, phrase: str = "", idx: int = 0) -> None:
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = _OK, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        return self.request_processor[idx].status, self.request_processor[idx].phrase
