"""What Triton says of its models, put together and made fit to be told."""

from __future__ import annotations

import pytest

from torch_py_backend.server import model_status
from torch_py_backend.server.tritonserver import ModelState


def test_versions_of_a_model() -> None:
    """A model serves if one version does, and is unloaded if all are."""
    states = [
        ModelState("m", "1", False, "unloaded", unloaded=True),
        ModelState("m", "2", True, ""),
        ModelState("n", "1", False, "unloaded", unloaded=True),
        ModelState("o", "1", False, "unloaded", unloaded=True),
        ModelState("o", "2", False, "because"),
    ]
    found = model_status.by_model(states)
    assert (found["m"].ready, found["m"].versions) == (True, "2")
    assert (found["n"].ready, found["n"].unloaded) == (False, True)
    assert (found["o"].unloaded, found["o"].reason) == (False, "because")


_REFUSED = (
    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: Oops: no"
    " /srv/a/b.pt.\n\nAt:\n  /srv/x.py(3): f\n;"
)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Internal: Stub process 'm' is not healthy.", "Stub process 'm' is not healthy"),
        (
            _REFUSED,
            "Oops: no b.pt",
        ),
        ("", "no reason was given"),
    ],
)
def test_reasons_that_may_leave_the_server(reason: str, says: str) -> None:
    """No folder, no trace, one line."""
    assert model_status.public_reason(reason) == says
