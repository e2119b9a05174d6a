"""The sizes that an AOTInductor package accepts.

A package does not report its limits. Its runtime checks refuse other sizes before the model runs,
and the messages of these checks name the limits.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import InputError
from torch_py_backend.loading import example_inputs
from torch_py_backend.sequences import state_store
from torch_py_backend.signature import binding
from torch_py_backend.signature.arguments import Signature

# Calls a package with its leaves, and returns the leaves of its result.
Run: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"
# The environment variable that enables runtime checks; a package reads it when it first runs.
CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"

# Messages of the runtime checks, such as "input_handles[0]: dim value is too small at 1, expected
# it to be >= 2, but got: 1", or "unmatched dim value at 1, expected: 4, but got: 1".
_SIZE = re.compile(
    r"input_handles\[(?P<leaf>\d+)\]: .*dim value .*at (?P<dim>\d+),"
    r" expected.*?(?P<relation>>=|<=|:) (?P<limit>\d+)"
)
_STRIDE = re.compile(r"unmatched stride value at \d+")
_RELATIONS = {">=": "at least", "<=": "at most", ":": "exactly"}

# More rows than any package accepts; a tensor of stride 0 has that many without memory.
_TOO_MANY_ROWS = 1 << 31


def probe(
    config: ModelConfig, signature: Signature, run: Run, device: torch.device | None
) -> tuple[Rows, Run]:
    """Return how many rows a package accepts, and a function to call it.

    The function raises InputError with the limit if the package does not accept a size.
    """
    config = state_store.with_controls(config, signature)
    specs = {spec.name: spec for spec in config.inputs}
    if len(specs) != len(signature.leaves or ()) or not all(
        spec.dtype.torch for spec in specs.values()
    ):
        return ANY_ROWS, run  # binding or the warm-up reports inputs that do not match
    names = binding.bind_inputs(config.name, list(specs), signature).names

    def sample(rows: int) -> list[Tensor]:
        item = example_inputs.item(config, rows)
        # The checks compare devices before sizes.
        return [torch.as_tensor(item[name]).to(device or "cpu") for name in names]

    def call(leaves: list[Tensor]) -> list[Tensor]:
        try:
            return run(leaves)
        except RuntimeError as error:
            message = str(error)
            if "API call failed" in message:  # torch 2.11 prints the message of the check only
                message = _check_message(lambda: run(leaves))
            refused = _SIZE.search(message)
            if refused is None:
                raise
            leaf, dim = int(refused["leaf"]), int(refused["dim"])
            # Not the whole shape: rows that fill the batch are no client's.
            raise InputError(
                config.name,
                f"input '{names[leaf]}' has the size {leaves[leaf].shape[dim]} in dimension {dim}",
                expected=f"{_RELATIONS[refused['relation']]} {refused['limit']}, for which the"
                " package was compiled",
            ) from error

    batched = config.max_batch_size > 0
    return _row_limits(run, sample, config.max_batch_size) if batched else ANY_ROWS, call


# --- rows ------------------------------------------------------------------------------------


def _row_limits(run: Run, sample: Callable[[int], list[Tensor]], largest: int) -> Rows:
    """Return how many rows a package accepts.

    Packages with a dynamic batch are often built for at least two rows, because torch.export
    specializes a size of 1, or for as many rows as the chosen kernel supports.
    """
    for_one_row = _check_message(lambda: run(sample(1)))
    exactly = _row_limit(for_one_row, ":")
    if exactly is not None:
        return Rows(exactly, exactly)
    least = _row_limit(for_one_row, ">=")
    most = _row_limit(_check_message(lambda: run(sample(largest))), "<=")
    return Rows(least or 1, most)


def _row_limit(message: str, relation: str) -> int | None:
    """Return the limit of dimension 0 in a message, if the check is of this relation."""
    for refused in _SIZE.finditer(message):
        if refused["dim"] == "0" and refused["relation"] == relation:
            return int(refused["limit"])
    return None


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
    refused = [column[:1].expand(_TOO_MANY_ROWS, *column.shape[1:]) for column in columns]
    return _row_limit(_check_message(lambda: call(refused)), "<=")


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
            except InputError as error:  # of the function that `probe` returns
                message = str(error.__cause__)
        output.seek(0)
        printed = output.readlines()
    if message:
        message += b"".join(printed).decode(errors="replace")
    if not (_SIZE.search(message) or _STRIDE.search(message)):
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
