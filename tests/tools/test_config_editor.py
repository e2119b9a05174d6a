"""Edits of config.pbtxt that keep the rest of the text."""

from __future__ import annotations

import re

import pytest

from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ConfigError
from torch_py_backend.tools import config_editor

_THREADS = 'parameters { key: "NUM_THREADS" value { string_value: "1" } }'
_CHANGED = _THREADS.replace('"1"', '"4"')
_COMPILE = '{"dynamic": false, "mode": "default"}'


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("", f"{_CHANGED}\n"),
        (
            'backend: "pytorch_py"  # no line end',
            f'backend: "pytorch_py"  # no line end\n{_CHANGED}\n',
        ),
        (f"# one line\n{_THREADS} # behind it\n", f"# one line\n{_CHANGED} # behind it\n"),
        (
            (
                'parameters: {\n  key: "NUM_THREADS" # key\n  value: {\n    string_value: "1" # 4\n'
                "  }\n}\n"
            ),
            (
                'parameters: {\n  key: "NUM_THREADS" # key\n  value: {\n    string_value: "4" # 4\n'
                "  }\n}\n"
            ),
        ),
        (
            (
                'parameters: [ { key: "A" value: { string_value: "NUM_THREADS" } },\n'
                '  { key: "NUM_THREADS", value: { string_value: "1" } } ]\n'
            ),
            (
                'parameters: [ { key: "A" value: { string_value: "NUM_THREADS" } },\n'
                '  { key: "NUM_THREADS", value: { string_value: "4" } } ]\n'
            ),
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
        ('parameters { key: "NUM_THREADS" }\n', f"{_CHANGED}\n"),
        (f"{_THREADS}\n{_THREADS}\n", None),
        (
            'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }\n',
            f"{_CHANGED}\n",
        ),
        ('parameters: []\nbackend: "x"\n', None),
        ('metric_tags { key: "NUM_THREADS" value: "1" }\n', None),
    ],
)
def test_set(text: str, edited: str | None) -> None:
    """A parameter is set in its place, or at the end; comments stay."""
    edited_text = config_editor.edit("digits", text, {"NUM_THREADS": "4"}, None)
    assert edited is None or edited_text == edited
    assert pbtxt.parse("digits", edited_text).parameters["NUM_THREADS"].string_value == "4"


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        (f"# a\n{_THREADS}\n# b\n", "# a\n# b\n"),
        (f"# a\n  {_THREADS}  # b\n", "# a\n    # b\n"),
        (f'name: "n" {_THREADS}', 'name: "n" '),
        ('parameters [ { key: "NUM_THREADS" value { string_value: "1" } } ]\n', ""),
        (
            (
                'parameters [\n  { key: "NUM_THREADS" value { string_value: "1" } },\n'
                '  { key: "A" value { string_value: "1" } }\n]\n'
            ),
            'parameters [\n  { key: "A" value { string_value: "1" } }\n]\n',
        ),
        (
            (
                'parameters [\n  { key: "A" value { string_value: "1" } }, # a\n'
                '  { key: "NUM_THREADS" value { string_value: "1" } }\n]\n'
            ),
            'parameters [\n  { key: "A" value { string_value: "1" } } # a\n]\n',
        ),
        (
            (
                'parameters [ { key: "NUM_THREADS" value { string_value: "1" } },'
                ' { key: "A" value { string_value: "1" } },'
                ' { key: "NUM_THREADS" value { string_value: "2" } },'
                ' { key: "NUM_THREADS" value { string_value: "2" } } ]'
            ),
            None,
        ),
        ('name: "n"\n', 'name: "n"\n'),
    ],
)
def test_remove(text: str, edited: str | None) -> None:
    """A parameter is removed, with its line if nothing else is on it."""
    edited_text = config_editor.edit("digits", text, {"NUM_THREADS": None}, None)
    assert edited is None or edited_text == edited
    assert "NUM_THREADS" not in pbtxt.parse("digits", edited_text).parameters


@pytest.mark.parametrize(
    ("text", "instances", "edited"),
    [
        ("", 2, "instance_group [{ count: 2 }]\n"),
        ("", 1, ""),
        ("instance_group { }", 2, "instance_group { count: 2 }"),
        ("instance_group { }", 1, "instance_group { }"),
        (
            "instance_group [{ kind: KIND_GPU gpus: [ 0, 1 ] count: 1 }] # two",
            3,
            "instance_group [{ kind: KIND_GPU gpus: [ 0, 1 ] count: 3 }] # two",
        ),
        (
            'instance_group: <count:7,kind:KIND_CPU>;name:"n"',
            1,
            'instance_group: <count:1,kind:KIND_CPU>;name:"n"',
        ),
        (
            'instance_group { rate_limiter { resources [ { name: "R" count: 4 } ] } count: 1 }',
            2,
            'instance_group { rate_limiter { resources [ { name: "R" count: 4 } ] } count: 2 }',
        ),
        (
            'instance_group { rate_limiter { resources [ { name: "R" count: 4 } ] } }',
            2,
            'instance_group { count: 2 rate_limiter { resources [ { name: "R" count: 4 } ] } }',
        ),
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


@pytest.mark.parametrize("value", [_COMPILE, "", 'a "quoted\\" \\n', "größe", "line\nbreak", "'"])
def test_values_survive(value: str) -> None:
    """Triton's parser reads any value back."""
    edited_text = config_editor.edit(
        "digits", _THREADS, {"TORCH_COMPILE_OPTIONAL_PARAMETERS": value}, None
    )
    parsed = pbtxt.parse("digits", edited_text)
    assert parsed.parameters["TORCH_COMPILE_OPTIONAL_PARAMETERS"].string_value == value


def test_several_at_once() -> None:
    """Several changes together keep the rest of the document."""
    rest = (
        '# top\nmax_batch_size: 4 # rows\ninput [{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }]\n'
    )
    text = f"{rest}{_THREADS}\n" + _THREADS.replace("NUM_THREADS", "OPTIMIZE") + "\n"
    edited_text = config_editor.edit(
        "digits",
        text,
        {"NUM_THREADS": "2", "OPTIMIZE": None, "BATCH_BUCKETS": "auto"},
        2,
    )
    assert edited_text.startswith(rest)
    assert re.findall(r'key: "(\w+)"', edited_text) == ["NUM_THREADS", "BATCH_BUCKETS"]


def test_keys_with_escapes() -> None:
    """A key with escapes is refused, with the lines to write by hand."""
    text = 'parameters { key: "NUM\\x5fTHREADS" value { string_value: "1" } }'
    with pytest.raises(ConfigError, match="yourself: no NUM_THREADS; instance_group count: 2"):
        config_editor.edit("digits", text, {"NUM_THREADS": None}, 2)


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
