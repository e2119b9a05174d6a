"""`save_model`: write a module of this process as a model folder, load it there, and compare."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from torch_py_backend.config import removed_names
from torch_py_backend.errors import (
    ExampleError,
    LoadError,
    PlatformError,
    SaveError,
    SourceError,
    about,
)
from torch_py_backend.saving import examples, module_files
from torch_py_backend.saving.module_files import Format, ModuleFiles
from torch_py_backend.tools import model_folder
from torch_py_backend.tools.model_folder import SavedModule

log = logging.getLogger(__name__)

_OF_ANY_FORMAT = ExampleError, PlatformError, SourceError


def save_model(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_inputs: object = None,
    max_batch_size: int | None = None,
    format: Format | None = None,  # noqa: A002  the usual word
    dynamic_shapes: Any = None,
    model_kwargs: Mapping[str, object] | None = None,
    hooks: type | None = None,
    processor: Any = None,
    instances: int = 1,
    parameters: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a complete model folder, load it in a child process, and compare its answers.

    The folder has the model, its weights, a commented config.pbtxt and the example, which the
    warm-up uses. It is written only if the saved model loads and its answers for the example are
    those of the module. The module is not changed.

    Args:
        module: the module, which is saved in eval mode.
        path: the folder to write, `repository/name`.
        example_inputs: valid arguments of `forward()`: a tensor, a tuple of positional arguments,
            or a dict of arguments by name; tensors, or dicts, lists and tuples of tensors. With
            `hooks` or `processor`: a dict of the inputs of a request by name; tensors, or lists of
            str or bytes with one for each row.
        max_batch_size: the largest number of rows of one call; 0: there is no batch dimension. By
            default it is 8, or the rows of the example if they are more, if twice the rows give
            twice the rows in every output, and rows alone the same values; else 0.
        format: `module`: Python source and weights in safetensors; `export`: a torch.export
            program; `aoti`: a package of AOTInductor. By default `module` if the class can be
            imported and its constructor makes the same module; else `export`, unless
            `model_kwargs` is given.
        dynamic_shapes: as of `torch.export.export`; such dimensions are -1 in all formats.
        model_kwargs: keyword arguments of the class for the format `module`, as JSON allows them.
        hooks: a class with methods that run before and after `forward()`; the answers are not
            compared then.
        processor: the tokenizer or image processor of a transformers model, which is saved in the
            folder. Without `hooks`, the model takes the input `text`, or `image` with the bytes of
            a file.
        instances: the number of instances; of a module on a GPU, on each GPU.
        parameters: options of config.pbtxt by name; what is not a str is written as JSON.
        overwrite: replace a model folder that has the version 1 alone.

    Returns:
        The path of the folder.

    Raises:
        SaveError: the arguments do not fit together, or the module cannot be saved.
        LoadError: the saved model does not load, or its answers differ.
        ToolError: the folder exists, or cannot be written.
    """
    target = Path(path).absolute()
    name = target.name
    with about(name):
        _check(name, module, format, max_batch_size, instances)
    model_folder.refuse_target(target, [], force=overwrite)
    formats: tuple[Format, ...] = ("module", "export")
    if processor is not None or model_kwargs or module_files.is_pretrained(module):
        formats = (format or "module",)
    elif format is not None:
        formats = (format,)
    options = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (parameters or {}).items()
    }
    refusals: list[SaveError | LoadError] = []
    scratch_folder = model_folder.scratch_folder(target.parent, f"cannot make {target}")
    with about(name), _evaluating(module), torch.no_grad(), scratch_folder as scratch:
        for kind in formats:
            writer = ModuleFiles(
                name, module, kind, scratch / kind / name, hooks, processor, model_kwargs or {}
            )
            try:
                artifact = writer.write(example_inputs, max_batch_size, dynamic_shapes)
                _make_readable(scratch / kind)
                reference = scratch / kind / "reference.pt" if writer.example.outputs else None
                if reference is not None:
                    torch.save(writer.example.outputs, reference)
                report = model_folder.create(
                    target,
                    replace(artifact, parameters={**artifact.parameters, **options}),
                    writer.example.entries,
                    transfer=shutil.move,
                    saved=SavedModule(
                        writer.example.max_batch_size,
                        instances,
                        writer.on_gpu,
                        reference,
                    ),
                )
            except (SaveError, LoadError) as error:
                if len(formats) == 1 or isinstance(error, _OF_ANY_FORMAT):
                    raise
                refusals.append(error)
                continue
            if refusals and not type(module).__module__.startswith("torch."):
                reason = _found(refusals[0])
                log.warning("model '%s': saved as a torch.export program: %s", name, reason)
            for line in report.lines:
                if line.startswith("note"):
                    log.warning("model '%s': %s", name, line.removeprefix("note").strip())
            return target
        source, program = refusals
        cure = source.cure if isinstance(source, SaveError) else ""
        raise SaveError(
            f"it can be saved neither as source ({_found(source)}) nor as a program"
            f" ({_found(program)})",
            cure=f"{cure} Or change forward() so that torch.export supports it.".lstrip(),
        )


def _found(error: SaveError | LoadError) -> str:
    return error.found if isinstance(error, SaveError) else str(error)


def _check(
    name: str, module: object, kind: object, max_batch_size: int | None, instances: int
) -> None:
    """Raise SaveError for arguments that are wrong whatever the module is."""
    found = expected = cure = ""
    if not model_folder.NAME.fullmatch(name):
        found = f"the name of the folder is '{name}'"
        expected = "letters, digits, _, -, . and blanks, not first a . or a blank"
    elif not isinstance(module, nn.Module):
        found, expected = f"module is {examples.describe_type(module)}", "a torch.nn.Module"
    elif isinstance(module, torch.jit.ScriptModule):
        found, expected = "module is TorchScript", "a torch.nn.Module"
        cure = "Use torch.jit.save and `torch-py-backend init`."
    elif kind not in (None, *get_args(Format)):
        found, expected = f"format is {kind!r}", f"one of {', '.join(get_args(Format))}"
        cure = removed_names.FORMATS.get(str(kind), "")
    elif max_batch_size is not None and max_batch_size < 0:
        found, expected = f"max_batch_size is {max_batch_size}", "a number of rows, or 0"
    elif instances < 1:
        found, expected = f"instances is {instances}", "at least 1"
    if found:
        raise SaveError(found, expected=expected, cure=cure)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and restore the modes of all its parts afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _make_readable(folder: Path) -> None:
    """Let the server's user read all files: safetensors 0.8 writes them for the owner only."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
