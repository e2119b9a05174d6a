"""Modules built without random values in what a file is to fill.

To draw them takes longer than to read them: a gigabyte costs seconds, and memory in each instance.
torch.empty costs neither, as long as nobody writes into it.
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


def unfilled(build: Callable[[], Any]) -> Any:
    """What `build` returns; the random values of its weights are left out where that is safe.

    It is safe as long as only the module's state_dict holds what was left out, which the file
    fills, and nothing was computed from it or drawn after it: a random projection that follows and
    is in no state_dict would be another one. Else, and for what fails so, `build` is called again.
    """
    seeded = torch.random.get_rng_state()
    with contextlib.suppress(Exception):  # then the second call fails, too, or succeeds
        skipping = _Skipping()
        with mock.patch.object(nn.init, _TRUNCATED, _truncated), skipping:
            built = build()
        if skipping.harmless(built):
            return built
    torch.random.set_rng_state(seeded)
    return build()


# It looks at what it has drawn; all other functions of nn.init draw, and do not look.
_TRUNCATED = "_no_grad_trunc_normal_"
_in_full: Callable[..., Tensor] = getattr(nn.init, _TRUNCATED)


def _truncated(tensor: Tensor, *bounds: float, generator: torch.Generator | None = None) -> Tensor:
    if generator is not None:
        return _in_full(tensor, *bounds, generator=generator)
    with torch.no_grad():
        return tensor.normal_()


_VALUELESS = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
}


class _Skipping(mapped_files.Mode):
    """Leaves out random values that are drawn in place, and what is computed in place from them.

    Attributes:
        left_out: tensors on memory without values, by their storages.
        safe: whether nothing was computed from them, and nothing was drawn after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[int, Tensor] = {}
        self.safe = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        # A generator of its own draws the same whatever was left out.
        random = (
            torch.Tag.nondeterministic_seeded in func.tags and keywords.get("generator") is None
        )
        target = args[0] if args and func._schema.is_mutable else None
        if isinstance(target, Tensor):
            if mapped_files.storage_id(target) in self.left_out:
                return target
            if random:
                self._leave_out(target)
                return target
        if not self.left_out:
            return func(*args, **keywords)
        reads = any(
            isinstance(one, Tensor) and mapped_files.storage_id(one) in self.left_out
            for one in pytree.tree_leaves((args, keywords))
        )
        if reads and func is torch.ops.aten.clone.default:  # copy.deepcopy of a layer
            made = torch.empty_like(*args, **keywords)
            self._leave_out(made)
            return made
        if random or (reads and not func.is_view and func not in _VALUELESS):
            self.safe = False
        return func(*args, **keywords)

    def _leave_out(self, tensor: Tensor) -> None:
        # Held by a tensor of its own: what else holds the storage, is the constructor's.
        self.left_out[mapped_files.storage_id(tensor)] = tensor.detach()

    def harmless(self, built: Any) -> bool:
        """Whether what was left out is in the module's state_dict, and nowhere else."""
        if not self.left_out:
            return True
        if not self.safe or not isinstance(built, nn.Module):
            return False
        filled = {
            mapped_files.storage_id(tensor) for tensor in built.state_dict(keep_vars=True).values()
        }
        return all(
            storage in filled or mapped_files.is_alone(tensor)
            for storage, tensor in self.left_out.items()
        )
