"""Toy models of a few lines. `source` turns a class or function into the text of a model.py."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_HEADER = """\
from typing import Any

import torch
from torch import Tensor, nn


"""


def source(*definitions: Callable[..., Any]) -> str:
    """The definitions as a file of Python source."""
    return _HEADER + "\n\n".join(textwrap.dedent(inspect.getsource(one)) for one in definitions)


class AddSub(nn.Module):
    def forward(self, INPUT0: Tensor, INPUT1: Tensor) -> tuple[Tensor, Tensor]:
        return INPUT0 + INPUT1, INPUT0 - INPUT1


class Affine(nn.Module):
    """Has weights, and constructor arguments."""

    def __init__(self, width: int = 4, out: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.register_buffer("offset", torch.arange(float(out)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.offset


class Factor(nn.Module):
    """Its state_dict has an entry that is no tensor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.factor = factor

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


class Negate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Outputs(nn.Module):
    """Outputs of several layouts in memory and of several origins; x comes in pairs of pairs.

    A hook of torch negates y.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _, inputs, result: {**result, "y": -result["y"]})

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = x.flatten(1)
        wide = torch.stack([rows, -rows], dim=2)
        with torch.enable_grad():
            gradient = x * torch.ones(2, 2, device=x.device, requires_grad=True)
        return {
            "y": x,
            "total": x.sum(dim=(1, 2)),
            "gradient": gradient,
            "a": wide[:, :, 0],
            "b": rows[:1].expand(len(rows), -1),
            "c": torch.view_as_complex(wide).conj().imag,
            "d": rows.cpu().numpy()[:, ::-1],
        }


class Judge(nn.Module):
    """Fails at some values, at each in another way; messages hold what must not leave."""

    def forward(self, x: Tensor) -> Any:
        wrong: Any = {
            -4: lambda: x[:-1],
            -5: lambda: torch.empty(10**15),
            -6: lambda: x.to("meta"),
            -7: x.double,
            -8: lambda: x[:, :2],
            -9: lambda: torch.cat([x, x]),
            -10: lambda: "text",
        }
        for value in x.flatten().tolist():
            if value == -1:
                raise ValueError(f"bad value in {__file__}, {object()} of 10.1.2.3:8000")
            if value == -2:
                raise SystemExit(3)
            if value == -3:
                raise RuntimeError("bad \ud800\x00 character")
            if value in wrong:
                return wrong[value]()
        return x * 2


def settings(x: Tensor) -> Tensor:
    # These two are read by setting them.
    executor = torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_executor(executor)
    profiling = torch._C._jit_set_profiling_mode(True)
    torch._C._jit_set_profiling_mode(profiling)
    values = [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.backends.cudnn.enabled,
        executor,
        profiling,
        torch._C._jit_texpr_fuser_enabled(),
        torch._C._get_graph_executor_optimize(),
    ]
    return torch.tensor([[int(value) for value in values]]).expand(x.shape[0], -1)


class Reuses(nn.Module):
    """Doubles into memory of its own, which the next call uses again; refuses 7."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = torch.zeros(4096)

    def forward(self, x: Tensor) -> Tensor:
        made = self._memory[: x.numel()].view(x.shape)
        made.copy_(x * 2)
        if bool((x == 7).any()):
            raise ValueError("seven")
        return made


