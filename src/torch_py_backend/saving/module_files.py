"""The files of a module in memory, in one of the formats of `save_model`, and its own answers."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Value
from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, SaveError, join_names, summarize
from torch_py_backend.hooks import user_hooks
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.loading import package_weights
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.saving import examples
from torch_py_backend.saving.examples import Arguments, Example
from torch_py_backend.saving.source_writer import SourceWriter
from torch_py_backend.signature import introspection
from torch_py_backend.tools import artifact_files
from torch_py_backend.tools.artifact_files import EXAMPLE, ArtifactFiles

Format: TypeAlias = Literal["module", "export", "torchscript", "aoti"]

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
        model_file = {"module": self._write_weights, "torchscript": self._write_script}.get(
            self._kind, partial(self._write_program, dynamic_shapes, parameters)
        )()
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file())
        files = {path.relative_to(self._folder).as_posix(): path for path in paths}
        description = _DESCRIPTIONS[self._kind]
        ordered = {model_file: files.pop(model_file), **files}
        return ArtifactFiles(description, type(self._module).__name__, ordered, parameters)

    def _template(self) -> str | None:
        """Return the name of the file with the hooks for the processor; None: there is none.

        The user's own hooks read the processor from the folder.

        Raises:
            SaveError: the processor is none of a model of transformers, or takes several inputs.
        """
        if self._processor is None:
            return None
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
            " module",
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
            text = Path(__file__).with_name(template).read_text(encoding="utf-8")
        text += self._write_example()
        if text:
            (self._folder / "model.py").write_text(text.rstrip() + "\n", encoding="utf-8")

    def _write_example(self) -> str:
        """Write the example; return the function with it if there are strings in it."""
        item = self.example.item
        tensors = {
            name: value.detach().cpu().clone().contiguous()  # they may share memory
            for name, value in item.items()
            if isinstance(value, Tensor)
        }
        if len(tensors) == len(item):
            safetensors.torch.save_file(tensors, self._folder / EXAMPLE)
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

    # --- the model -----------------------------------------------------------------------------

    def _write_weights(self) -> str:
        state: dict[str, Tensor] = {}
        written: set[int] = set()
        storages: set[int] = set()
        try:
            for key, value in self._module.state_dict(keep_vars=True).items():
                if id(value) in written:
                    continue  # tied to another weight, as it will be in the module that is built
                written.add(id(value))
                tensor = value.detach().cpu().contiguous()
                storage = tensor.untyped_storage().data_ptr()
                state[key] = tensor.clone() if storage in storages else tensor
                storages.add(storage)
            if state:
                safetensors.torch.save_file(state, self._folder / "model.safetensors")
        except Exception as error:  # sparse and quantized tensors, and states of other types
            raise SaveError(
                self._name,
                f"its weights cannot be written as safetensors: {summarize(error)}",
                cure="Save it with another format.",
            ) from error
        return "model.py"

    def _write_pretrained(self, parameters: dict[str, str]) -> ArtifactFiles:
        module: Any = self._module
        for part in filter(None, (module, self._processor)):
            part.save_pretrained(self._folder)
        artifact = artifact_files.find(self._name, self._folder, None)
        if self.example.arguments is not None:
            names = list(self.example.item)
            entries = artifact_files.pretrained_inputs(artifact.pretrained_config, names)
            if [entry["name"] for entry in entries] == names:
                self.example = replace(self.example, entries=entries)
        kwargs = dict(self._kwargs)
        if "past_key_values" in self._signature.named:  # an object, which cannot be an output
            kwargs = {"use_cache": False, **kwargs}
        if kwargs:
            self._kwargs = kwargs
            parameters["MODEL_KWARGS"] = self._json()
        return replace(
            artifact,
            title=type(module).__name__,
            parameters={**artifact.parameters, **parameters},
        )

    def _write_script(self) -> str:
        call = self._call()
        if call.kwargs:  # the tracer takes either kind of arguments
            call = examples.by_keyword(self._signature, call)
        path = self._folder / "model.pt"
        refusals = []
        for compiled in (
            lambda: torch.jit.script(self._module),
            lambda: torch.jit.trace(
                self._module,
                call.args or None,
                example_kwarg_inputs=call.kwargs or None,
                strict=False,  # the result may be a dict
                check_trace=False,  # the answers are compared later
            ),
        ):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compiled().save(path)
            except Exception as error:  # of the module's own code, or the compiler's
                refusals.append(summarize(error))
            else:
                return path.name
        raise SaveError(
            self._name,
            f"torch.jit can neither script {type(self._module).__name__} ({refusals[0]}) nor trace"
            f" it ({refusals[1]})",
            cure="Save it with another format.",
        )

    def _write_program(self, dynamic_shapes: Any, parameters: dict[str, str]) -> str:
        call = self._call()
        if self.example.max_batch_size and self.example.rows == 1:
            # torch.export takes a size of 1 for a constant.
            call = call.map(lambda tensor: torch.cat([tensor, tensor]))
        call = call.map(torch.clone)  # torch.export takes one tensor in two places for one input
        if dynamic_shapes is None:
            dynamic_shapes = self._dynamic_shapes(call)
        path = self._folder / "model.pt2"
        failed = f"torch.export cannot export {type(self._module).__name__}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about itself
                program = torch.export.export(
                    self._module, call.args, call.kwargs, dynamic_shapes=dynamic_shapes
                )
                if self._kind == "export":
                    torch.export.save(program, path)
                    return path.name
                failed = f"AOTInductor cannot compile {type(self._module).__name__}"
                torch.export.save(program, self._folder / _FALLBACK)
                parameters["FALLBACK"] = _FALLBACK
                package_weights.compile_package(program, path)
        except Exception as error:  # of the module's own code, or the compiler's
            raise SaveError(
                self._name, f"{failed}: {summarize(error)}", cure="Save it with another format."
            ) from error
        return path.name

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

        document = pbtxt.read(self._folder.parent)
        document |= {
            "input": self.example.entries,
            "max_batch_size": self.example.max_batch_size,
            "parameters": {"HOOKS": {"string_value": getattr(self._hooks, "__name__", "Hooks")}},
        }
        arguments = pbtxt.arguments(self._folder.parent, "1", document)
        config = model_config.parse(arguments, complete=False)
        with _imports_restored(self._folder):
            hooks = user_hooks.load(config, self._artifact(self._folder))
            assert hooks is not None  # noqa: S101  HOOKS names them
            device_runtime = runtime.create(config.options, self.device, ())
            config = replace(config, inputs=model_config.listed_inputs(arguments), outputs=())
            pipeline = HookedPipeline(config, self._signature, hooks, device_runtime)
            pipeline.tried(record, self.example.item)
        return calls[0]

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
        # A module of the user with the name `model` makes room for the model.py.
        sys.modules.update({key: modules[key] for key in modules.keys() - sys.modules.keys()})
