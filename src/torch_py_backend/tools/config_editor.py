"""Edit parameters and the instance count in the text of a config.pbtxt; the rest stays as it is.

Regular expressions find the values. The edited text is accepted only if Triton's parser reads the
expected document from it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torch_py_backend.config import pbtxt
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import ConfigError

_STRING = r"""(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_COMMENT = re.compile(rf"({_STRING})|#[^\r\n]*")
# One entry of the map `parameters`.
_ENTRY = re.compile(
    rf"[{{<]\s*key\s*:?\s*(?P<key>{_STRING})[\s,;]*(?:value\s*:?\s*[{{<]\s*string_value\s*:?\s*"
    rf"(?P<value>{_STRING}(?:\s*{_STRING})*)[\s,;]*[}}>][\s,;]*)?[}}>]"
)
# What precedes the entry in a field of one entry, and what follows it with and without brackets.
_FIELD = re.compile(r"\bparameters\s*:?\s*(?P<bracket>\[\s*)?$")
_END_OF_LIST = re.compile(r"\s*\](?:\s*[,;])?")
_SEPARATOR = re.compile(r"(?:\s*[,;])?")
_GROUP = re.compile(r"\binstance_group\s*:?\s*\[?\s*[{<]")
# A count after any fields of the group, messages (two deep) included.
_COUNT = re.compile(
    r"(?:[^{}<>]|[{<](?:[^{}<>]|[{<][^{}<>]*[}>])*[}>])*?\bcount\s*:\s*(?P<count>\d+)"
)


def edit(model: str, text: str, parameters: Mapping[str, str | None], instances: int | None) -> str:
    """Return the text of a config.pbtxt with other settings.

    Args:
        model: the model's name.
        text: the current text.
        parameters: values by key; None removes the parameter. Other keys of the same meaning are
            removed, too.
        instances: the count of the instance group; None keeps it.

    Raises:
        ConfigError: the text is not a config.pbtxt, or is written in a way that cannot be edited.
    """
    aliases = {row.key: row.aliases for row in TABLE}
    removed = {alias: None for key in parameters for alias in aliases.get(key, ())}
    changes: dict[str, str | None] = {**removed, **parameters}
    before = pbtxt.parse(model, text)
    expected = type(before)()
    expected.CopyFrom(before)
    edited = text
    for key, value in changes.items():
        if value is not None:
            expected.parameters[key].string_value = value
            edited = _set_parameter(edited, key, value)
        elif key in expected.parameters:
            del expected.parameters[key]
            edited = _remove_parameter(edited, key)
    if instances is not None and instances != count(model, before):
        groups = expected.instance_group
        (groups[0] if groups else groups.add()).count = instances
        edited = _set_count(edited, instances)
    if expected == before:
        return text
    with contextlib.suppress(ConfigError):  # the text cannot be parsed any more
        if pbtxt.parse(model, edited) == expected:
            return edited
    lines = [
        f"no {key}" if value is None else _parameter(key, value)
        for key, value in parameters.items()
    ]
    if instances is not None:
        lines.append(f"instance_group count: {instances}")
    raise ConfigError(
        model,
        "config.pbtxt is written in a way that cannot be edited without changing more",
        cure=f"Write this into it yourself: {'; '.join(lines)}",
    )


def count(model: str, config: Any) -> int:
    """Return the count of a config's only instance group; 1 if it is not set.

    Raises:
        ConfigError: there are several instance groups.
    """
    if len(config.instance_group) > 1:
        raise ConfigError(
            model,
            f"config.pbtxt has {len(config.instance_group)} instance groups",
            expected="one, whose count can be chosen",
            cure="Leave one of them, or set the counts yourself.",
        )
    return (config.instance_group[0].count if config.instance_group else 0) or 1


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: {_quoted(value)} }} }}'


def _quoted(value: str) -> str:
    # JSON's escapes of quotes and backslashes are protobuf's as well.
    return json.dumps(value, ensure_ascii=False)


def _blanked(text: str) -> str:
    """Return the text with comments replaced by as many spaces."""
    return _COMMENT.sub(lambda match: match[1] or " " * len(match[0]), text)


def _entries(text: str, key: str) -> list[re.Match[str]]:
    return [match for match in _ENTRY.finditer(_blanked(text)) if match["key"][1:-1] == key]


def _set_parameter(text: str, key: str, value: str) -> str:
    entries = _entries(text, key)
    for entry in reversed(entries):
        if entry["value"] is None:
            end = entry.end("key")
            text = f"{text[:end]} value {{ string_value: {_quoted(value)} }}{text[end:]}"
        else:
            text = text[: entry.start("value")] + _quoted(value) + text[entry.end("value") :]
    return text if entries else _append(text, _parameter(key, value))


def _remove_parameter(text: str, key: str) -> str:
    while entries := _entries(text, key):
        start, end = entries[0].span()
        blanked = _blanked(text)
        field = _FIELD.search(blanked, 0, start)
        closing = _END_OF_LIST if field is not None and field["bracket"] else _SEPARATOR
        rest = closing.match(blanked, end)
        if field is not None and rest is not None:  # the field's only entry
            text = _without_lines(text, field.start(), rest.end())
        elif blanked[end:].lstrip().startswith(","):
            text = _without_lines(text, start, blanked.index(",", end) + 1)
        else:  # the last entry of a list: with the comma before it
            comma = blanked.rfind(",", 0, start)
            text = _without_lines(text, start, end)
            text = text[: max(comma, 0)] + text[comma + 1 :]
    return text


def _without_lines(text: str, start: int, end: int) -> str:
    """Return the text without a part, and without the line break if nothing else is on the line."""
    line = text.rfind("\n", 0, start) + 1
    rest = re.compile(r"[ \t]*\r?\n").match(text, end)
    if rest is not None and not text[line:start].strip():
        start, end = line, rest.end()
    return text[:start] + text[end:]


def _set_count(text: str, instances: int) -> str:
    blanked = _blanked(text)
    group = _GROUP.search(blanked)
    if group is None:
        return _append(text, f"instance_group [{{ count: {instances} }}]")
    match = _COUNT.match(blanked, group.end())
    if match is None:
        return f"{text[: group.end()]} count: {instances}{text[group.end() :]}"
    return text[: match.start("count")] + str(instances) + text[match.end("count") :]


def _append(text: str, line: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text or text.endswith("\n") else newline
    return f"{text}{gap}{line}{newline}"
