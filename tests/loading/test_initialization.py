from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.loading import state_dict


class Module(nn.Module):
    """Calls a function with itself when it is built."""

    def __init__(self, more: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        more(self)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def _embedding(module: Any) -> None:
    module.embedding = nn.Embedding(5, 4, padding_idx=0)


def _copied_layers(module: Any) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _truncated(module: Any) -> None:
    module.positions = nn.Parameter(torch.empty(4))
    nn.init.trunc_normal_(module.positions, std=0.02)


def _through_data(module: Any) -> None:
    module.linear.weight.data.normal_(0, 0.02)


def _seeded_apart(module: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    module.register_buffer("noise", torch.randn(3, generator=generator), persistent=False)


def _saved_buffer(module: Any) -> None:
    module.register_buffer("noise", torch.empty(3).normal_())


def _scratch(module: Any) -> None:
    torch.empty(3).normal_()


def _tied(module: Any) -> None:
    module.head = nn.Linear(3, 3, bias=False)
    module.head.weight = module.linear.weight


@pytest.mark.parametrize(
    "more",
    [
        _embedding,
        _copied_layers,
        _truncated,
        _through_data,
        _seeded_apart,
        _saved_buffer,
        _scratch,
        _tied,
    ],
)
def test_weights_that_a_file_will_fill_are_not_drawn(more: Callable[[Any], None]) -> None:
    """The module is built once, and its weights are uninitialized."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(Module(more))
        return built[-1]

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert state_dict.build_uninitialized(build) is built[0]
    assert len(built) == 1
    assert torch.equal(torch.random.get_rng_state(), before)


def _unsaved_buffer(module: Any) -> None:
    module.register_buffer("noise", torch.empty(3).normal_(), persistent=False)


def _drawn_later(module: Any) -> None:
    module.register_buffer("noise", torch.randn(3), persistent=False)


def _plain_tensor(module: Any) -> None:
    module.noise = torch.empty(3).uniform_()


def _computed(module: Any) -> None:
    module.register_buffer("total", module.linear.weight.sum(), persistent=False)


def _converted(module: Any) -> None:
    module.half = module.linear.weight.to(torch.float64)


def _looked_at(module: Any) -> None:
    if module.linear.weight.abs().max() > 1:
        raise RuntimeError("a weight is too large")


def _failing_without(module: Any) -> None:
    with torch.no_grad():
        module.linear.weight.copy_(torch.full((3, 3), float("nan")))
        module.linear.weight.normal_()
    assert not torch.isnan(module.linear.weight).any()


@pytest.mark.parametrize(
    "more",
    [
        _unsaved_buffer,
        _drawn_later,
        _plain_tensor,
        _computed,
        _converted,
        _looked_at,
        _failing_without,
    ],
)
def test_a_module_that_uses_its_random_values_has_them(more: Callable[[Any], None]) -> None:
    """A module that uses its random values is built with them."""

    def build() -> nn.Module:
        return Module(more)

    torch.manual_seed(0)
    expected: Any = build()
    torch.manual_seed(0)
    built: Any = state_dict.build_uninitialized(build)
    for name, value in vars(expected).items():
        if isinstance(value, Tensor):
            assert torch.equal(getattr(built, name), value)
    for (name, value), (_, same) in zip(
        expected.named_buffers(), built.named_buffers(), strict=True
    ):
        assert torch.equal(value, same), name
    assert torch.equal(built.linear.weight, expected.linear.weight)


def test_error_of_a_constructor() -> None:
    """The error of the constructor is raised."""

    def build() -> nn.Module:
        nn.Linear(3, 3)
        raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size"):
        state_dict.build_uninitialized(build)


def test_function_keeps_its_random_values() -> None:
    """No file fills the tensors of a closure."""
    torch.manual_seed(0)
    expected = torch.empty(3).normal_()

    def build() -> Callable[[], Tensor]:
        drawn = torch.empty(3).normal_()
        return lambda: drawn

    torch.manual_seed(0)
    assert torch.equal(state_dict.build_uninitialized(build)(), expected)
