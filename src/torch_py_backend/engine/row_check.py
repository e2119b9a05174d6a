"""Whether the rows of a batch, which Triton forms from requests of all clients, are independent.

Auto-completion compares shapes only: it takes the time of a recurrent model for the batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from torch_py_backend.config import pbtxt
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, ConfigError
from torch_py_backend.loading import example_inputs
from torch_py_backend.pipeline import differences
from torch_py_backend.values import Item, Outcome

log = logging.getLogger(__name__)


def check(
    config: ModelConfig,
    call: Callable[[Sequence[Item]], Sequence[Outcome]],
    example: Item,
    rows: int,
) -> None:
    """Compare rows that are computed alone with those in a batch, if Triton forms batches.

    If they differ, that is an error where auto-completion has chosen the batch, else a warning.
    Outputs that are not floating point are not compared, nor random ones.

    Args:
        config: the config of the model.
        call: computes the outputs of items.
        example: valid values of inputs; others are made up.
        rows: the number of rows of the batch; below 2 nothing is compared.

    Raises:
        ConfigError: rows depend on each other, and auto-completion has chosen the batch.
    """
    completed = rows > 1 and pbtxt.leaves_out_batch_size(config.folder)
    forms_batches = rows > 1 and (completed or config.dynamic_batching)
    if not forms_batches or config.sequencing or config.decoupled or config.concatenates:
        return
    item = {
        name: example_inputs.distinct_rows(value) if isinstance(value, Tensor) else value
        for name, value in example_inputs.item(config, rows, example=example).items()
    }

    def outputs(begin: int, end: int) -> dict[str, Tensor]:
        """Return the first and the last of some rows: all may take much memory."""
        # Copied, because forward() may write into them.
        part = {name: copy.deepcopy(value[begin:end]) for name, value in item.items()}
        (outcome,) = call([part])
        if isinstance(outcome, BackendError):
            return {}
        ends = sorted({0, end - begin - 1})
        return {
            name: value[ends].cpu()
            for name, value in outcome.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape[:1] == (end - begin,)
        }

    batch, again = outputs(0, rows), outputs(0, rows)
    reproducible = {
        name: value
        for name, value in batch.items()
        if name in again and not differences.differs(again[name], value)
    }
    first, last = outputs(0, 1), outputs(rows - 1, rows)
    name = differences.dependent_output(reproducible, first, last)
    if name is None:
        return
    source = "which auto-completion has chosen" if completed else "with dynamic_batching"
    problem = ConfigError(
        f"output '{name}' for a row alone is another than for that row in a batch of {rows}, and"
        f" max_batch_size is {config.max_batch_size}, {source}",
        expected="rows that do not depend on each other: Triton batches those of all clients",
        cure="Write the inputs and outputs with all their dims, and max_batch_size: 0, into"
        f" config.pbtxt, or {'the max_batch_size' if completed else 'remove dynamic_batching'}.",
    )
    if completed:
        raise problem
    log.warning("%s", problem)
