"""TorchScript archives."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.loading.loaded import Forward, Loaded
from torch_py_backend.signature import introspection


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    """Load an archive that torch.jit.save wrote, in eval mode, with its weights in the file."""
    path = artifact.path
    module: torch.jit.ScriptModule = torch.jit.load(path, map_location=device)
    module.eval()
    if config.options.enable_weight_sharing is not False:
        weights.share((*module.parameters(), *module.buffers()), path)
    name = config.options.method or "forward"
    method: Any = getattr(module, name)
    # A call of the module, unlike one of forward(), runs its hooks.
    called = module if config.options.method is None else method
    signature = dataclasses.replace(introspection.from_schema(method.schema), name=name)
    return Loaded(artifact, called, signature, module)


def freeze(config: ModelConfig, loaded: Loaded) -> Forward:
    """Return a model with its weights as constants and its operators fused for the CPU."""
    method = config.options.method
    others = [method] if method else []
    frozen = torch.jit.freeze(loaded.owner, preserved_attrs=others)
    optimized = torch.jit.optimize_for_inference(frozen, other_methods=others)
    called: Forward = getattr(optimized, method) if method else optimized
    return called
