"""States of sequences as columns of a batch."""

from __future__ import annotations

from typing import Any

import build
import pytest
import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Batch, ItemRows
from torch_py_backend.config import model_config
from torch_py_backend.sequences.state_columns import StateColumns

ROWS = Batch([torch.ones(3, 4), torch.zeros(3, 2)], [1, 2])
SEQUENCES: dict[str, Any] = {"direct": {}}
STATE = {"input_name": "h", "output_name": "new_h", "dims": [2], "data_type": "TYPE_FP32"}


def columns(*, blocks: bool = False, carried: bool = False) -> StateColumns:
    """Return a config with an input x and an output y, and states in blocks or by STATE."""
    document: dict[str, Any] = {}
    if blocks or carried:
        document["sequence_batching"] = SEQUENCES | ({"state": [STATE]} if blocks else {})
    if carried:
        document["parameters"] = {"STATE": {"string_value": '{"h": "new_h"}'}}
    return StateColumns(model_config.parse(build.arguments(**document)))


@pytest.mark.parametrize("how", [{"blocks": True}, {"carried": True}], ids=["blocks", "option"])
def test_states(how: dict[str, bool]) -> None:
    """A state input has its own name, its output is split by items, and it is not sent back."""
    states = columns(**how)
    outputs = [torch.ones(3, 4), torch.rand(3, 2)]
    y, state = states.clone_states(outputs, ROWS)
    assert states.inputs == {"h"}
    assert states.outputs == ("y", "new_h")
    assert states.sent_columns(("x", "h"), ROWS) == [ROWS.columns[0]]
    assert y is outputs[0]
    assert isinstance(state, ItemRows)
    for part, rows in zip(state, outputs[1].split([1, 2]), strict=True):
        assert isinstance(part, Tensor)
        assert torch.equal(part, rows)
        assert part.untyped_storage().nbytes() == rows.nbytes


def test_without_states() -> None:
    """Without sequences no column is a state."""
    states = columns()
    assert states.inputs == frozenset()
    assert states.outputs == ("y",)
