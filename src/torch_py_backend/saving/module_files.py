"""The files of a module in memory, in one of the formats of `save_model`, and its own answers."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.autocomplete import hook_runs, specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, ConfigError, SaveError, join_names, summarize
from torch_py_backend.hooks import user_hooks
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.saving import examples, formats, transforms
from torch_py_backend.saving.examples import Arguments, Example
from torch_py_backend.saving.source_writer import SourceWriter
from torch_py_backend.signature import introspection
from torch_py_backend.tools import artifact_files
from torch_py_backend.tools.artifact_files import EXAMPLE, ArtifactFiles

Format: TypeAlias = Literal["module", "export", "torchscript", "aoti"]

_TEXT, _IMAGE, _TRANSFORM = "text_hooks.py", "image_hooks.py", "transform_hooks.py"
# A PNG of one gray pixel.
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478"
    "9c63a8070000810080d394534a0000000049454e44ae426082"
)
_EXAMPLES = {
    _TEXT: {"text": ["a text", "another text, which is longer"]},
    _IMAGE: {"image": [_PIXEL, _PIXEL]},
    _TRANSFORM: {"image": [_PIXEL, _PIXEL]},
}
_FALLBACK = "exported.pt2"
_DESCRIPTIONS: Mapping[Format, str] = {
    "module": ArtifactType.MODULE.value,
    "export": ArtifactType.EXPORTED.value,
    "torchscript": ArtifactType.TORCHSCRIPT.value,
    "aoti": ArtifactType.AOTI.value,
}


class ModuleFiles:
    """Writes the version folder of one format.

    Attributes:
        example: the example, once the folder is written.
        device: the device of the module.
    """

    example: Example

    def __init__(
        self,
        name: str,
        module: nn.Module,
        kind: Format,
        folder: Path,
        hooks: type | None,
        processor: Any,
        model_kwargs: Mapping[str, object],
    ) -> None:
        self._name, self._module, self._kind = name, module, kind
        self._hooks, self._processor, self._kwargs = hooks, processor, model_kwargs
        self._folder = folder / "1"
        self._pretrained = kind == "module" and hasattr(module, "save_pretrained")
        self.device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        forward: Any = module.forward
        self._signature = (
            introspection.from_schema(forward.schema)
            if isinstance(module, torch.jit.ScriptModule)
            else introspection.from_function(forward)
        )

    # --- files ---------------------------------------------------------------------------------

    def write(
        self, example_inputs: object, max_batch_size: int | None, dynamic_shapes: Any
    ) -> ArtifactFiles:
        """Write the files of the version folder, and return them.

        Raises:
            SaveError: the example does not fit, or the module cannot be saved in this format.
        """
        self._folder.mkdir(parents=True)
        parameters: dict[str, str] = {}
        template = self._template()
        if self._hooks is None and template is None:
            self.example = examples.from_arguments(
                self._name,
                self._module,
                self._signature,
                example_inputs,
                max_batch_size,
                dynamic_shapes,
                by_name=self._kind == "aoti",
            )
        else:
            if example_inputs is None and template is not None:
                example_inputs = _EXAMPLES[template]
            self.example = examples.from_requests(self._name, example_inputs, max_batch_size)
        self._write_source(template, parameters)
        if self._pretrained:
            return self._write_pretrained(parameters)
        model_file = self._write_model(dynamic_shapes, parameters)
        files = self._written()
        description = _DESCRIPTIONS[self._kind]
        ordered = {model_file: files.pop(model_file), **files}
        return ArtifactFiles(description, type(self._module).__name__, ordered, parameters)

    def _template(self) -> str | None:
        """Return the name of the file with the hooks for the processor; None: no hooks are needed.

        The user's own hooks read the processor from the folder.

        Raises:
            SaveError: the processor is not one of those that `save_model` names.
        """
        if self._processor is None:
            return None
        if transforms.settings(self._processor) is not None:
            return _TRANSFORM
        if self._pretrained:
            if self._hooks is not None and hasattr(self._processor, "save_pretrained"):
                return None
            for attribute, template in (("pad_token", _TEXT), ("image_mean", _IMAGE)):
                if hasattr(self._processor, attribute):
                    return template
        kinds = f"a {type(self._processor).__name__} for a {type(self._module).__name__}"
        raise SaveError(
            self._name,
            f"processor is {kinds}",
            expected="a tokenizer or an image processor for a model of transformers, in the format"
            " module; or a transform of torchvision or timm that resizes the shorter side, crops a"
            " square and normalizes",
            cure="Prepare the inputs in a class, and pass it as hooks.",
        )

    def _write_source(self, template: str | None, parameters: dict[str, str]) -> None:
        """Write the classes of the module and the hooks, and the example."""
        writer = SourceWriter(self._name)
        if self._kind == "module" and not self._pretrained:
            writer.add(type(self._module))
            parameters["MODEL_CLASS"] = type(self._module).__name__
            if self._kwargs:
                parameters["MODEL_KWARGS"] = self._json()
            self._check_class()
        if self._hooks is not None:
            writer.add(self._hooks)
            parameters["HOOKS"] = self._hooks.__name__
        text = writer.text()
        for place, source in writer.files.items():
            path = self._folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        if template is not None:
            hooks = Path(__file__).with_name(template).read_text(encoding="utf-8")
            # After other source, without its docstring.
            text += "\n\n" + hooks.split('"""', 2)[2].lstrip() if text else hooks
        if template == _TRANSFORM:
            settings = transforms.settings(self._processor)
            (self._folder / transforms.FILE).write_text(json.dumps(settings), encoding="utf-8")
        text += self._write_example()
        if text:
            (self._folder / "model.py").write_text(text.rstrip() + "\n", encoding="utf-8")

    def _write_example(self) -> str:
        """Write the example; return the function with it if there are texts in it."""
        item = self.example.item
        tensors = {
            name: value.detach().cpu().clone().contiguous()  # they may share memory
            for name, value in item.items()
            if isinstance(value, Tensor)
        }
        if len(tensors) == len(item):
            safetensors.torch.save_file(tensors, self._folder / EXAMPLE)
            return ""
        files = {name: _content(value) for name, value in item.items() if "/" not in name}
        if len(files) == len(item) and None not in files.values():
            folder = self._folder / Path(EXAMPLE).stem
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content or b"")
            return ""
        values = []
        for name, value in item.items():
            if isinstance(value, Tensor):
                raise SaveError(
                    self._name,
                    "example_inputs has tensors and strings",
                    expected="one of them",
                    cure="Let the hooks take strings only, or write the folder by hand.",
                )
            values.append(f"        {name!r}: {value.tolist()!r},\n")
        return f"\n\ndef example_inputs():\n    return {{\n{''.join(values)}    }}\n"

    def _json(self) -> str:
        try:
            return json.dumps(dict(self._kwargs))
        except (TypeError, ValueError) as error:
            raise SaveError(
                self._name,
                f"model_kwargs cannot be written as JSON: {error}",
                cure="Save with format='export'.",
            ) from None

    def _check_class(self) -> None:
        """Raise SaveError if the class does not build a module with the same weights again."""
        built = type(self._module)
        text = f"{built.__name__}({', '.join(f'{k}={v!r}' for k, v in self._kwargs.items())})"
        cure = "Pass the arguments of its constructor as model_kwargs, or use format='export'."
        for device in ("meta", "cpu"):  # some constructors read values
            try:
                with torch.random.fork_rng(devices=[]), torch.device(device):
                    again = built(**self._kwargs)
                break
            except Exception as error:  # of the module's own code
                if device == "cpu":
                    problem = f"{text} fails: {summarize(error)}"
                    raise SaveError(self._name, problem, cure=cure) from error
        kinds, wanted = (
            {
                key: (getattr(value, "shape", None), getattr(value, "dtype", None))
                for key, value in module.state_dict().items()
            }
            for module in (again, self._module)
        )
        keys = sorted(kinds.keys() | wanted.keys())
        different = [key for key in keys if kinds.get(key) != wanted.get(key)]
        if different:
            problem = f"{text} has weights of other shapes or types at {join_names(different)}"
            raise SaveError(self._name, problem, cure=cure)

    def _written(self) -> dict[str, Path]:
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file())
        return {path.relative_to(self._folder).as_posix(): path for path in paths}

    # --- the model -----------------------------------------------------------------------------

    def _write_model(self, dynamic_shapes: Any, parameters: dict[str, str]) -> str:
        """Write the module in its format, and return the name of the model file."""
        name, module, folder = self._name, self._module, self._folder
        if self._kind == "module":
            formats.write_weights(name, module, folder / "model.safetensors")
            return "model.py"
        call = self._call()
        if self._kind == "torchscript":
            if call.kwargs:  # the tracer takes either kind of arguments
                call = examples.by_keyword(self._signature, call)
            formats.write_script(name, module, call, folder / "model.pt")
            return "model.pt"
        if self.example.max_batch_size and self.example.rows == 1:
            # torch.export takes a size of 1 for a constant.
            call = call.map(lambda tensor: torch.cat([tensor, tensor]))
        call = call.map(torch.clone)  # torch.export takes one tensor in two places for one input
        shapes = self._dynamic_shapes(call) if dynamic_shapes is None else dynamic_shapes
        fallback = None
        if self._kind == "aoti":
            parameters["FALLBACK"] = _FALLBACK
            fallback = folder / _FALLBACK
        formats.write_program(name, module, call, shapes, folder / "model.pt2", fallback)
        return "model.pt2"

    def _write_pretrained(self, parameters: dict[str, str]) -> ArtifactFiles:
        module: Any = self._module
        for part in (module, self._processor):
            if hasattr(part, "save_pretrained"):  # a transform does not
                part.save_pretrained(self._folder)
        artifact = artifact_files.find(self._name, self._folder, None)
        if self.example.arguments is not None:
            names = list(self.example.item)
            entries = artifact_files.pretrained_inputs(artifact.pretrained_config, names)
            if [entry["name"] for entry in entries] == names:
                self.example = replace(self.example, entries=entries)
        kwargs = {**artifact_files.pretrained_kwargs(self._signature.named), **self._kwargs}
        if kwargs:
            self._kwargs = kwargs
            parameters["MODEL_KWARGS"] = self._json()
        return replace(
            artifact,
            title=type(module).__name__,
            files={**artifact.files, **self._written()},
            parameters={**artifact.parameters, **parameters},
        )

    def _dynamic_shapes(self, call: Arguments) -> torch.export.ShapesCollection:
        shapes = torch.export.ShapesCollection()
        batch = torch.export.Dim("batch", min=1)
        batched = self.example.max_batch_size > 0
        for name, tensor, _ in examples.leaves(self._name, self._signature, call, None):
            dims = self.example.dynamic.get(name, {0} if batched else set())
            shapes[tensor] = {
                dim: batch if batched and dim == 0 else torch.export.Dim.DYNAMIC for dim in dims
            }
        return shapes

    # --- hooks, and the module's own answers ---------------------------------------------------

    def _call(self) -> Arguments:
        """Return valid arguments of forward(): the example, or what hooks make of it."""
        if self.example.arguments is not None:
            return self.example.arguments
        calls: list[Arguments] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(Arguments(args, kwargs))
            return self._module(*args, **kwargs)

        self._run_hooks(record, self.example.item)
        return calls[0]

    def outputs(self) -> list[JsonObject]:
        """Return the outputs of hooks as entries of config.pbtxt; empty for a single example.

        Dims that differ between the rows of all examples are -1. The files are those of `write`.

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
        schemas = [self._run_hooks(self._module, item) for item in items]
        if len({tuple((spec.name, len(spec.dims)) for spec in one.outputs) for one in schemas}) > 1:
            raise SaveError(
                self._name,
                "the examples give different outputs, or outputs with different numbers of"
                " dimensions",
                expected="the same outputs for each example, of any sizes",
            )
        return [specs.entry_of(spec) for spec in reduce(specs.with_varying, schemas).outputs]

    def _run_hooks(self, module: Callable[..., Any], item: Item) -> Schema:
        document = pbtxt.read(self._folder.parent)
        document |= {
            "input": self.example.entries,
            "max_batch_size": self.example.max_batch_size,
            "parameters": {"HOOKS": {"string_value": getattr(self._hooks, "__name__", "Hooks")}},
        }
        arguments = pbtxt.arguments(self._folder.parent, "1", document)
        config = model_config.parse(arguments, complete=False)
        config = replace(config, inputs=model_config.listed_inputs(arguments))
        artifact = self._artifact(self._folder)
        with _imports_restored(self._folder):
            hooks = user_hooks.load(config, artifact)
            assert hooks is not None  # noqa: S101  HOOKS names them
            loaded = Loaded(artifact, module, self._signature)
            try:
                return hook_runs.run_hooks(config, loaded, hooks, item, self.device)
            except ConfigError as error:
                reason = summarize(error.__cause__ or error)
                problem = f"its hooks fail with the example: {reason}"
                raise SaveError(self._name, problem) from error

    def _artifact(self, folder: Path) -> Artifact:
        return Artifact(ArtifactType.FACTORY, folder, hooks=folder / "model.py")

    def reference(self, folder: Path, document: JsonObject) -> Path:
        """Write the module's own outputs for the example to a file.

        Args:
            folder: the model's folder.
            document: its completed config.
        """
        outputs: Mapping[str, Value]
        if self.example.arguments is not None:
            outputs = examples.outputs_of(
                self._name,
                self._signature,
                self._module,
                self.example.arguments,
                [entry["name"] for entry in document["output"]],
            )
            if not self.example.max_batch_size:  # Triton has no tensors without dimensions
                outputs = {name: value.reshape(value.shape or 1) for name, value in outputs.items()}
        else:
            config = model_config.parse(pbtxt.arguments(folder, "1", document))
            artifact = self._artifact(folder / "1")
            with _imports_restored(folder):
                engine = Engine(
                    config,
                    Loaded(artifact, self._module, self._signature),
                    runtime.create(config.options, self.device, ()),
                    artifact,
                    user_hooks.load(config, artifact),
                )
                (outcome,) = engine.run([self.example.item])
            if isinstance(outcome, BackendError):
                raise SaveError(self._name, f"its hooks fail with the example: {outcome}")
            outputs = outcome
        path = self._folder.parent / "reference.pt"
        torch.save(dict(outputs), path)
        return path


def _content(value: Value) -> bytes | None:
    """Return the bytes of a file that is an example; None for other examples."""
    only: object = None if isinstance(value, Tensor) or value.size != 1 else value.item()
    return only if isinstance(only, bytes) else None


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
