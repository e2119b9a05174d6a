"""Loads a TorchServe archive, which is served by its own handler.

The archive is unpacked in the version folder. As in TorchServe's worker, the handler's module is
imported from the archive's folder, which is also the working directory; its function or its only
class is initialized, and called with a list of requests.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.batching.gather_scatter import Strings
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    ArchiveError,
    ArtifactError,
    BackendError,
    ConfigError,
    InputError,
    OptionError,
    OutputError,
    SourceError,
    UnavailableError,
    join_names,
    sanitize_line,
    summarize,
)
from torch_py_backend.loading import python_source
from torch_py_backend.loading.loaded import Loaded, warn_unused
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing, Signature
from torch_py_backend.torchserve import stand_in
from torch_py_backend.torchserve.context import Context, current_config
from torch_py_backend.torchserve.manifest import Manifest

log = logging.getLogger(__name__)

# A handler, called with a list of requests, which are dicts, and the context. A function that is a
# handler is first called with None, to initialize itself.
Handle: TypeAlias = "Callable[[list[dict[str, Any]] | None, Context], object]"

# HTTP status codes: the first client error, overload, the first server error.
_CLIENT_ERROR = 400
_UNAVAILABLE = (429, 503, 507)
_SERVER_ERROR = 500


def load(artifact: Artifact, config: ModelConfig, device: torch.device | None) -> Loaded:
    """Load an archive that is unpacked in the version folder.

    Raises:
        LoadError: it cannot be served.
    """
    if config.sequencing is not None or config.decoupled:
        raise ConfigError(
            config.name,
            f"{artifact.path.name} is {artifact.kind.value}, and config.pbtxt has sequence_batching"
            " or a decoupled transaction policy",
            cure="A handler sends one response per request and keeps no state; remove that.",
        )
    tensors = (*config.inputs, *config.outputs)
    if (
        any(spec.dtype.triton != "BYTES" for spec in tensors)
        or any(spec.dims not in ((), (1,)) for spec in config.inputs)
        or len(config.outputs) != 1
    ):
        raise ConfigError(
            config.name,
            f"config.pbtxt has the tensors {join_names(map(str, tensors))}",
            expected="inputs and one output of TYPE_STRING with dims: [ 1 ], as a request to"
            " TorchServe has fields and one answer",
        )
    warn_unused(config, "method", "model_class", "model_factory", "weights")
    arguments = tuple(
        Argument(
            spec.name,
            not spec.optional,
            Passing.KEYWORD,
            ArgumentType.BYTES,
            f"{spec.name}: list[bytes]",
        )
        for spec in config.inputs
    )
    served = _initialize(config, artifact.path, device)
    return Loaded(artifact, served, Signature(arguments, name="handle"), served)


def _initialize(config: ModelConfig, folder: Path, device: torch.device | None) -> Served:
    """Import and initialize the handler of an archive."""
    kwargs = config.options.model_kwargs or {}
    content_type = kwargs.get("content_type", "")
    if kwargs.keys() - {"content_type"} or not isinstance(content_type, str):
        raise OptionError(
            config.name,
            "MODEL_KWARGS",
            json.dumps(kwargs),
            '{"content_type": "…"}, which is all that a TorchServe archive takes',
        )
    content_type = content_type.partition(";")[0].strip().lower()
    try:
        manifest = Manifest.read(folder, folder.name)
        yaml_config = manifest.settings()
    except ArchiveError as error:
        raise ArtifactError(config.name, str(error).rstrip(".")) from error
    gpu = device.index if device is not None and device.type == "cuda" else None
    headers = {"Content-Type": content_type} if content_type else {}
    context = Context(config, manifest, yaml_config, gpu, headers)
    if not stand_in.install():
        log.info("model '%s': TorchServe is installed, and its own handlers are used.", config.name)
    current_config.set(config)  # not reset: a handler may initialize itself later
    os.chdir(folder)  # handlers open files of the archive by relative paths
    try:
        with python_source.importing_from(folder):
            package = "" if manifest.handler_is_included else "ts.torch_handler."
            module = importlib.import_module(f"{package}{manifest.handler_module}")
            handle, initialize, instances = _entry_point(config, module, manifest)
            initialize(context)
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # the handler's own code runs here
        path = Path(f"{manifest.handler_module}.py").absolute()
        raise SourceError(
            config.name,
            f"the handler {manifest.handler} fails at {python_source.error_location(error, path)}",
        ) from error
    for instance in instances:
        _compile(config, instance)
    values = [value for owner in (module, *instances) for value in vars(owner).values()]
    modules = {id(value): value for value in values if isinstance(value, nn.Module)}
    return Served(config, handle, context, content_type, [*modules.values()])


def _entry_point(
    config: ModelConfig, module: ModuleType, manifest: Manifest
) -> tuple[Handle, Callable[[Context], object], Sequence[object]]:
    """Return the handler's function, its initialization, and the objects that may hold its model.

    The handler is the function that the manifest names, or the module's only class.
    """
    handle: Handle | None = getattr(module, manifest.handler_function, None)
    if handle is not None:
        initialize: Callable[[Context], object] = partial(handle, None)
        # The module of a function may hold instances of handlers.
        instances = [value for value in vars(module).values() if hasattr(type(value), "handle")]
    else:
        # A module of `stand_in` holds only what it provides, defined elsewhere.
        provided = module.__spec__ is not None and module.__spec__.loader is None
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and hasattr(value, "handle")
            and (provided or value.__module__ == module.__name__)
        ]
        if len(classes) != 1:
            names = join_names(cls.__name__ for cls in classes) or "no class with handle()"
            raise SourceError(
                config.name,
                f"the handler {module.__name__} defines {names}, and no function"
                f" {manifest.handler_function}()",
                expected="one class with initialize() and handle(), or that function",
            )
        handler = classes[0]()
        handle, initialize, instances = handler.handle, handler.initialize, [handler]
    if inspect.iscoroutinefunction(handle):
        raise SourceError(
            config.name,
            f"{handle.__name__}() is a coroutine in the handler {manifest.handler}",
            expected="a function that returns its answers",
        )
    return handle, initialize, instances


def _compile(config: ModelConfig, instance: object) -> None:
    """Compile the attribute `model` of a handler, if the config says so.

    Raises:
        OptionError: torch.compile does not accept the parameters.
    """
    model = getattr(instance, "model", None)
    compiled_by_handler = hasattr(model, "_orig_mod")
    if not torch_compile.requested(config) or compiled_by_handler:
        return
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        log.warning(
            "model '%s': TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect: the handler's model is a"
            " %s.",
            config.name,
            type(model).__name__,
        )
        return
    # Code that cannot be compiled runs eagerly; torch logs it.
    suppress_errors = not torch_compile.required(config)
    torch._dynamo.config.suppress_errors = suppress_errors  # noqa: SLF001  it has no other name
    try:
        model.compile(**(config.options.compilation or {}))
    except Exception as error:  # any error of torch.compile for an unknown value
        raise torch_compile.parameter_error(config, error) from error


# --- requests and answers --------------------------------------------------------------------


class Served(nn.Module):
    """Calls a handler with the rows of a batch and returns one answer for each.

    The weights of `modules`, which the handler calls, are the model's.
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
        self._content_type = content_type
        # TorchServe's own class, if TorchServe is installed.
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
        requests = [
            {name: self._decode(value) for name, value in zip(fields, row, strict=True)}
            for row in zip(*fields.values(), strict=True)
        ]
        self._context.receive(len(requests))
        try:
            answers = self._handle(requests, self._context)
        except self._prediction_error as error:
            message = getattr(error, "message", error)
            refusal = self._refusal(getattr(error, "error_code", None), message)
            if isinstance(refusal, OutputError):  # a server error: the log has its traceback
                raise
            raise refusal from error
        if not isinstance(answers, list) or len(answers) != len(requests):
            count = f" of {len(answers)}" if isinstance(answers, list) else ""
            raise OutputError(
                self._model,
                f"the handler returned a {type(answers).__name__}{count} for"
                f" {len(requests)} requests",
                expected="a list with one answer for each request",
            )
        for processor in self._context.request_processor:
            if processor.status >= _CLIENT_ERROR:
                raise self._refusal(processor.status, processor.phrase)
        encoded: Strings = np.empty(len(answers), dtype=np.object_)
        encoded[:] = [_encode(self._model, answer) for answer in answers]
        return encoded

    def _decode(self, body: bytes) -> object:
        """Return the content of a body; an invalid one stays bytes."""
        with contextlib.suppress(ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            if self._content_type == "application/json":
                return json.loads(body)
            if self._content_type.startswith("text/"):
                return body.decode()
        return bytearray(body)

    def _refusal(self, status: object, message: object) -> BackendError:
        """Return the error for an answer with an error status."""
        text = "" if message is None else sanitize_line(str(message))
        answer = f"the handler answered {status}" + (f": {text}" if text else "")
        if not isinstance(status, int):
            return OutputError(self._model, answer)
        if status in _UNAVAILABLE:
            return UnavailableError(self._model, answer)
        is_client_error = _CLIENT_ERROR <= status < _SERVER_ERROR
        return (InputError if is_client_error else OutputError)(self._model, answer)


def _encode(model: str, answer: object) -> bytes:
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
            model,
            f"the handler returned a {type(answer).__name__} that is not JSON: {summarize(error)}",
            expected="bytes, text, a tensor, or what JSON can hold",
        ) from None
