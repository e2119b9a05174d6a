"""The files of a module in memory, in the formats of `save_model`."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import SaveError
from torch_py_backend.loading import aotinductor, discovery
from torch_py_backend.loading.discovery import HOOKS
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.saving.examples import Example
from torch_py_backend.signature import introspection
from torch_py_backend.values import Item

Format: TypeAlias = Literal["module", "export", "aoti"]
_MOST_ROWS = 65535  # which CUDA's kernels of convolutions take; torch.export refuses more
_CURE = "Put the class and what it uses into a .py file and import it."


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, which writes itself."""
    package = type(module).__module__.partition(".")[0]
    return package == "transformers" and hasattr(module, "save_pretrained")


def write_source(
    folder: Path,
    module: Any,
    kwargs: Mapping[str, object],
    processor: Any,
) -> JsonObject:
    """Write the class and its weights; return the options of the model."""
    folder.mkdir(parents=True)
    name = type(module).__name__
    if is_pretrained(module):
        module.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        names = introspection.from_function(module.forward).named
        kwargs = {**artifact_files.pretrained_kwargs(names), **kwargs}
        options: JsonObject = {"MODEL_FACTORY": f"transformers:{name}"}
        return {**options, "MODEL_KWARGS": kwargs} if kwargs else options
    _write_class(folder, "model", type(module))
    # Of tied weights, the file has one.
    state = {id(value): (key, value) for key, value in module.state_dict(keep_vars=True).items()}
    weights = {}
    for key, value in state.values():
        weight = value.detach().cpu().contiguous()
        # A file has no views.
        weights[key] = weight.clone() if value._is_view() else weight  # noqa: SLF001  no public name
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return {"MODEL_CLASS": name, "MODEL_KWARGS": kwargs} if kwargs else {"MODEL_CLASS": name}


def _write_class(folder: Path, stem: str, value: type) -> None:
    """Write the import of a class into model.py or hooks.py, where the class of hooks is `Hooks`.

    Files that are not installed are copied. A class of hooks in a script is written out.
    """
    module = value.__module__
    name = value.__name__
    served = "Hooks" if stem == "hooks" else name
    path = folder / f"{stem}.py"
    is_found = getattr(sys.modules[module], name, None) is value
    if stem == "hooks" and module == "__main__" and is_found:
        path.write_text(f"{_source(value)}\n\n{served} = {name}\n", encoding="utf-8")
        return
    if module == "__main__" or not is_found:
        raise SaveError(
            f"{value.__qualname__} cannot be imported: it is defined in a script, a notebook or a"
            " function",
            cure=_CURE,
        )
    source = Path(sys.modules[module].__file__ or "").absolute()
    is_own = {"site-packages", "dist-packages"}.isdisjoint(source.parts)
    if is_own and not source.is_relative_to(sysconfig.get_path("stdlib")):
        parts = module.split(".")
        root = source.parents[len(parts) - (source.name != "__init__.py")]
        for place, file in discovery.imported(root, parts[0]).items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / place)
    alias = f" as {served}" if served != name else ""
    line = f"from {module} import {name}{alias}\n"
    if module == stem:  # which does not import itself
        line = alias and f"\n\n{served} = {name}\n"
    own = path.read_text(encoding="utf-8").rstrip() + "\n" if path.exists() else ""
    path.write_text(own + line, encoding="utf-8")


def _source(value: type) -> str:
    """Return the source of a class in a script or notebook, after the imports of what it uses."""
    text = textwrap.dedent(inspect.getsource(value))
    nodes = list(ast.walk(ast.parse(text)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored |= {value.__name__, "__file__", "__name__"}
    script = vars(sys.modules["__main__"])
    lines = []
    for name in sorted({node.id for node in names} & script.keys() - stored):
        used = script[name]
        module: Any = getattr(used, "__module__", "__main__")
        attribute = getattr(used, "__name__", "")
        alias = "\n" if attribute == name else f" as {name}\n"
        if isinstance(used, ModuleType):
            lines.append(f"import {attribute}{alias}")
        elif module != "__main__" and getattr(sys.modules.get(module), attribute, None) is used:
            lines.append(f"from {module} import {attribute}{alias}")
        else:
            problem = f"{value.__name__} uses '{name}', which is defined in the script"
            raise SaveError(problem, cure=_CURE)
    return "".join([*lines, "\n\n", text])


def write_program(
    folder: Path,
    module: nn.Module,
    example: Example,
    shapes: Any,
    *,
    compiled: bool,
) -> None:
    """Export a module to a file; `compiled`: as a package of AOTInductor."""
    # Copied: torch.export takes one tensor in two places for one input.
    tensors = [torch.as_tensor(value).clone() for value in example.item.values()]
    rows = example.config["max_batch_size"]
    if rows and len(tensors[0]) == 1:  # torch.export takes a size of 1 for a constant
        tensors = [torch.cat([tensor, tensor]) for tensor in tensors]
    options = {}
    if rows and shapes is None:
        batch = {0: torch.export.Dim("batch", min=1, max=max(rows, _MOST_ROWS))}
        shapes = pytree.tree_unflatten([batch] * len(tensors), example.arguments)
        # By default a package takes 2 rows. Without this check, its answer has to be compared.
        options["aot_inductor.check_lowerbound"] = False
    kwargs = pytree.tree_unflatten(tensors, example.arguments)
    program = torch.export.export(module, (), kwargs, dynamic_shapes=shapes)
    folder.mkdir(parents=True)
    if compiled:
        aotinductor.compile_program(program, folder / "model.pt2", options)
    else:
        torch.export.save(program, folder / "model.pt2")


def write_beside(
    folder: Path,
    hooks: type | Path | None,
    item: Item,
) -> None:
    """Write the hooks of a model, a class or the file with it, and its example."""
    if isinstance(hooks, Path):
        shutil.copyfile(hooks, folder / HOOKS)
    elif hooks is not None:
        _write_class(folder, "hooks", hooks)
    # Cloned: they may share memory.
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in item.items()
        if isinstance(value, Tensor)
    }
    if len(tensors) == len(item):
        safetensors.torch.save_file(tensors, folder / artifact_files.EXAMPLE)
    else:  # it has strings
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
