"""Rows that depend on each other, which Triton may not batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.engine import warmup
from torch_py_backend.errors import ConfigError, ForwardError
from torch_py_backend.values import Item, Outcome

_RNN = nn.GRU(4, 4)  # its first dimension is the time
_GAPS = 'backend: "pytorch_py"\n# max_batch_size: 8\nmax_batch_size: 0\n'
_WRITTEN = 'backend: "pytorch_py"\nmax_batch_size: 8\n'
_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "sum": lambda x: x.cumsum(0),
    "last": lambda x: x + x[-1:],
    "one value": lambda x: x[:, 0] - x[:, 0].mean(),
    "recurrent": lambda x: _RNN(x[:, None])[0][:, 0],
    "infinite": lambda x: x / (x.shape[0] > 1),
}
_INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x.softmax(-1),
    "random": lambda x: x + torch.rand(x.shape),
    "rounded": lambda x: x.bfloat16().softmax(-1).float() + 1e-3 * x.shape[0],
    "integers": lambda x: (x > x.mean(0)).long(),
    "empty": lambda x: x[:, :0],
    "padded": lambda x: torch.nn.functional.pad(x, (0, x.shape[0])),
    "writes into its inputs": lambda x: x.add_(1),
    "refuses other sizes": lambda x: x if x.shape[0] > 1 else x[5],
}


def _call(forward: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Item]], Sequence[Outcome]]:
    """Return what computes the outputs of one item, as an engine does."""

    def call(items: Sequence[Item]) -> Sequence[Outcome]:
        try:
            with torch.no_grad():
                return [{"y": forward(torch.as_tensor(items[0]["x"]))}]
        except IndexError as error:
            return [ForwardError(error)]

    return call


@pytest.mark.parametrize("name", _DEPENDENT)
@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_that_depend_on_each_other(
    name: str, dynamic: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No load if auto-completion chose the batch; a warning for dynamic batching; else nothing."""
    (tmp_path / "config.pbtxt").write_text(_GAPS)
    config = build.config(tmp_path, dynamic_batching=dynamic)
    with pytest.raises(ConfigError, match=r"'y' for a row alone .* or max_batch_size: 8"):
        warmup.check_rows(config, _call(_DEPENDENT[name]), {}, 7)
    (tmp_path / "config.pbtxt").write_text(_WRITTEN)
    caplog.clear()
    warmup.check_rows(config, _call(_DEPENDENT[name]), {}, 7)
    assert ["Triton batches those of all clients" in text for text in caplog.messages] == (
        [True] if dynamic else []
    )


@pytest.mark.parametrize("name", _INDEPENDENT)
def test_rows_that_may_be_batched(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.pbtxt").write_text(_GAPS)
    warmup.check_rows(build.config(tmp_path), _call(_INDEPENDENT[name]), {}, 7)
    assert not caplog.messages


def test_values_that_may_jump(tmp_path: Path) -> None:
    """A small difference changes some values of a mask or an order completely."""
    (tmp_path / "config.pbtxt").write_text(_GAPS)
    config = build.config(tmp_path, inputs=(build.spec("x", dims=(1000,)),))
    call = _call(lambda x: (x + 1e-3 * x.shape[0] > 0.5).float())
    warmup.check_rows(config, call, {}, 7)
