"""The files of a module in memory, in one of the formats of `save_model`."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.errors import SaveError, a_type, join_names, summarize
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import HOOKS
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.model_folders.artifact_files import EXAMPLE, ArtifactFiles
from torch_py_backend.saving import examples, source_files
from torch_py_backend.signature import introspection

Format: TypeAlias = Literal["module", "export", "aoti"]

# The files with the hooks for a processor, which are copied as hooks.py.
_TEXT, _IMAGE = "text_hooks.py", "image_hooks.py"
# A PNG of one gray pixel.
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478"
    "9c63a8070000810080d394534a0000000049454e44ae426082"
)
_EXAMPLES = {
    _TEXT: {"text": ["a text", "another text, which is longer"]},
    _IMAGE: {"image": [_PIXEL, _PIXEL]},
}
_CHECK = "aot_inductor.check_lowerbound"
_CURE = "Save it with another format."


def is_pretrained(module: object) -> bool:
    """Return whether a module is a model of transformers, which `save_pretrained` saves.

    Modules of other libraries have that method, too; classes derived from a model of transformers
    cannot be imported from it.
    """
    transformers = sys.modules.get("transformers.modeling_utils")  # not imported for this
    return (
        transformers is not None
        and isinstance(module, transformers.PreTrainedModel)
        and type(module).__module__.startswith("transformers.")
    )


class ModuleFiles:
    """What is saved of a module, and how it is written in each format.

    Attributes:
        example: valid inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        example_inputs: object,
        max_batch_size: int | None,
        dynamic_shapes: Any,
        model_kwargs: Mapping[str, object],
        hooks: type | None,
        processor: Any,
        kind: Format,
    ) -> None:
        """Prepare the example. The arguments are those of `save_model`; `kind` is tried first.

        Raises:
            SaveError: the example or the processor does not fit the module.
        """
        self.module, self._dynamic_shapes = module, dynamic_shapes
        self._hooks, self._processor = hooks, processor
        self._pretrained = kind == "module" and is_pretrained(module)
        self._template = None if processor is None else self._find_template()
        self._kwargs = dict(model_kwargs)
        if self._pretrained:
            signature = introspection.from_function(module.forward)
            self._kwargs = artifact_files.pretrained_kwargs(signature.named) | self._kwargs
        if hooks is not None or self._template is not None:
            if example_inputs is None:
                example_inputs = _EXAMPLES.get(self._template or "")
            self.example = examples.from_requests(example_inputs, max_batch_size)
            return
        self.example = examples.from_arguments(
            module, example_inputs, max_batch_size, dynamic_shapes, by_name=kind == "aoti"
        )
        if self._pretrained:  # its config has the types and sizes of known inputs
            names = list(self.example.item)
            config: Any = module.config
            entries = artifact_files.pretrained_inputs(config.to_dict(), names)
            if [entry["name"] for entry in entries] == names:
                self.example = replace(self.example, entries=entries)

    def _find_template(self) -> str | None:
        """Return the file with the hooks for the processor; None: the user's own hooks read it.

        Raises:
            SaveError: the processor is not one of those that `save_model` names.
        """
        if self._pretrained:
            if self._hooks is not None and hasattr(self._processor, "save_pretrained"):
                return None
            for attribute, template in (("pad_token", _TEXT), ("image_mean", _IMAGE)):
                if hasattr(self._processor, attribute):
                    return template
        raise SaveError(
            f"processor is {a_type(self._processor)} for {a_type(self.module)}",
            expected="a tokenizer or an image processor for a model of transformers, in the format"
            " module",
            cure="Prepare the inputs in a class, and pass it as hooks.",
        )

    def write(self, folder: Path, kind: Format) -> ArtifactFiles:
        """Write the files of a version folder in one format; return the model file with options.

        Raises:
            SaveError: the module cannot be saved in this format.
        """
        folder.mkdir(parents=True)
        parameters: dict[str, str] = {}
        if kind == "module" and self._kwargs:
            try:
                parameters["MODEL_KWARGS"] = json.dumps(self._kwargs)
            except (TypeError, ValueError) as error:
                raise SaveError(
                    f"model_kwargs cannot be written as JSON: {error}",
                    cure="Save with format='export'.",
                ) from None
        if kind == "module" and not self._pretrained:
            built = type(self.module)
            parameters["MODEL_CLASS"] = built.__name__
            source_files.write(folder, "model", built, built.__name__)
            self._check_class()
        if self._hooks is not None:
            source_files.write(folder, "hooks", self._hooks, "Hooks", write_out=True)
        elif self._template is not None:
            shutil.copyfile(Path(__file__).with_name(self._template), folder / HOOKS)
        self._write_example(folder)
        artifact = artifact_files.find(self._write_model(folder, kind), None)
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors 0.8 writes files for their owner only
        return replace(artifact, parameters={**artifact.parameters, **parameters})

    def _write_example(self, folder: Path) -> None:
        """Write the example into a file, or strings into a function of hooks.py."""
        tensors, lines = {}, ""
        for name, value in self.example.item.items():
            if isinstance(value, Tensor):
                tensors[name] = value.detach().cpu().clone().contiguous()  # they may share memory
            else:
                lines += f"        {name!r}: {value.tolist()!r},\n"
        if tensors:
            safetensors.torch.save_file(tensors, folder / EXAMPLE)
        else:
            with (folder / HOOKS).open("a", encoding="utf-8") as file:
                file.write(f"\n\ndef example_inputs():\n    return {{\n{lines}    }}\n")

    def _check_class(self) -> None:
        """Raise SaveError if the class does not build a module that takes the same weights."""
        built, own = type(self.module), self.module.state_dict()
        try:
            with torch.random.fork_rng(devices=[]):
                again = weights.build_uninitialized(lambda: built(**self._kwargs), lambda: own)
            again.load_state_dict(own, assign=True)
        except Exception as error:  # of the module's own code
            keywords = ", ".join(f"{name}={value!r}" for name, value in self._kwargs.items())
            lines = (summarize(error), *str(error).splitlines()[1:])  # torch's reasons
            passed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            parameters = inspect.signature(built).parameters
            names = [name for name in parameters if parameters[name].kind in passed]
            raise SaveError(
                f"{built.__name__}({keywords}) does not make this module again:"
                f" {textwrap.shorten(' '.join(lines), 300)}",
                cure=f"Pass its arguments, {join_names(names)}, as model_kwargs."
                if names
                else "Let its constructor make the whole module.",
            ) from error

    def _write_model(self, folder: Path, kind: Format) -> Path:
        """Write the module in its format, and return the model file, or its folder."""
        if self._pretrained:
            pretrained: Any = self.module
            pretrained.save_pretrained(folder)
            if self._processor is not None:
                self._processor.save_pretrained(folder)
            return folder
        if kind == "module":
            _write_weights(self.module, folder / "model.safetensors")
            return folder / "model.py"
        path = folder / "model.pt2"
        self._write_program(path, compiled=kind == "aoti")
        return path

    def _write_program(self, path: Path, *, compiled: bool) -> None:
        """Export the module to a file; `compiled`: as a package of AOTInductor.

        A package serves one row as such, without a check of minimum sizes, if only the batch is
        dynamic; its answer has to be compared.

        Raises:
            SaveError: the module cannot be exported or compiled.
        """
        if self.example.arguments is None:
            raise SaveError(
                "hooks are given, and the module is saved as a program, for which forward() is"
                " called with example_inputs",
                expected="a module whose class can be imported",
                cure="Put the class into a .py file, or save it without hooks and write hooks.py"
                " beside the program.",
            )
        shapes = self._dynamic_shapes
        # torch.export takes one tensor in two places for one input.
        call = self.example.arguments.map(torch.clone)
        rows = next(iter(self.example.item.values())).shape[:1]
        if self.example.max_batch_size and rows == (1,):
            # torch.export takes a size of 1 for a constant.
            call = call.map(lambda tensor: torch.cat([tensor, tensor]))
        batch_alone = self.example.max_batch_size > 0 and shapes is None
        if batch_alone:
            shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch", min=1)
            for tensor in pytree.tree_leaves(tuple(call)):
                shapes[tensor] = {0: batch}
        failed = f"torch.export cannot export {type(self.module).__name__}"
        try:
            with _quiet_torch():
                program = torch.export.export(
                    self.module, call.args, call.kwargs, dynamic_shapes=shapes
                )
                if not compiled:
                    torch.export.save(program, path)
                    return
                failed = f"AOTInductor cannot compile {type(self.module).__name__}"
                from torch._inductor import aoti_compile_and_package, config  # noqa: PLC0415  slow

                # By default, a package takes at least 2 rows.
                unchecked = batch_alone and _CHECK in config.get_config_copy()
                aoti_compile_and_package(
                    program,
                    package_path=str(path),
                    inductor_configs={_CHECK: False} if unchecked else {},
                )
        except Exception as error:  # of the module's own code, or the compiler's
            raise SaveError(f"{failed}: {summarize(error)}", cure=_CURE) from error


def _write_weights(module: nn.Module, path: Path) -> None:
    """Write the state_dict as safetensors, unless it is empty; tied weights once.

    Raises:
        SaveError: safetensors cannot store it, such as sparse tensors.
    """
    own = module.state_dict(keep_vars=True)
    state: dict[str, Tensor] = {}
    storages: set[int] = set()
    try:
        # Weights that are tied will be tied in the module that is built, too.
        for key, value in {id(value): (key, value) for key, value in own.items()}.values():
            tensor = value.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            state[key] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        if state:
            safetensors.torch.save_file(state, path)
    except Exception as error:  # sparse and quantized tensors, and states of other types
        raise SaveError(
            f"its weights cannot be written as safetensors: {summarize(error)}",
            cure=_CURE,
        ) from error


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Leave out what torch writes to standard error about a failure, such as the graph."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
