"""The status of models, from Triton's repository index."""

from __future__ import annotations

import pytest

from torch_py_backend.server import model_status
from torch_py_backend.server.model_status import ModelState


def test_states_of_models() -> None:
    """A model that is not READY has a reason."""
    ready = model_status.parse_state({"name": "a", "version": "1", "state": "READY"})
    assert ready == ModelState("a", "1", True, "")
    failed = model_status.parse_state({"name": "b", "state": "UNAVAILABLE", "reason": "because"})
    assert failed == ModelState("b", "", False, "because")


def test_status_of_several_versions() -> None:
    """A model serves if one version does, and is unloaded if all are."""
    statuses = model_status.by_model(
        [
            ModelState("m", "1", False, "unloaded", unloaded=True),
            ModelState("m", "2", True, ""),
            ModelState("n", "1", False, "unloaded", unloaded=True),
            ModelState("o", "1", False, "unloaded", unloaded=True),
            ModelState("o", "2", False, "because"),
        ]
    )
    assert (statuses["m"].ready, statuses["m"].versions) == (True, "2")
    assert (statuses["n"].ready, statuses["n"].unloaded) == (False, True)
    assert (statuses["o"].unloaded, statuses["o"].reason) == (False, "because")


@pytest.mark.parametrize(
    ("reason", "public"),
    [
        ("Internal: Stub process 'm' is not healthy.", "Stub process 'm' is not healthy"),
        (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: no /a/b.pt.\n\nAt:\n;",
            "no b.pt",
        ),
        ("Internal: TritonModelException: model 'm': no such", "model 'm': no such"),
        ("", "no reason was given"),
    ],
)
def test_public_reasons_have_no_folders_and_no_trace(reason: str, public: str) -> None:
    assert model_status.public_reason(reason) == public
