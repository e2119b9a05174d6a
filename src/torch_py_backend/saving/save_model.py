"""`save_model`: write a module of this process as a model folder, load it there, and compare."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from torch_py_backend.config import pbtxt, removed_names
from torch_py_backend.errors import BackendError, SaveError, a_type, about, summarize
from torch_py_backend.model_folders import artifact_files, creation
from torch_py_backend.saving import examples, module_files
from torch_py_backend.saving.module_files import Format

# By an attribute of a processor: the file with its hooks, and an example; a PNG of one gray pixel.
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478"
    "9c63a8070000810080d394534a0000000049454e44ae426082"
)
_HERE = Path(__file__).parent
_TEXT = _HERE / "text_hooks.py"
_PROCESSORS = {
    "pad_token": (_TEXT, {"text": ["a text", "another text, which is longer"]}),
    "image_mean": (_HERE / "image_hooks.py", {"image": [_PIXEL, _PIXEL]}),
}

log = logging.getLogger(__name__)


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
    parameters: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a complete model folder, load it in a child process, and compare; return its path.

    The folder has the model, a commented config.pbtxt and the example, which the warm-up uses. It
    is written only if the saved model has the answers of the module for the example.

    Args:
        module: the module, which is saved in eval mode. It is not changed.
        path: the folder to write, `repository/name`.
        example_inputs: valid arguments of `forward()`: a tensor, a tuple of positional arguments,
            or a dict of arguments by name; tensors, or dicts, lists and tuples of tensors. With
            `hooks` or `processor`: a dict of the inputs of a request by name; tensors, or lists of
            str or bytes with one for each row.
        max_batch_size: the largest number of rows of one call; 0: there is no batch dimension. By
            default it is 8, or the rows of the example if they are more, if twice the rows give
            twice the rows in every output; else 0.
        format: `module`: Python source and weights in safetensors; `export`: a torch.export
            program; `aoti`: a package of AOTInductor. By default `module` if the class can be
            imported, is not torch's own, and its constructor makes the same module; else
            `export`, unless `model_kwargs` is given.
        dynamic_shapes: as of `torch.export.export`; such dimensions are -1 in all formats.
        model_kwargs: keyword arguments of the class for the format `module`, as JSON allows them.
        hooks: a class with methods that run around `forward()`; answers are not compared then.
        processor: the tokenizer or image processor of a transformers model, which is saved in the
            folder. Without `hooks`, the model takes the input `text`, or `image` with the bytes of
            a file.
        parameters: options of config.pbtxt by name; what is not a str is written as JSON.
        overwrite: replace a model folder that has the version 1 alone.

    Raises:
        SaveError: the arguments do not fit together, or the module cannot be saved.
        LoadError: the saved model does not load, or its answers differ.
        ToolError: the folder exists, or cannot be written.
    """
    target = Path(path).absolute()
    creation.check_name(target.name)
    with about(target.name):
        own, request, formats = _plan(module, format, processor, hooks, model_kwargs)
        generates = (parameters or {}).get("METHOD") == "generate" and own == _TEXT
        config: Any = getattr(module, "config", None)
        if generates and not config.is_encoder_decoder and processor.padding_side != "left":
            raise SaveError(
                "the tokenizer pads on the right, where generate() would go on after the padding",
                cure='Set tokenizer.padding_side = "left".',
            )
        new_folder = creation.new_folder(target, force=overwrite)
        with _evaluating(module), torch.no_grad(), new_folder as folder:
            if own is not None:
                inputs = request if example_inputs is None else example_inputs
                example = examples.from_requests(inputs, max_batch_size, dynamic_shapes)
            else:
                example = examples.from_arguments(
                    module, example_inputs, max_batch_size, dynamic_shapes
                )
                tokens = []
                if formats == ("module",) and module_files.is_pretrained(module):
                    tokens = artifact_files.pretrained_inputs(config.to_dict(), [*example.item])
                # Tokens of a transformers model may be any number.
                if [entry["name"] for entry in tokens] == [*example.item]:
                    example.config["input"] = tokens
            on_gpu = any(weight.is_cuda for weight in module.parameters())
            group = {"kind": "KIND_GPU" if on_gpu else "KIND_CPU", "count": 1}
            document = {**pbtxt.read(folder), **example.config, "instance_group": [group]}
            outputs = folder.with_name("outputs.pt")
            torch.save(example.outputs, outputs)
            reference = str(outputs) if example.outputs else None
            version = folder / "1"
            for kind in formats:
                try:
                    options: dict[str, object] = {}
                    if kind == "module":
                        options = module_files.write_source(
                            version, module, model_kwargs or {}, processor
                        )
                    else:
                        module_files.write_program(
                            version, module, example, dynamic_shapes, compiled=kind == "aoti"
                        )
                    module_files.write_beside(version, own, example.item)
                    document["parameters"] = pbtxt.parameters({**options, **(parameters or {})})
                    report = creation.write_config(folder, document, reference=reference)
                    for warning in report["warnings"]:
                        log.warning("model '%s': %s", folder.name, warning)
                    break
                except Exception as error:
                    if kind == formats[-1]:
                        raise
                    text = "model '%s' is saved as a torch.export program: %s"
                    reason = error if isinstance(error, BackendError) else summarize(error)
                    log.warning(text, folder.name, reason)
                    shutil.rmtree(folder)
    return target


def _plan(
    module: nn.Module,
    kind: Format | None,
    processor: object,
    hooks: type | None,
    kwargs: Mapping[str, object] | None,
) -> tuple[type | Path | None, object, tuple[Format, ...]]:
    """Return the hooks, or the processor's file and its example, and the formats to try."""
    if isinstance(module, torch.jit.ScriptModule):
        raise SaveError(
            f"module is {a_type(module)}",
            cure="Save TorchScript with torch.jit.save, and use `torch-py-backend init`.",
        )
    if kind not in (None, *get_args(Format)):
        raise SaveError(
            f"format is {kind!r}",
            expected=f"one of {', '.join(get_args(Format))}",
            cure=removed_names.advice("format", [str(kind)]),
        )
    known = [value for attribute, value in _PROCESSORS.items() if hasattr(processor, attribute)]
    fits = module_files.is_pretrained(module) and (known or hooks)
    if processor is not None and not fits:
        raise SaveError(
            f"processor is {a_type(processor)} for {a_type(module)}",
            expected="a tokenizer or an image processor for a model of transformers",
            cure="Prepare the inputs in a class, and pass it as hooks.",
        )
    own, request = known[0] if hooks is None and known else (hooks, None)
    if own is not None and kind in ("export", "aoti"):
        raise SaveError(
            f"format is {kind}, and the model has hooks",
            expected="the format module",
            cure="Or write hooks.py beside the program.",
        )
    formats: tuple[Format, ...] = ("module", "export")
    if kind is not None:
        formats = (kind,)
    elif own is not None or kwargs or module_files.is_pretrained(module):
        formats = ("module",)
    elif type(module).__module__.partition(".")[0] == "torch":  # such as nn.Sequential
        formats = ("export",)
    return own, request, formats


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
