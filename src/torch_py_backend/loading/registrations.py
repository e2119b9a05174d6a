"""Operators and classes that a package registers when it is imported: some artifacts need them."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.loading import python_source
from torch_py_backend.loading.discovery import Artifact, ArtifactType

log = logging.getLogger(__name__)

# What torch writes about an unregistered operator or class; those of torch itself do not count.
_UNREGISTERED = re.compile(
    r"Unknown builtin op: (?!aten::|prim::)([\w:.]+)"  # torch.jit.load
    r"|Unknown type name '__torch__\.(torch\.classes\.[\w.]+)'"
    r"|failed to resolve torch\.ops\.(?!aten\.|prim\.)(\w+\.\w+)"  # torch.export.load
    r"|GLOBAL ([\w.]+) was not an allowed global"
    r"|Could not find schema for (?!aten::|prim::)([\w:.]+)"  # AOTInductor
    r"|Deserializing ([\w.<>]+) in pytree is not registered"
    r"|namedtuple class ([\w.<>]+) because"
)

_WRITERS = {
    ArtifactType.TORCHSCRIPT: "torch.jit.save",
    ArtifactType.EXPORTED: "torch.export.save",
    ArtifactType.AOTI: "torch._inductor.aoti_compile_and_package",
}


@contextlib.contextmanager
def imported(config: ModelConfig, artifact: Artifact) -> Iterator[None]:
    """Import hooks.py and the source file beside an artifact, which is loaded in the context.

    The artifact may not need what the file registers: if it cannot be imported, that is a warning,
    and the error of an artifact that cannot be loaded either.
    """
    if artifact.hooks is not None:
        python_source.import_source(artifact.hooks)
    failure: ArtifactError | None = None
    if artifact.source is not None:
        try:
            functions = python_source.function_names(artifact.source)
        except ArtifactError as error:
            failure = error
            log.warning("%s %s is loaded without it.", error, artifact.path.name)
        else:
            python_source.refuse_hooks(artifact.source)
            if functions and config.default_model_filename is None:
                log.warning(
                    "%s is served, and %s() in %s is not called. Name the file to serve"
                    " with default_model_filename.",
                    artifact.path.name,
                    functions[0],
                    artifact.source.name,
                )
    try:
        yield
    except ArtifactError:
        if failure is not None:
            raise failure from failure.__cause__
        raise


@contextlib.contextmanager
def reading(path: Path, kind: ArtifactType) -> Iterator[None]:
    """Raise an ArtifactError for a file that torch cannot read in the context.

    It names an operator or class that is not registered, if that is the reason.
    """
    try:
        yield
    except Exception as error:  # a damaged file, or one of another torch, raises nearly anything
        cause: BaseException | None = error
        while cause is not None:
            match = _UNREGISTERED.search(str(cause))
            if match:
                name = match[match.lastindex or 0].rstrip(".")
                raise ArtifactError(
                    f"{path.name} is {kind.value} with {name}, which is not registered",
                    cure="Import the package that registers it in model.py, beside the artifact.",
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise ArtifactError(
            f"{path.name} is {kind.value} that torch {torch.__version__} cannot load:"
            f" {summarize(error)}",
            cure=f"Write it again with {_WRITERS[kind]} under this version of torch.",
        ) from error
