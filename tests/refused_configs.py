"""Configs that Triton refuses itself, before the backend sees the model, and what `check` says."""

from __future__ import annotations

_X = 'name: "x" data_type: TYPE_FP32'
_Y = 'output [{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }]\n'


def _input(fields: str) -> str:
    return f'backend: "pytorch_py" max_batch_size: 8\ninput [{{ {_X} {fields} }}]\n{_Y}'


# By the model's name: the text of its config.pbtxt, and a part of the error of `check`.
TABLE: dict[str, tuple[str, str]] = {
    "no_dims": (_input("dims: [ ]"), "input 'x' has dims []"),
    "no_size": (_input("dims: [ 0 ]"), "input 'x' has dims [0]"),
    "negative_size": (_input("dims: [ 4, -2 ]"), "input 'x' has dims [4, -2]"),
    "versions": (
        _input("dims: [ 4 ]") + "version_policy { specific { versions: [ 7 ] } }",
        "the model folder has no version that is served; expected a folder named 7",
    ),
}
