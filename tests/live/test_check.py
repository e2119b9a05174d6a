"""`check` and the server refuse the same configs."""

from __future__ import annotations

from pathlib import Path

import pytest
import refused_configs
import serving

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_configs_that_check_refuses(tmp_path: Path) -> None:
    """The server loads the valid one alone; tests/cli/test_check.py compares what `check` says."""
    refused_configs.write(tmp_path / "repository", "valid", refused_configs.VALID)
    for name, (text, _) in refused_configs.TABLE.items():
        refused_configs.write(tmp_path / "repository", name, text)
    with serving.running(tmp_path, ready=False) as server:
        ready = {state.name for state in server.client.models() if state.ready}
    assert ready == {"valid"}
