"""A module's plan for TENSOR_PARALLEL: found, checked, and put into effect.

Imported only where TENSOR_PARALLEL is set: torch's distributed tensors take a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import ConfigError, SourceError, brief, shown

NAME = "tensor_parallel_plan"
# The words of Hugging Face's plans; None: such a module is whole in each process.
_WORDS: Mapping[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}
_EXPECTED = (
    "a dict from names of modules (with * for any) to ColwiseParallel(), RowwiseParallel() or"
    " another style of torch.distributed.tensor.parallel, or a word such as 'colwise' or 'rowwise'"
)


def apply(
    config: ModelConfig,
    module: nn.Module,
    plan: dict[str, ParallelStyle],
    mesh: DeviceMesh,
    *,
    whole: bool,
) -> None:
    """Let this process keep its share of the weights that the plan names.

    Args:
        config: the model's config.
        module: the module, with all its weights.
        plan: its plan.
        mesh: the processes.
        whole: whether a share may hold on to the memory of the whole, as it does in a mapped file,
            of which only the pages that are used take memory.

    Raises:
        ConfigError: the plan does not fit the module.
    """
    try:
        # Each slices what it has read from the same file: nothing is sent.
        parallelize_module(module, mesh, plan, src_data_rank=None)
    except Exception as error:  # a style that does not take such a module, or a shape
        raise ConfigError(
            config.name,
            f"{NAME} cannot be put into effect: {brief(error)}",
            cure="Colwise and rowwise are for Linear and Embedding.",
        ) from error
    for parameter in module.parameters():
        parameter.requires_grad = False
        local = parameter._local_tensor if isinstance(parameter, DTensor) else None
        if local is not None and not (whole and local.device.type == "cpu"):
            parameter._local_tensor = local.clone()  # type: ignore[attr-defined]


def uneven(module: nn.Module) -> list[str]:
    """Weights of which the processes have shares of different sizes."""
    return [
        name
        for name, one in module.named_parameters()
        if isinstance(one, DTensor)
        for placement in one.placements
        if isinstance(placement, Shard) and one.shape[placement.dim] % one.device_mesh.size()
    ]


def find(config: ModelConfig, module: nn.Module) -> dict[str, ParallelStyle]:
    """The module's plan: `tensor_parallel_plan`, or what Hugging Face's models have.

    Raises:
        ConfigError: it has none, or one that does not fit it.
        SourceError: to ask for it fails.
    """
    try:  # the model's own code runs here
        plan = getattr(module, NAME, None)
        if callable(plan):
            plan = plan()
    except Exception as error:
        raise SourceError(config.name, f"{NAME} fails: {brief(error)}") from error
    if plan is None:
        plan = getattr(module, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            config.name,
            f"TENSOR_PARALLEL is set, and {type(module).__name__} has no {NAME}",
            expected=f"an attribute or a method {NAME}, {_EXPECTED}",
        )
    if not isinstance(plan, Mapping):
        raise ConfigError(config.name, f"{NAME} is a {type(plan).__name__}", expected=_EXPECTED)
    known = [name for name, _ in module.named_modules() if name]
    unknown = [name for name in plan if not any(_matches(one, name) for one in known)]
    if unknown:
        named = shown(str(one) or "''" for one in unknown)
        raise ConfigError(
            config.name,
            f"{NAME} names {named}, and {type(module).__name__} has no such module",
            expected=f"modules of it, such as {shown(known)}",
        )
    styles = {name: _style(config, name, value) for name, value in plan.items()}
    return {name: style for name, style in styles.items() if style is not None}


def _matches(name: str, pattern: Any) -> bool:
    """As parallelize_module has it: word by word."""
    words, patterns = name.split("."), str(pattern).split(".")
    return len(words) == len(patterns) and all(map(fnmatch, words, patterns))


def _style(config: ModelConfig, name: str, value: Any) -> ParallelStyle | None:
    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in _WORDS:
        make = _WORDS[value]
        return make() if make is not None else None
    raise ConfigError(
        config.name,
        f"{NAME} has {value!r} for {name}",
        expected=f"a style of torch.distributed.tensor.parallel, or one of {', '.join(_WORDS)}",
    )
