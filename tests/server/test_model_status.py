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


_NESTED = (
    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException:"
    " model 'm': /a/b.pt failed: model 'm': no x.\n\nAt:\n  y;"
)
_NO_BACKEND = "unable to find backend library for backend"
_TRY = ", try specifying runtime on the model configuration"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (_NESTED, "/a/b.pt failed: no x."),
        ("load failed for model 'm': at least one version", "at least one version"),
        ("Invalid argument: size is 1;", "size is 1"),
        ("model 'n': it failed; now", "model 'n': it failed; now"),
        (
            f"{_NO_BACKEND} 'PyTorch-py'{_TRY}.;",
            f"{_NO_BACKEND} 'PyTorch-py'. Did you mean pytorch_py?",
        ),
        (f"Not found: {_NO_BACKEND} 'onnx'{_TRY}.", f"{_NO_BACKEND} 'onnx'{_TRY}."),
    ],
    ids=["nested", "no version", "argument", "another model", "misspelt", "other backend"],
)
def test_causes_of_failed_loads(reason: str, cause: str) -> None:
    """Beside the model's name, a line has the cause alone; for a misspelt backend, its name."""
    assert model_status.cause("m", reason) == cause
