"""The files of a module in memory, in one of the formats of `save_model`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.errors import SaveError, summarize
from torch_py_backend.loading.discovery import HOOKS
from torch_py_backend.model_folders.artifact_files import EXAMPLE
from torch_py_backend.saving import source_files
from torch_py_backend.saving.examples import Example
from torch_py_backend.values import Item

Format: TypeAlias = Literal["module", "export", "aoti"]

_CHECK = "aot_inductor.check_lowerbound"


@dataclass(frozen=True, slots=True)
class ModuleFiles:
    """What is saved of a module: as the arguments of `save_model`, but for two.

    Attributes:
        pretrained: it is a model of transformers, to be saved with `save_pretrained`.
        hooks: the class of hooks, or the file with it; None: there are no hooks.
    """

    module: nn.Module
    example: Example
    dynamic_shapes: Any
    kwargs: Mapping[str, object]
    pretrained: bool
    processor: Any
    hooks: type | Path | None

    def write(self, folder: Path, kind: Format) -> dict[str, str]:
        """Write a version folder in one format; return the options of the model."""
        folder.mkdir(parents=True)
        parameters: dict[str, str] = {}
        if kind == "module":
            parameters = self._write_source(folder)
        if isinstance(self.hooks, Path):
            shutil.copyfile(self.hooks, folder / HOOKS)
        elif self.hooks is not None:
            source_files.write(folder, "hooks", self.hooks, "Hooks", write_out=True)
        _write_example(folder, self.example.item)
        if kind != "module":
            self._write_program(folder / "model.pt2", compiled=kind == "aoti")
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors 0.8 writes files for their owner only
        return parameters

    def _write_source(self, folder: Path) -> dict[str, str]:
        """Write the class and its weights, or what `save_pretrained` writes; return the options."""
        name = type(self.module).__name__
        try:
            parameters = {"MODEL_KWARGS": json.dumps(self.kwargs)} if self.kwargs else {}
            if not self.pretrained:
                _write_weights(self.module, folder / "model.safetensors")
        except Exception as error:  # values that JSON lacks, or sparse and quantized tensors
            raise SaveError(
                f"its arguments or weights cannot be written: {summarize(error)}",
                cure="Save it with another format.",
            ) from error
        if not self.pretrained:
            source_files.write(folder, "model", type(self.module), name)
            return parameters | {"MODEL_CLASS": name}
        parts: list[Any] = [self.module, self.processor]
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)
        return parameters | {"MODEL_FACTORY": f"transformers:{name}"}

    def _write_program(self, path: Path, *, compiled: bool) -> None:
        """Export the module to a file; `compiled`: as a package of AOTInductor.

        A package serves one row as such, without a check of minimum sizes, if only the batch is
        dynamic; its answer has to be compared.
        """
        name, example, shapes = type(self.module).__name__, self.example, self.dynamic_shapes
        if example.arguments is None:
            raise SaveError(
                "hooks are given, and the module is saved as a program, for which forward() is"
                " called with example_inputs",
                expected="a module whose class can be imported",
                cure="Put the class into a .py file, or save it without hooks and write hooks.py"
                " beside the program.",
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
        failed = f"torch.export cannot export {name}"
        try:
            program = torch.export.export(self.module, (), kwargs, dynamic_shapes=shapes)
            if not compiled:
                torch.export.save(program, path)
                return
            failed = f"AOTInductor cannot compile {name}"
            from torch._inductor import aoti_compile_and_package, config  # noqa: PLC0415  slow

            # By default, a package takes at least 2 rows.
            unchecked = batch_alone and _CHECK in config.get_config_copy()
            aoti_compile_and_package(
                program,
                package_path=str(path),
                inductor_configs={_CHECK: False} if unchecked else {},
            )
        except Exception as error:  # of the module's own code, or the compiler's
            raise SaveError(
                f"{failed}: {summarize(error)}", cure="Save it with another format."
            ) from error


def _write_example(folder: Path, item: Item) -> None:
    """Write an example into a file, or one with strings into a function of hooks.py."""
    tensors: dict[str, Tensor] = {}
    for name, value in item.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous().clone()  # they may share memory
    if len(tensors) == len(item):
        safetensors.torch.save_file(tensors, folder / EXAMPLE)
        return
    lines = ["", "", "def example_inputs():", "    import torch", "", "    return {"]
    for name, value in item.items():
        text = repr(value.tolist())
        if isinstance(value, Tensor):
            text = f"torch.tensor({text}, dtype={value.dtype})"
        lines.append(f"        {name!r}: {text},")
    with (folder / HOOKS).open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, "    }", ""]))


def _write_weights(module: nn.Module, path: Path) -> None:
    """Write the state_dict as safetensors; of weights that are tied in the module, one."""
    own = module.state_dict(keep_vars=True)
    names = {id(value): key for key, value in own.items()}
    state = {}
    for key in names.values():
        weight = own[key].detach().cpu().contiguous()
        # A file has no views: two weights that share memory would be refused.
        state[key] = weight.clone() if own[key]._is_view() else weight  # noqa: SLF001  no public name
    safetensors.torch.save_file(state, path)
