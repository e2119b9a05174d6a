"""The files of a module in memory, in the formats of `save_model`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.config.pbtxt import Document
from torch_py_backend.errors import SaveError
from torch_py_backend.loading import aotinductor
from torch_py_backend.loading.discovery import HOOKS
from torch_py_backend.model_folders.artifact_files import EXAMPLE
from torch_py_backend.saving import source_files
from torch_py_backend.saving.examples import Example
from torch_py_backend.values import Item

Format: TypeAlias = Literal["module", "export", "aoti"]

_CHECK = "aot_inductor.check_lowerbound"


def write_source(
    folder: Path, module: nn.Module, kwargs: Document, pretrained: Sequence[Any]
) -> Document:
    """Write the class and its weights; return the options of the model.

    `pretrained` are parts that write themselves: a model of transformers, and its processor.
    """
    folder.mkdir(parents=True)
    name = type(module).__name__
    options: Document = {"MODEL_KWARGS": kwargs} if kwargs else {}
    for part in pretrained:
        part.save_pretrained(folder)
    if pretrained:
        return {**options, "MODEL_FACTORY": f"transformers:{name}"}
    source_files.write(folder, "model", type(module))
    own = module.state_dict(keep_vars=True)
    # A file has no views: of tied weights one is written, others that share memory are copied.
    names = {id(value): key for key, value in own.items()}
    state = {}
    for key in names.values():
        weight = own[key].detach().cpu().contiguous()
        state[key] = weight.clone() if own[key]._is_view() else weight  # noqa: SLF001  no public name
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return {**options, "MODEL_CLASS": name}


def write_program(
    folder: Path, module: nn.Module, example: Example, shapes: Any, *, compiled: bool
) -> Document:
    """Export a module to a file; `compiled`: as a package of AOTInductor. Return no options.

    A package serves one row as such, without a check of minimum sizes, if only the batch is
    dynamic; its answer has to be compared.
    """
    if example.arguments is None:
        raise SaveError(
            "hooks are given, and the module is saved as a program",
            expected="a module whose class can be imported",
            cure="Put the class into a .py file, or write hooks.py beside the program.",
        )
    # Copied: torch.export takes one tensor in two places for one input.
    tensors = [torch.as_tensor(value).clone() for value in example.item.values()]
    if example.max_batch_size and tensors[0].shape[0] == 1:
        # torch.export takes a size of 1 for a constant.
        tensors = [torch.cat([tensor, tensor]) for tensor in tensors]
    batch_alone = example.max_batch_size > 0 and shapes is None
    if batch_alone:
        batch = {0: torch.export.Dim("batch", min=1)}
        shapes = pytree.tree_unflatten([batch] * len(tensors), example.arguments)
    kwargs = pytree.tree_unflatten(tensors, example.arguments)
    program = torch.export.export(module, (), kwargs, dynamic_shapes=shapes)
    folder.mkdir(parents=True)
    if not compiled:
        torch.export.save(program, folder / "model.pt2")
        return {}
    # By default, a package takes at least 2 rows.
    options = {_CHECK: False} if batch_alone else {}
    aotinductor.compile_program(program, folder / "model.pt2", options)
    return {}


def write_beside(folder: Path, hooks: type | Path | None, item: Item) -> None:
    """Write what lies beside a model: its hooks, a class or the file with it, and its example.

    An example with strings is a function of hooks.py.
    """
    if isinstance(hooks, Path):
        shutil.copyfile(hooks, folder / HOOKS)
    elif hooks is not None:
        source_files.write(folder, "hooks", hooks)
    # Cloned: they may share memory.
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in item.items()
        if isinstance(value, Tensor)
    }
    if len(tensors) == len(item):
        safetensors.torch.save_file(tensors, folder / EXAMPLE)
    else:
        lines = ["", "", "def example_inputs():", "    import torch", "", "    return {"]
        for name, value in item.items():
            text = repr(value.tolist())
            if isinstance(value, Tensor):
                text = f"torch.tensor({text}, dtype={value.dtype})"
            lines.append(f"        {name!r}: {text},")
        with (folder / HOOKS).open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, "    }", ""]))
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors 0.8 writes files for their owner only
