"""Edits of config.pbtxt that keep the rest of the text."""

from __future__ import annotations

import re

import pytest

from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ConfigError
from torch_py_backend.tools import config_editor

_THREADS = 'parameters { key: "NUM_THREADS" value { string_value: "1" } }'
_CHANGED = _THREADS.replace('"1"', '"4"')
_A = '{ key: "A" value { string_value: "{}NUM_THREADS" } }'
_ENTRY = _THREADS.removeprefix("parameters ")
_JSON = '{"dynamic": false, "mode": "default"}'


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("", f"{_CHANGED}\n"),
        ('name: "n"  # no line end', f'name: "n"  # no line end\n{_CHANGED}\n'),
        (f"# {{ '\n{_THREADS} # behind it\n", f"# {{ '\n{_CHANGED} # behind it\n"),
        (
            'parameters: {\n  key: "NUM_THREADS" # "key\n  value: {\n    string_value: "1" # 4\n}}',
            'parameters: {\n  key: "NUM_THREADS" # "key\n  value: {\n    string_value: "4" # 4\n}}',
        ),
        (
            f'parameters: [ {_A},\n{{ key: "NUM_THREADS", value: {{ string_value: "1" }} }} ]\n',
            f'parameters: [ {_A},\n{{ key: "NUM_THREADS", value: {{ string_value: "4" }} }} ]\n',
        ),
        (
            "parameters < key: 'NUM_THREADS'; value < string_value: '1' \"2\" > >;\n",
            "parameters < key: 'NUM_THREADS'; value < string_value: \"4\" > >;\n",
        ),
        (
            'parameters{key:"NUM_THREADS"value{string_value:"1"}}',
            'parameters{key:"NUM_THREADS"value{string_value:"4"}}',
        ),
        (f"# {_THREADS}\n", f"# {_THREADS}\n{_CHANGED}\n"),
        ('name: "{ # \\" [NUM_THREADS"\r\n', f'name: "{{ # \\" [NUM_THREADS"\r\n{_CHANGED}\r\n'),
        (f"{_THREADS}\n{_THREADS}\n", f"{_THREADS}\n{_CHANGED}\n"),
        (_THREADS.replace("NUM_THREADS", "INTRA_OP_THREAD_COUNT"), f"{_CHANGED}\n"),
        ('parameters: []\nname: "x"\n', f'parameters: []\nname: "x"\n{_CHANGED}\n'),
    ],
)
def test_set(text: str, edited: str) -> None:
    """A parameter is set in its place, or at the end; comments stay."""
    assert config_editor.edit("digits", text, {"NUM_THREADS": "4"}, None) == edited


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        (f"# a\n{_THREADS}\n# b\n", "# a\n# b\n"),
        (f"# a\n  {_THREADS}  # b\n", "# a\n    # b\n"),
        (f'name: "n" {_THREADS};', 'name: "n" '),
        (f"parameters [ {_ENTRY} ]\r\n", ""),
        (f"parameters [\n  {_ENTRY},\n  {_A}\n]\n", f"parameters [\n  {_A}\n]\n"),
        (f"parameters [\n  {_A}, # a\n  {_ENTRY}\n]\n", f"parameters [\n  {_A} # a\n]\n"),
        (f"parameters [\n  {_A},\n{_ENTRY} # a\n, {_A}]", f"parameters [\n  {_A} # a\n, {_A}]"),
        ('name: "n"\n', 'name: "n"\n'),
    ],
)
def test_remove(text: str, edited: str) -> None:
    """A parameter is removed, with its line if nothing else is on it."""
    assert config_editor.edit("digits", text, {"NUM_THREADS": None}, None) == edited


_LIMITER = 'rate_limiter { resources [ { name: "R" count: 4 } ] }'


@pytest.mark.parametrize(
    ("text", "instances", "edited"),
    [
        ("", 2, "instance_group [{ count: 2 }]\n"),
        ("", 1, ""),
        ("instance_group { }", 2, "instance_group { count: 2 }"),
        ("instance_group { }", 1, "instance_group { }"),
        (
            "instance_group [{ kind: KIND_GPU gpus: [ 0, 1 ] count: 1 }] # count: 1",
            3,
            "instance_group [{ kind: KIND_GPU gpus: [ 0, 1 ] count: 3 }] # count: 1",
        ),
        ("instance_group: <count:7,kind:KIND_CPU>", 1, "instance_group: <count:1,kind:KIND_CPU>"),
        (
            f"instance_group {{ {_LIMITER} count: 1 }}",
            2,
            f"instance_group {{ {_LIMITER} count: 2 }}",
        ),
        (f"instance_group {{ {_LIMITER} }}", 2, f"instance_group {{ count: 2 {_LIMITER} }}"),
        ("instance_group: [ ]", 2, "instance_group: [ ]\ninstance_group [{ count: 2 }]\n"),
    ],
)
def test_instances(text: str, instances: int, edited: str) -> None:
    """The count is set in its place; the default of 1 is not written."""
    assert config_editor.edit("digits", text, {}, instances) == edited


def test_nothing_to_change() -> None:
    """A config that has the settings already is unchanged."""
    text = f"{_THREADS}\ninstance_group {{ count: 2 }}"
    assert config_editor.edit("digits", text, {"NUM_THREADS": "1", "OPTIMIZE": None}, 2) == text


@pytest.mark.parametrize("value", [_JSON, "", 'a "quoted\\" \\n', "größe", "line\nbreak", "'"])
def test_values_survive(value: str) -> None:
    """Triton's parser reads any value back, and it can be replaced and removed again."""
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    text = config_editor.edit("digits", _THREADS, {key: value}, None)
    assert pbtxt.parse("digits", text).parameters[key].string_value == value
    text = config_editor.edit("digits", text, {"NUM_THREADS": None, key: "other"}, None)
    assert text == pbtxt.parameter(key, "other") + "\n"


def test_several_at_once() -> None:
    """Several changes together keep the rest of the document."""
    rest = '# top\nmax_batch_size: 4 # rows\ninput [{ name: "x" data_type: TYPE_FP32 dims: -1 }]\n'
    text = f"{rest}{_THREADS}\n{_THREADS.replace('NUM_THREADS', 'OPTIMIZE')}\n"
    changes = {"NUM_THREADS": "2", "OPTIMIZE": None, "BATCH_BUCKETS": "auto"}
    edited = config_editor.edit("digits", text, changes, 2)
    assert edited.startswith(rest)
    assert re.findall(r'key: "(\w+)"', edited) == ["NUM_THREADS", "BATCH_BUCKETS"]
    assert edited.endswith("instance_group [{ count: 2 }]\n")


def test_what_cannot_be_edited() -> None:
    """What no edit changes is refused, with the lines to write by hand."""
    with pytest.raises(ConfigError, match="yourself: no NUM_THREADS; instance_group count: 2"):
        config_editor.edit("digits", f"{_THREADS}\n{_THREADS}\n", {"NUM_THREADS": None}, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instance_group [{ count: 1 }, { count: 2 }]", "2 instance groups"),
        ("instance_group [", "cannot be read"),
    ],
)
def test_refused(text: str, message: str) -> None:
    """Several instance groups and invalid configs are refused."""
    with pytest.raises(ConfigError, match=message):
        config_editor.edit("digits", text, {}, 3)
