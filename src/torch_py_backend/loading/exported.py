"""Programs that torch.export.save wrote."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.loading import weights
from torch_py_backend.loading.discovery import Artifact
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import introspection, results
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import ANY_ROWS, Item, Rows


def load(
    artifact: Artifact,
    config: ModelConfig,
    device: torch.device | None,
) -> Loaded:
    # torch 2.13 has an invalid format string for its warning about a class, as of a named tuple.
    logging.getLogger("torch._export.serde.serialize").setLevel(logging.ERROR)
    program = torch.export.load(artifact.path)
    if config.options.enable_weight_sharing is not False:
        tables = (program.state_dict, program.constants)
        for table in tables:
            # torch reads weights as views. Their bases would keep the memory that is replaced.
            table.update(
                {name: value.data for name, value in table.items() if type(value) is Tensor}
            )
        weights.share((value for table in tables for value in table.values()), artifact.path)
    if device is not None:
        program = move_to_device_pass(program, device)
    module = program.module()
    signature, inputs = _inputs(program, module)
    rows = _rows(program, inputs) if config.max_batch_size else ANY_ROWS
    arguments = (argument.name for argument in signature.arguments)
    traced: Item = dict(zip(arguments, inputs, strict=True))
    nodes = program.graph_signature.user_outputs
    out_spec: Any = program.call_spec.out_spec
    leaves: Any = results.named_leaves(pytree.tree_unflatten(list(range(len(nodes))), out_spec))
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    outputs = {}
    for name, number in leaves.items():
        if nodes[number] in values:  # None and numbers in a result are not outputs
            outputs[name] = values[nodes[number]]
    return Loaded(artifact, module, signature, module, rows, (traced, outputs))


def _inputs(program: ExportedProgram, module: nn.Module) -> tuple[Signature, list[Any]]:
    """Return the signature, and the inputs as traced: fake tensors and symbolic numbers."""
    in_spec: Any = program.call_spec.in_spec
    nodes = {node.name: node for node in program.graph.nodes}
    constants: dict[int, Any] = {}
    values = []
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    specs: Any = [spec for spec in program.graph_signature.input_specs if spec.kind is kind]
    for leaf, spec in enumerate(specs):
        if hasattr(spec.arg, "value"):  # it was a constant at the export
            constants[leaf] = spec.arg.value
        else:
            values.append(nodes[spec.arg.name].meta["val"])
    names = list(inspect.signature(module.forward).parameters)
    return introspection.from_tree(in_spec, constants, names), values


def _rows(program: ExportedProgram, values: list[Any]) -> Rows:
    """Return how many rows the program takes: the size of dimension 0 that all inputs share."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
    sizes = {str(tensor.shape[0]): tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        return ANY_ROWS
    (size,) = sizes.values()
    if isinstance(size, int):
        return Rows(size, size)
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return ANY_ROWS
    # Without an upper limit, `upper` is a sympy infinity.
    most = int(bounds.upper) if bounds.upper.is_Integer else None
    return Rows(max(1, int(bounds.lower)), most)
