from __future__ import annotations

from pathlib import Path

import pytest
from stateful import config, make_state

from torch_py_backend.errors import ArtifactError, ConfigError
from torch_py_backend.loading import initial_states


@pytest.mark.parametrize(
    ("dtype", "content", "message"),
    [
        ("FP32", b"1234567", "greater than actual buffer length (7 bytes)"),
        ("BYTES", b"\2\0\0\0ab\5\0\0\0", "array of size 1 into shape (2,)"),
    ],
)
def test_a_file_that_is_too_short_is_refused(
    dtype: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(content)
    state = make_state(dtype=dtype, dims=(2,), file="f")
    with pytest.raises(ArtifactError) as refusal:
        initial_states.find(config(state, folder=tmp_path), 1)
    assert "data_file of the state 'total'" in str(refusal.value)
    assert message in str(refusal.value)


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "model" / "initial_state"
    secret.write_bytes(bytes(16))
    folder.mkdir(parents=True)
    settings = config(make_state(file="f"), folder=tmp_path / "model")
    (folder / "f").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"'total' is 'f'.*in the model's own folder"):
        initial_states.find(settings, 1)
