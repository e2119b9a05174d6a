"""Complete the config in Triton's arguments, load the model and describe it: in a child process."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path

import torch

from torch_py_backend import autocomplete
from torch_py_backend.autocomplete import schema
from torch_py_backend.config import model_config, pbtxt, threads
from torch_py_backend.config.model_config import BatchInput, ModelConfig, TensorSpec
from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.engine import load, runtime, warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import OutputError, counted
from torch_py_backend.loading import discovery, python_source, registry, weights
from torch_py_backend.loading.discovery import HOOKS, ArtifactType
from torch_py_backend.model_folders import artifact_files
from torch_py_backend.model_folders.artifact_files import EXAMPLE
from torch_py_backend.pipeline.differences import disagreement
from torch_py_backend.values import Item


def inspect(
    arguments: Mapping[str, str],
    reference: str | None = None,
    *,
    new: bool = False,
) -> JsonObject:
    """Complete a config, load and warm up its model; return what it is, takes and gives, as JSON.

    Raises OutputError if its outputs for its example differ from those in the file `reference`. If
    the folder is `new`, its config gets what its files say, and the report has a request.
    """
    logger = logging.getLogger("torch_py_backend")
    logger.propagate = False
    warnings = BufferingHandler(10_000)
    warnings.setLevel(logging.WARNING)
    document = json.loads(arguments["model_config"])
    if new:
        _complete(arguments, document)
    elif autocomplete.is_incomplete(document):
        document |= schema.describe(arguments)
    settings = model_config.parse({**arguments, "model_config": json.dumps(document)})
    logger.addHandler(warnings)
    began = time.monotonic()
    engine = load_warm(settings)
    compiled = ""
    if engine.compiles:
        source = " of the compile cache" if engine.counts.compile_cache["hit"] else ""
        graphs = counted(engine.counts.compiled_graphs, "graph")
        compiled = f"{graphs}{source}; the load took {time.monotonic() - began:.1f} s"
    if reference is not None:
        with runtime.mode(settings.options):
            _compare(engine, reference)
    engine.close()
    bound = engine.inputs.binding
    places = dict(zip(bound.names, bound.places, strict=True))
    inputs: list[BatchInput | TensorSpec] = [*engine.config.inputs, *settings.batch_inputs]
    return {
        **load.report(engine),
        "signature": str(engine.loaded.signature),
        "hooks": ", ".join(hook.name for hook in engine.hooks or () if hook is not None),
        "inputs": [f"{spec} → {places[spec.name]}" for spec in inputs],
        "outputs": [str(spec) for spec in settings.outputs],
        "max_batch_size": settings.max_batch_size,
        "compiled": compiled,
        "warnings": [record.getMessage() for record in warnings.buffer],
        "request": warmup.request(engine) if new else [],
        "config": document,
    }


def _complete(arguments: Mapping[str, str], document: JsonObject) -> None:
    """Complete the config of a new model folder in place; it may list inputs, and no batch size."""
    if model_class := _class_of_weights(arguments):
        document["parameters"] |= pbtxt.parameters({"MODEL_CLASS": model_class})
    folder = Path(arguments["model_repository"])
    path = folder / "1" / "config.json"
    pretrained = {}
    if path.is_file():
        pretrained = json.loads(path.read_bytes())
        config = model_config.parse(arguments, complete=False)
        loaded = registry.load(discovery.find(config), config, torch.device("cpu"))
        names = loaded.signature.named
        if kwargs := artifact_files.pretrained_kwargs(names):
            document["parameters"] |= pbtxt.parameters({"MODEL_KWARGS": kwargs})
        has_own = any((folder / "1" / name).exists() for name in (EXAMPLE, HOOKS))
        if not document["input"] and not has_own:
            document["input"] = artifact_files.pretrained_inputs(pretrained, names)
    arguments = {**arguments, "model_config": json.dumps(document)}
    document |= schema.describe(arguments, finds_batch=True)
    if not (folder / "1" / HOOKS).exists():
        artifact_files.pad(pretrained, document)
    artifact_files.write_labels(pretrained, document, folder)


def _class_of_weights(arguments: Mapping[str, str]) -> str:
    """Return the one of several classes that has the keys of the weights; empty: no such one."""
    config = model_config.parse(arguments, complete=False)
    artifact = discovery.find(config)
    if artifact.kind is not ArtifactType.MODULE or artifact.weights is None:
        return ""
    classes = python_source.module_classes(python_source.import_source(artifact.path))
    if config.options.model_class or len(classes) == 1:
        return ""
    keys = weights.read(config, artifact.weights).keys()
    fitting = []
    for name, module_class in classes.items():
        with contextlib.suppress(Exception):  # it takes arguments, or is not to be built alone
            if module_class().state_dict().keys() == keys:
                fitting.append(name)
    return fitting[0] if len(fitting) == 1 else ""


def _compare(engine: Engine, reference: str) -> None:
    """Raise OutputError if the outputs for the example differ from those in a file."""
    expected: Item = torch.load(reference, "cpu", weights_only=False)
    (outputs,) = warmup.outputs(engine, warmup.sample(engine, len(next(iter(expected.values())))))
    # OPTIMIZE is such as bf16.
    problem = disagreement(outputs, expected, reduced=bool(engine.config.options.optimize))
    if problem:
        raise OutputError(
            f"the saved model is another: {problem}",
            cure="Check that the module can be built again from model_kwargs and its weights, that"
            " its answers are not random, and, if it is exported, that its code depends neither on"
            " the values of its inputs nor on their rows.",
        )


def load_warm(settings: ModelConfig, row_counts: Sequence[int] = ()) -> Engine:
    """Load a model, and warm it up as a server would, or for some row counts only."""
    engine = load.build(settings, threads.budget(settings))
    if settings.options.warmup is not False:
        with runtime.mode(settings.options):
            warmup.run(engine, row_counts=row_counts)
    else:
        with engine.preparing():  # nothing is compiled, as on a server
            pass
    return engine
