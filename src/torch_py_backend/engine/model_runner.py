"""The model as batches call it: compiled where the config says so, then sealed.

A batch is one call, or several where the model accepts only certain numbers of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Value
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.compile import batch_buckets, compile_cache, torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.hooks.hooked_pipeline import HookedPipeline
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.calls import InputBinding

# Extracts the config's outputs from a result for a number of rows.
Extract: TypeAlias = "Callable[[object, int], list[Value]]"


class ModelRunner:
    """Calls the model for a batch.

    Attributes:
        forward: the model, compiled as configured.
        convert: converts columns to arguments.
        extract: extracts the outputs from a result.
        rows: how many rows one call takes.
        counts: the counters of the model.
        clone: copies an output, whose memory a later call may overwrite.
        compiles: whether a new shape may be compiled.

    Raises:
        OptionError: torch.compile does not accept its options.
    """

    def __init__(
        self,
        config: ModelConfig,
        loaded: Loaded,
        grouping: Grouping | HookedPipeline,
        extract: Extract,
        counts: Counts,
        clone: Callable[[Value], Value],
    ) -> None:
        self._config = config
        self.clone = clone
        self.counts = counts
        self._eager = loaded.module
        self._compiled = torch_compile.apply(config, loaded.kind, loaded.module, counts)
        module = self._compiled or loaded.module
        self.compiles = self._compiled is not None
        self.forward: Callable[..., Any] = module
        self.convert = grouping.convert
        self.extract = extract
        fixed = config.options.static_shapes or torch_compile.captures(config)
        self.rows = batch_buckets.row_counts(config, loaded.rows, fixed=fixed)

    @property
    def takes_any_rows(self) -> bool:
        """Whether a batch is always one call, without rows that fill a bucket."""
        most = self.rows.most
        limited = most is not None and most < self._config.max_batch_size
        return not limited and not self.rows.buckets and self.rows.least <= 1

    def has_graph(self, rows: int) -> bool | None:
        """Return whether the calls so far need no other graph for some rows; None: unknown."""
        return None if self._compiled is None else self._compiled.has_graph(rows)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compilation within the context; forbid it afterwards."""
        if self._compiled is None:
            yield
            sealed = self._eager
        else:
            before = torch_compile.progress()
            with compile_cache.used(self._config):
                yield
            graphs, hits, misses = (
                after - number
                for after, number in zip(torch_compile.progress(), before, strict=True)
            )
            self.counts.compiled_graphs += graphs
            if hits or misses:
                self.counts.compile_cache["miss" if misses else "hit"] = 1
            sealed = self._compiled.seal()
        self.forward = sealed

    def call(self, inputs: InputBinding, columns: Sequence[Value], rows: int) -> Sequence[Value]:
        """Return the model's outputs for a batch, in as many calls as needed.

        Rows that fill a bucket are counted here, the others by the caller.
        """
        if self.rows.accept(rows):
            return self._call_once(inputs, columns, rows)
        pieces: list[list[Value]] = []
        for piece, present in gather_scatter.fit(columns, self.rows):
            # The model may overwrite the outputs of its previous call.
            pieces[-1:] = [[self.clone(value) for value in last] for last in pieces[-1:]]
            size = piece[0].shape[0]
            self.counts.rows += size - present
            outputs = self._call_once(inputs, piece, size)
            self.counts.filled_rows += size - present
            pieces.append([value[:present] for value in outputs])
        return gather_scatter.join(pieces)

    def _call_once(
        self, inputs: InputBinding, columns: Sequence[Value], rows: int
    ) -> Sequence[Value]:
        passed = self.convert(inputs, columns)
        return self.extract(inputs.call(self.forward, passed), rows)
