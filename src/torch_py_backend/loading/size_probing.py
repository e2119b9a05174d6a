"""The sizes that an AOTInductor package accepts.

A package does not report its limits. Its runtime checks refuse other sizes before the model runs,
and the messages of these checks name the limits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import InputError, summarize
from torch_py_backend.loading import example_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.signature import binding
from torch_py_backend.signature.arguments import Signature

log = logging.getLogger(__name__)

# Calls a package with its leaves, and returns the leaves of its result.
Run: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"
# The environment variable that enables runtime checks; a package reads it when it first runs.
CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"

# Messages of the runtime checks.
_AT_LEAST = re.compile(r"at 0, expected (?:it )?to be >= (\d+)")
_AT_MOST = re.compile(r"at 0, expected (?:it )?to be <= (\d+)")
_EXACTLY = re.compile(r"unmatched dim value at 0, expected: (\d+)")
_TOO_SMALL = re.compile(r"too small at (\d+), expected (?:it )?to be >= (\d+)")
_STRIDE = re.compile(r"unmatched stride value at \d+")
_CHECK_MESSAGES = (_AT_LEAST, _AT_MOST, _EXACTLY, _TOO_SMALL, _STRIDE)

# More rows than the limit of any package; a tensor of stride 0 has that many without memory.
_ENDLESS = 1 << 31

# The index of a leaf, and one of its dimensions.
_Dim: TypeAlias = "tuple[int, int]"
# torch.export specializes sizes of 0 and 1: without other limits, a dynamic dimension has at least
# this size, although the code is mostly correct for 1.
_DEFAULT_LEAST = 2
# With more dimensions than this, only all of them together are tried.
_MOST_COMBINED = 4
# How many times the memory of a leaf is allocated for an unchecked call.
_PADDING = 64


def probe(
    config: ModelConfig,
    signature: Signature,
    run: Run,
    open_unchecked: Callable[[], Run],
    device: torch.device | None,
) -> tuple[Rows, Run]:
    """Return how many rows a package accepts, and a function to call it.

    The function calls a second copy of the package, without checks, for sizes of 1 that the checks
    refuse although the results are correct. `aot_inductor.check_lowerbound` of inductor's config
    describes these checks; they cannot be disabled alone. The results for a size of 1 are compared
    with those of the checked package for 2 (see `_correct`). Dims of -1 in the config are probed.
    """
    config = state_store.with_controls(config, signature)
    specs = {spec.name: spec for spec in config.inputs}
    if len(specs) != len(signature.leaves or ()) or not all(
        spec.dtype.torch for spec in specs.values()
    ):
        return ANY_ROWS, run  # binding or the warm-up reports inputs that do not match
    names = binding.bind_inputs(config.name, list(specs), signature).names

    def sample(rows: int | None) -> list[Tensor]:
        item = example_inputs.item(config, rows)
        # The checks compare devices before sizes.
        return [torch.as_tensor(item[name]).to(device or "cpu") for name in names]

    batched = config.max_batch_size > 0
    rows = _row_limits(run, sample, config.max_batch_size) if batched else ANY_ROWS
    dynamic = {
        (leaf, dim)
        for leaf, name in enumerate(names)
        for dim, size in enumerate(specs[name].dims, int(batched))
        if size == -1
    }
    # On a GPU, a read past the memory of an input makes the device unusable for the process.
    if not dynamic or (device is not None and device.type != "cpu"):
        return rows, run
    leaves = sample(min(max(rows.least, 2), rows.most or 2) if batched else None)
    least = _least_sizes(run, leaves, dynamic)
    refused = [at for at, size in least.items() if size == _DEFAULT_LEAST]
    unchecked, correct = _open_unchecked(
        config.name, run, open_unchecked, leaves, list(_combinations(refused, dynamic))
    )
    _log_sizes(config.name, names, refused, set().union(*correct))

    def call(leaves: list[Tensor]) -> list[Tensor]:
        small = frozenset(at for at, size in least.items() if leaves[at[0]].shape[at[1]] < size)
        if not small:
            return run(leaves)
        if small in correct and all(leaves[leaf].shape[dim] == 1 for leaf, dim in small):
            return unchecked(leaves)
        leaf, dim = min(small)
        raise InputError(
            config.name,
            f"input '{names[leaf]}' is {list(leaves[leaf].shape)}",
            expected=f"a size of at least {least[leaf, dim]} in dimension {dim}, for which the"
            " package was compiled",
        )

    return rows, call if least else run


# --- rows ------------------------------------------------------------------------------------


def _row_limits(run: Run, sample: Callable[[int], list[Tensor]], largest: int) -> Rows:
    """Return how many rows a package accepts.

    Packages with a dynamic batch are often built for at least two rows, because torch.export
    specializes a size of 1, or for as many rows as the chosen kernel supports.
    """
    for_one_row = _check_message(lambda: run(sample(1)))
    exactly = _EXACTLY.search(for_one_row)
    if exactly:
        return Rows(int(exactly[1]), int(exactly[1]))
    least = _AT_LEAST.search(for_one_row)
    most = _AT_MOST.search(_check_message(lambda: run(sample(largest))))
    return Rows(int(least[1]) if least else 1, int(most[1]) if most else None)


def most_rows(call: Callable[[Sequence[Tensor]], object], columns: Sequence[Tensor]) -> int | None:
    """Return how many rows a package accepts at most; None: any number, or it is unknown.

    The package is called with rows that share the memory of one row. It refuses strides of 0 after
    it has checked the number of rows, so the model never runs. A package without a check of strides
    is not probed.
    """
    # These columns have memory for each row, because a package without checks runs the model.
    doubled = [torch.cat([column, column]) for column in columns]
    shared = [column[:1].expand(column.shape) for column in doubled]
    if not _STRIDE.search(_check_message(lambda: call(shared))):
        return None
    endless = [column[:1].expand(_ENDLESS, *column.shape[1:]) for column in columns]
    most = _AT_MOST.search(_check_message(lambda: call(endless)))
    return int(most[1]) if most else None


# --- sizes of 1 ------------------------------------------------------------------------------


def _open_unchecked(
    model: str,
    run: Run,
    open_unchecked: Callable[[], Run],
    leaves: Sequence[Tensor],
    candidates: Collection[frozenset[_Dim]],
) -> tuple[Run, set[frozenset[_Dim]]]:
    """Return the unchecked package, and which of the candidates are correct with sizes of 1."""
    correct: set[frozenset[_Dim]] = set()
    unchecked = run
    if candidates:
        os.environ[CHECKS] = "0"
        try:
            unchecked = open_unchecked()
            with Path(os.devnull).open("wb") as null, _standard_error_to(null.fileno()):
                correct = {dims for dims in candidates if _correct(run, unchecked, leaves, dims)}
        except RuntimeError as error:  # mostly too little memory
            log.warning("model '%s': %s", model, summarize(error))
        finally:
            os.environ[CHECKS] = "1"
    # Without correct sizes, the second copy and its weights are freed.
    return unchecked if correct else run, correct


def _least_sizes(run: Run, leaves: Sequence[Tensor], dynamic: Iterable[_Dim]) -> dict[_Dim, int]:
    """Return the least sizes that a package accepts, where they are above 1.

    The package is called with strides of 0, which it refuses after it has checked sizes: the model
    never runs.
    """
    least = {}
    for leaf, dim in dynamic:

        def message(size: int, leaf: int = leaf, dim: int = dim) -> str:
            sizes = [*leaves[leaf].shape]
            sizes[dim] = size
            probe = [*leaves]
            probe[leaf] = leaves[leaf].new_zeros(1).as_strided(sizes, (0,) * len(sizes))
            return _check_message(lambda: run(probe))

        if _STRIDE.search(message(leaves[leaf].shape[dim])):
            refused = _TOO_SMALL.search(message(1))
            if refused and int(refused[1]) == dim:
                least[leaf, dim] = int(refused[2])
    return least


def _combinations(dims: Sequence[_Dim], dynamic: Collection[_Dim]) -> Iterator[frozenset[_Dim]]:
    """Yield the sets of dimensions that may be 1 at once.

    Without checks, sizes that several inputs must share are not compared. So the dynamic dimensions
    outside a set belong to one input.
    """
    smallest = 1 if len(dims) <= _MOST_COMBINED else len(dims)
    for count in range(smallest, len(dims) + 1):
        for combination in itertools.combinations(sorted(dims), count):
            if len({leaf for leaf, _ in set(dynamic).difference(combination)}) <= 1:
                yield frozenset(combination)


def _correct(run: Run, unchecked: Run, leaves: Sequence[Tensor], small: Iterable[_Dim]) -> bool:
    """Return whether an unchecked package computes sizes of 1 as a checked one computes 2.

    The second element is a copy of the first, or zeros. A copy leaves a mean unchanged, zeros leave
    a sum, and both an element-wise result. Each output must agree in one of these cases.
    """
    single = [*leaves]
    for leaf, dim in small:
        single[leaf] = single[leaf].narrow(dim, 0, 1)

    def doubled(second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = [*single]
        for leaf, dim in small:
            inputs[leaf] = torch.cat([inputs[leaf], second(inputs[leaf])], dim)
        return list(map(_with_padding, inputs))

    try:
        with torch.inference_mode():
            outputs = [output.clone() for output in unchecked(list(map(_with_padding, single)))]
    except RuntimeError:
        return False
    agree = [False] * len(outputs)
    for second in (Tensor.clone, torch.zeros_like):
        try:
            with torch.inference_mode():
                expected = run(doubled(second))
        except RuntimeError:
            continue
        agree = [
            agrees or _starts_with(reference, output)
            for agrees, reference, output in zip(agree, expected, outputs, strict=True)
        ]
    return all(agree)


def _with_padding(leaf: Tensor) -> Tensor:
    """Return a copy followed by zeros in memory: an unchecked package may read past the leaf."""
    memory = leaf.new_zeros(_PADDING * leaf.numel())
    return memory[: leaf.numel()].view(leaf.shape).copy_(leaf)


def _starts_with(reference: Tensor, output: Tensor) -> bool:
    """Return whether a tensor starts with the values of a smaller one, up to rounding."""
    if reference.ndim != output.ndim or reference.dtype != output.dtype:
        return False
    start = reference[tuple(map(slice, output.shape))]
    if start.shape != output.shape:
        return False
    if not start.is_floating_point():
        return torch.equal(start, output)
    tolerance = 1e-4 if start.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(start, output, rtol=tolerance, atol=tolerance, equal_nan=True)


def _log_sizes(
    model: str, names: Sequence[str], refused: Iterable[_Dim], accepted: Collection[_Dim]
) -> None:
    if accepted:
        log.info(
            "model '%s': sizes of 1 in %s are computed by a second copy of the package, without"
            " runtime checks.",
            model,
            ", ".join(f"dimension {dim} of '{names[leaf]}'" for leaf, dim in sorted(accepted)),
        )
    for leaf, dim in sorted(set(refused).difference(accepted)):
        log.warning(
            "model '%s': a size of 1 in dimension %d of input '%s' is refused: the package was"
            " compiled for at least 2, and its results for 1 could not be confirmed. Compile it"
            ' with inductor_configs={"aot_inductor.check_lowerbound": False} to serve it.',
            model,
            dim,
            names[leaf],
        )


# --- messages of the runtime checks ----------------------------------------------------------


def _check_message(call: Callable[[], object]) -> str:
    """Return the message of the error that a call of a package raises; empty: it raises none.

    The runtime prints the message to standard error, too; up to torch 2.11 the error itself says
    only which call failed. Only messages of the checks are dropped from standard error.
    """
    message = ""
    with tempfile.TemporaryFile() as output:
        with _standard_error_to(output.fileno()), torch.inference_mode():
            try:
                call()
            except RuntimeError as error:
                message = str(error)
        output.seek(0)
        printed = output.readlines()
    if message:
        message += b"".join(printed).decode(errors="replace")
    if not any(pattern.search(message) for pattern in _CHECK_MESSAGES):
        for line in printed:
            os.write(2, line)
    return message


@contextlib.contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """Redirect standard error by its descriptor: AOTInductor's runtime does not use sys.stderr."""
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
