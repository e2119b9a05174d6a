"""The answers of a module in memory, computed with the hooks of the folder that is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_py_backend.artifacts.discovery import HOOKS_CLASS, Artifact, ArtifactType
from torch_py_backend.autocomplete import hook_runs, specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, ConfigError, SaveError, summarize
from torch_py_backend.hooks import user_hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.saving import examples
from torch_py_backend.saving.examples import Arguments, Example
from torch_py_backend.signature.arguments import Signature


@dataclass(frozen=True, slots=True)
class ModuleAnswers:
    """Calls a module with its example, as a server does with the written version folder."""

    name: str
    module: nn.Module
    signature: Signature
    example: Example
    folder: Path
    hooks: type | None

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next((weight.device for weight in self.module.parameters()), torch.device("cpu"))

    def arguments(self) -> Arguments:
        """Return valid arguments of forward(): the example, or what hooks make of it.

        Raises:
            SaveError: the hooks or the module fail.
        """
        if self.example.arguments is not None:
            return self.example.arguments
        calls: list[Arguments] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(Arguments(args, kwargs))
            return self.module(*args, **kwargs)

        self._run_hooks(record, self.example.item)
        return calls[0]

    def outputs(self) -> list[JsonObject]:
        """Return the outputs of hooks as entries of config.pbtxt; empty for a single example.

        Dims that differ between the rows of all examples are -1.

        Raises:
            SaveError: the hooks or the module fail.
        """
        example = self.example
        if not example.others:
            return []
        items = [example.item, *example.others]
        if example.max_batch_size:
            items = [
                {name: value[row : row + 1] for name, value in item.items()}
                for item in items
                for row in range(len(next(iter(item.values()))))
            ]
        schemas = [self._run_hooks(self.module, item) for item in items]
        forms = {
            tuple((spec.name, len(spec.dims)) for spec in schema.outputs) for schema in schemas
        }
        if len(forms) > 1:
            raise SaveError(
                self.name,
                "the examples give different outputs, or outputs with different numbers of"
                " dimensions",
                expected="the same outputs for each example, of any sizes",
            )
        return [specs.entry_of(spec) for spec in reduce(specs.with_varying, schemas).outputs]

    def _run_hooks(self, module: Callable[..., Any], item: Item) -> Schema:
        hooks_name = HOOKS_CLASS if self.hooks is None else self.hooks.__name__
        document = pbtxt.read(self.folder.parent)
        document |= {
            "input": self.example.entries,
            "max_batch_size": self.example.max_batch_size,
            "parameters": {"HOOKS": {"string_value": hooks_name}},
        }
        arguments = pbtxt.arguments(self.folder.parent, "1", document)
        config = model_config.parse(arguments, complete=False)
        config = replace(config, inputs=model_config.listed_inputs(arguments))
        artifact = _artifact(self.folder)
        with _imports_restored(self.folder):
            hooks = user_hooks.load(config, artifact)
            assert hooks is not None  # noqa: S101  HOOKS names them
            loaded = Loaded(artifact, module, self.signature)
            try:
                return hook_runs.run_hooks(config, loaded, hooks, item, self.device)
            except ConfigError as error:
                reason = summarize(error.__cause__ or error)
                problem = f"its hooks fail with the example: {reason}"
                raise SaveError(self.name, problem) from error

    def reference(self, folder: Path, document: JsonObject) -> Path:
        """Write the module's own outputs for the example to a file.

        Args:
            folder: the model's folder.
            document: its completed config.
        """
        outputs: Mapping[str, Value]
        if self.example.arguments is not None:
            outputs = examples.outputs_of(
                self.name,
                self.signature,
                self.module,
                self.example.arguments,
                [entry["name"] for entry in document["output"]],
            )
            if not self.example.max_batch_size:  # Triton has no tensors without dimensions
                outputs = {name: value.reshape(value.shape or 1) for name, value in outputs.items()}
        else:
            config = model_config.parse(pbtxt.arguments(folder, "1", document))
            artifact = _artifact(folder / "1")
            with _imports_restored(folder):
                engine = Engine(
                    config,
                    Loaded(artifact, self.module, self.signature),
                    runtime.create(config.options, self.device, ()),
                    artifact,
                    user_hooks.load(config, artifact),
                )
                (outcome,) = engine.run([self.example.item])
            if isinstance(outcome, BackendError):
                raise SaveError(self.name, f"its hooks fail with the example: {outcome}")
            outputs = outcome
        path = self.folder.parent / "reference.pt"
        torch.save(dict(outputs), path)
        return path


def _artifact(folder: Path) -> Artifact:
    return Artifact(ArtifactType.FACTORY, folder, hooks=folder / "model.py")


@contextlib.contextmanager
def _imports_restored(folder: Path) -> Iterator[None]:
    """Import the files of a folder as an instance does, and undo what that changes."""
    path, modules = list(sys.path), dict(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules.keys():
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
        # The import of model.py has replaced a module of the user with the name `model`.
        sys.modules.update({key: modules[key] for key in modules.keys() - sys.modules.keys()})
