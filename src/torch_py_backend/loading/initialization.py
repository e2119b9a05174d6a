"""Modules built without the random initialization that a file of weights replaces.

Drawing the values takes longer than reading them: seconds and memory for each gigabyte, in each
instance. Memory of torch.empty costs neither until it is written. The meta device would avoid the
values as well, but also those of the buffers that a constructor computes and no file holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.loading import mapped_files


def build_uninitialized(build: Callable[[], Any]) -> Any:
    """Return what `build` returns, without random values of weights where that is safe.

    It is safe if the skipped values are only in the module's state_dict, which the file fills, and
    nothing was computed from them or drawn after them: a random projection that is drawn later and
    is in no state_dict would have other values. Otherwise, and after an exception, `build` is
    called again.
    """
    random_state = torch.random.get_rng_state()
    with contextlib.suppress(Exception):  # the second call raises it, too, or succeeds
        skipping = _SkipRandom()
        with mock.patch.object(nn.init, _TRUNCATED, _truncated), skipping:
            built = build()
        if skipping.is_safe(built):
            return built
    torch.random.set_rng_state(random_state)
    return build()


# This function of nn.init reads the values that it has drawn; no other one does.
_TRUNCATED = "_no_grad_trunc_normal_"
_original: Callable[..., Tensor] = getattr(nn.init, _TRUNCATED)


def _truncated(tensor: Tensor, *bounds: float, generator: torch.Generator | None = None) -> Tensor:
    if generator is not None:
        return _original(tensor, *bounds, generator=generator)
    with torch.no_grad():
        return tensor.normal_()


# Operations that take the shape of their argument, and not its values.
_SHAPE_ONLY = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
}


class _SkipRandom(mapped_files.DispatchMode):
    """Skips in-place random operations, and in-place operations on their results.

    Attributes:
        skipped: tensors without values, by the identity of their storages.
        safe: whether nothing was computed from them, and nothing was drawn after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[int, Tensor] = {}
        self.safe = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        # A generator that the caller passes is not affected by what is skipped.
        random = (
            torch.Tag.nondeterministic_seeded in func.tags and keywords.get("generator") is None
        )
        target = args[0] if args and func._schema.is_mutable else None
        if isinstance(target, Tensor):
            if mapped_files.storage_id(target) in self.skipped:
                return target
            if random:
                self._skip(target)
                return target
        if not self.skipped:
            return func(*args, **keywords)
        reads = any(
            isinstance(leaf, Tensor) and mapped_files.storage_id(leaf) in self.skipped
            for leaf in pytree.tree_leaves((args, keywords))
        )
        if reads and func is torch.ops.aten.clone.default:  # copy.deepcopy of a layer
            clone = torch.empty_like(*args, **keywords)
            self._skip(clone)
            return clone
        if random or (reads and not func.is_view and func not in _SHAPE_ONLY):
            self.safe = False
        return func(*args, **keywords)

    def _skip(self, tensor: Tensor) -> None:
        # A separate tensor, so that `is_alone` shows whether the module still uses the storage.
        self.skipped[mapped_files.storage_id(tensor)] = tensor.detach()

    def is_safe(self, built: Any) -> bool:
        """Return whether the skipped values are in the module's state_dict, and nowhere else."""
        if not self.skipped:
            return True
        if not self.safe or not isinstance(built, nn.Module):
            return False
        filled = {
            mapped_files.storage_id(tensor) for tensor in built.state_dict(keep_vars=True).values()
        }
        return all(
            storage in filled or mapped_files.has_no_other_views(tensor)
            for storage, tensor in self.skipped.items()
        )
