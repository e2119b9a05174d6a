"""The stage after the call of a model with postprocess(): rows of results become outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, OutputError, a_type, summarize
from torch_py_backend.loading.hooks import Hook
from torch_py_backend.pipeline.outputs import extractor
from torch_py_backend.pipeline.run import Entries, Results
from torch_py_backend.values import Call, Item, Tree, Value

# The only column of prepared items, and of results before postprocess(): one value a row.
ROWS = "rows"


class Postprocessing:
    """Calls postprocess() with the rows of each result, and makes outputs of what it returns.

    `guarded` is `Failures.guarded`.
    """

    def __init__(self, config: ModelConfig, hook: Hook, guarded: Call) -> None:
        self._hook, self._guarded = hook, guarded
        self._batched = config.max_batch_size > 0
        self._specs = {spec.name: spec for spec in config.outputs}
        row_config = dataclasses.replace(config, max_batch_size=0)
        self._extract = extractor(row_config, f"{hook.name}()")

    def finish(self, results: Results, entries: Entries) -> Results:
        """Return the outputs of each request; `results` has its part of the column ROWS."""
        return [
            result
            if isinstance(result, BackendError)
            else self._guarded(entry, self._outputs, result[ROWS], entry)
            for result, entry in zip(results, entries, strict=True)
        ]

    def _outputs(self, rows: Value, item: Item) -> Item:
        """Return the outputs of a request; raise OutputError if its rows differ in shape."""
        postprocess = self._hook.with_parameters(values.parameters(item))
        parts = [self._extract(self._converted(postprocess(row)), 1) for row in rows.tolist()]
        outputs: Item = {}
        for name, column in zip(self._specs, zip(*parts, strict=True), strict=True):
            stack: Call = torch.stack if isinstance(column[0], Tensor) else np.stack
            try:
                outputs[name] = stack(column) if self._batched else column[0]
            except (RuntimeError, ValueError):
                raise OutputError(
                    f"postprocess() gives output '{name}' other shapes for other rows of a request",
                    expected="one shape for all",
                ) from None
        return outputs

    def _converted(self, result: Tree) -> Tree:
        """Convert lists and numbers in the result of postprocess() to the types of the outputs."""
        if isinstance(result, Mapping):
            return {name: self._convert(name, part) for name, part in result.items()}
        if len(self._specs) == 1 and not isinstance(result, tuple):
            return self._convert(next(iter(self._specs)), result)
        return result

    def _convert(self, name: str, part: Tree) -> Tree:
        """Convert a list or a number to the output's type without loss."""
        if isinstance(part, np.generic):
            part = part.item()
        if name not in self._specs or not isinstance(part, list | tuple | int | float):
            return part
        spec = self._specs[name]
        if spec.dtype.torch is None:
            return np.array(part, dtype=np.object_)
        dtype: torch.dtype = getattr(torch, spec.dtype.torch)
        try:
            tensor, converted = torch.as_tensor(part), torch.tensor(part, dtype=dtype)
        except Exception as error:  # tensors, strings, ragged lists, numbers that are too large
            raise OutputError(
                f"postprocess() gives {a_type(part)} for output '{name}': {summarize(error)}",
                expected=str(spec),
            ) from None
        if dtype.is_floating_point or torch.equal(converted.to(tensor.dtype), tensor):
            return converted
        return tensor  # of another type, which the extractor refuses: torch makes 255 of -1
