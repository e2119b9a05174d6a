"""Builds an engine from a config: loads, optimizes and shares the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from torch_py_backend.config import model_config, threads
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine import aoti, runtime, sharing
from torch_py_backend.engine.engine import Engine
from torch_py_backend.loading import discovery, registry
from torch_py_backend.loading import hooks as user_hooks
from torch_py_backend.processes import private_files
from torch_py_backend.signature import binding


def build(config: ModelConfig, threads: Threads) -> Engine:
    """Load the model of a config and return its engine; LoadError if it cannot be served."""
    runtime.set_switches(config.options, threads)
    device = runtime.placement(config)
    artifact = discovery.find(config)
    config = registry.without_unused(config, artifact.kind)
    # In turn: TorchScript and exported programs are copied before their weights are shared, and at
    # the same time would need that memory several times.
    with private_files.turn(config.name):
        weights_device, shared = device, None
        if device is not None and sharing.requested(config):
            shared = sharing.SharedWeights(config, device)
            # A module is built on the CPU: weights that it shares need not be copied to the device.
            # A graph is loaded on the device, because its constants are not shared.
            if artifact.kind.has_weights_apart and not shared.owns:
                weights_device = torch.device("cpu")
        loaded = registry.load(artifact, config, weights_device)
        loaded = dataclasses.replace(loaded, module=registry.optimize(config, loaded))
        runtime.keep_freed_memory()
        config = binding.with_controls(config, loaded.signature)
        if "aoti" in config.options.optimize and device is not None:
            loaded = aoti.packaged(config, loaded, device)
        if shared is not None:
            shared.share(loaded.owner)
        engine = Engine(config, loaded, device, user_hooks.load(config, artifact), shared)
    # A call ends by selecting the thread's GPU again, which takes memory: GPU 0's with KIND_MODEL.
    runtime.make_current(engine.device)
    return engine


def write_package(arguments: Mapping[str, str], path: str) -> None:
    """Write a model's AOTInductor package. `arguments` are Triton's of `initialize`."""
    config = model_config.parse(arguments)
    names = tuple(name for name in config.options.optimize if name != "aoti")
    options = dataclasses.replace(config.options, optimize=names, enable_weight_sharing=None)
    config = dataclasses.replace(config, options=options)
    aoti.write(build(config, threads.budget(config)), Path(path))


def report(engine: Engine) -> dict[str, object]:
    """Return what an engine loaded, its device, its threads (intra-op, inter-op), and options."""
    options = engine.config.options
    weights = f"{engine.mapped} shared by the instances"
    if sharing.requested(engine.config):
        weights = "shared by the instances on a GPU"
    elif options.freezes:
        weights = "constants of each instance's graph"
    return {
        "artifact": f"{engine.loaded.artifact.path.name}: {engine.loaded.kind.value}",
        "weights": weights,
        "device": str(engine.device),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "options": {
            entry.name.upper(): value
            for entry in dataclasses.fields(options)
            if (value := getattr(options, entry.name)) != entry.default
        },
    }
