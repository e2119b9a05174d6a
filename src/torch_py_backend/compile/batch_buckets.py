"""The row counts of a model's calls: limits of the model and the config, and buckets."""

from __future__ import annotations

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError


def row_counts(config: ModelConfig, accepted: Rows, *, fixed: bool) -> Rows:
    """Return how many rows calls have.

    Args:
        config: the model's config.
        accepted: the rows that the artifact accepts.
        fixed: whether each row count is prepared separately, as with static shapes.

    Raises:
        ConfigError: the artifact accepts none of the buckets.
    """
    if not config.max_batch_size or config.concatenates:
        return ANY_ROWS
    # The least rows of a program may exceed max_batch_size: its batches are padded.
    most = max(accepted.least, min(accepted.most or config.max_batch_size, config.max_batch_size))
    buckets = config.options.batch_buckets
    if buckets is None:
        buckets = powers_of_two(most) if fixed else ()
    usable = tuple(size for size in buckets if accepted.least <= size <= most)
    if buckets and not usable:
        raise ConfigError(
            config.name,
            f"BATCH_BUCKETS is {', '.join(map(str, buckets))}",
            expected=f"row counts among {accepted.least} to {most}, which the model takes",
        )
    return Rows(usable[0], usable[-1], usable) if usable else Rows(accepted.least, most)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and the number itself, so that less than half of a call is padding."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)