def optionals(
    x: Tensor,
    scale: Tensor | None,
    state: tuple[Tensor, Tensor] | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Tensors that may be left out: two of them only together."""
    scaled = x if scale is None else x * scale
    if state is not None:
        scaled = scaled * state[0] + state[1]
    return scaled if bias is None else scaled + bias


def scalars(x: Tensor, power: int, factor: float, negative: bool, unit: str = "one") -> Tensor:
    assert [type(value) for value in (power, factor, negative, unit)] == [int, float, bool, str]
    result = x**power * factor * {"one": 1, "ten": 10}[unit]
    return -result if negative else result


def mirror(x: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"x": x, "b": b, "y": -x}


def double(x: Tensor) -> Tensor:
    return x * 2


def build_sum(width: int) -> nn.Module:
    layer = nn.Linear(width, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def echo(**inputs: Tensor) -> dict[str, Tensor]:
    """Takes whatever the config lists, and returns it."""
    return inputs


class Lengths(nn.Module):
    def forward(self, texts: list[str]) -> Tensor:
        return torch.tensor([len(text) for text in texts])


class Tokens(nn.Module):
    """Each token with its place among those that count, and how many there are."""

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        places = mask.cumsum(1) * mask
        return {"y": ids * 100 + places, "count": mask.sum(1, keepdim=True)}


class Accumulate(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> dict[str, Tensor]:
        if bool((x == -1).any()):
            raise ValueError("no -1")
        total = total + x
        return {"y": total, "sum": total}


def signals(x: Tensor, START: Tensor, END: Tensor, READY: Tensor, CORRID: Any) -> dict[str, Any]:
    return {"start": START, "end": END, "ready": READY, "corrid": CORRID}


class Chronicle(nn.Module):
    def forward(
        self, x: Tensor, words: list[str], pages: list[str], story: list[str], total: Tensor
    ) -> dict[str, Any]:
        pages = [page + word for page, word in zip(pages, words, strict=True)]
        story = [part + word for part, word in zip(story, words, strict=True)]
        total = total + x
        return {
            "y": total,
            "written": pages,
            "told": story,
            "new_pages": pages,
            "new_story": story,
            "sum": total,
        }


class Slots(nn.Module):
    """Keeps its own state: a total for each place in the batch, as LibTorch's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = torch.zeros(8, 4)

    def forward(self, x: Tensor, START: Tensor, READY: Tensor) -> Tensor:
        rows = x.shape[0]
        kept = self.totals[:rows] * (1 - START)
        self.totals[:rows] = torch.where(READY > 0, kept + x, self.totals[:rows])
        return self.totals[:rows].clone()


class Centered(nn.Module):
    """Takes each request's mean from its values, which all lie in one dimension."""

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        assert bool((x < 1000).all()), "value too large"
        lengths: list[int] = sizes.long().tolist()
        parts = x.split(lengths)
        means = torch.stack([part.mean() for part in parts])
        return x - torch.repeat_interleave(means, sizes.long()), means.unsqueeze(1)


class RowSums(nn.Module):
    """The sum of each row times a factor of its own; a request may have several rows."""

    def forward(self, x: Tensor, factor: Tensor, shape: Tensor) -> Tensor:
        lengths: list[int] = shape.prod(1).long().tolist()
        parts = x.split(lengths)
        return torch.stack([part.sum() for part in parts]).unsqueeze(1) * factor


class Times(nn.Module):
    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Tensor]:
        return {"y": x * factor}


class Measure:
    """Hooks that measure texts, for a model of four numbers."""

    def preprocess(self, text: str) -> Tensor:
        return torch.tensor([float(len(text)), 1.0, 2.0, 3.0])

    def postprocess(self, result: Tensor) -> dict[str, Any]:
        return {"label": ["a", "b", "c"][int(result.argmax())], "scores": result}


class Tied(nn.Module):
    """Has one weight in two layers, a view of it in a buffer, and arguments by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("view", self.embedding.weight.data[:2])

    def forward(self, *, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.head(self.embedding(ids)), ids.sum(1)


class Nested(nn.Module):
    def forward(
        self, x: Tensor, extra: dict[str, Tensor], pair: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        return {"y": x + extra["bias"] * pair[0] - pair[1]}


class Keys(nn.Module):
    def forward(self, batch: dict[str, Any], more: Tensor | None = None) -> dict[str, Tensor]:
        return {"double": batch["a"] * 2, "first": batch["b"][:, :1]}


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Running(nn.Module):
    """The first row of its batches does not depend on others, as in a recurrent module."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # One value of two answers may be close by chance, but not all of a row.
        return x + torch.tensor([[10 ** random.uniform(0, 30) for _ in row] for row in x])


class Branches(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if x.sum() > 0 else x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5)


class Bytes:
    """Hooks that take a file of four bytes."""

    def preprocess(self, data: bytes) -> Tensor:
        if data[0]:
            raise ValueError("not such a file")
        return torch.tensor(list(data)) / 255


class Labels:
    """Hooks that read a tokenizer in their folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def preprocess_batch(self, text: list[str]) -> Any:
        return self.tokenizer(text, padding=True, return_tensors="pt")

    def postprocess(self, result: Any) -> dict[str, Any]:
        shares = result.logits.softmax(0)
        return {"label": ["bad", "good"][int(shares.argmax())], "share": shares.max()}
