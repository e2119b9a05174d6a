"""The row counts that a model is called with: its own limits, the config's, and buckets."""

from __future__ import annotations

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError


def plan(config: ModelConfig, takes: Rows, *, fixed: bool) -> Rows:
    """How many rows each call has.

    Args:
        config: the model's config.
        takes: what the artifact itself takes.
        fixed: whether every row count costs preparation of its own, as with static shapes.

    Raises:
        ConfigError: no bucket is one that the artifact takes.
    """
    if not config.max_batch_size or config.concatenates:
        return ANY_ROWS
    # A program's least may be above what requests ever have: its batches are filled up.
    most = max(takes.least, min(takes.most or config.max_batch_size, config.max_batch_size))
    wished = config.options.batch_buckets
    if wished is None:
        wished = powers_of_two(most) if fixed else ()
    usable = tuple(size for size in wished if takes.least <= size <= most)
    if wished and not usable:
        raise ConfigError(
            config.name,
            f"BATCH_BUCKETS is {', '.join(map(str, wished))}",
            expected=f"row counts among {takes.least} to {most}, which the model takes",
        )
    return Rows(usable[0], usable[-1], usable) if usable else Rows(takes.least, most)


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the number itself: fewer than half the rows of a call are padding."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)
