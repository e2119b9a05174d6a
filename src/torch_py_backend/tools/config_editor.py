"""Parameters and the count of instances written into config.pbtxt; all else stays as it was.

The text is edited where a value stands, and the result is accepted only if Triton's own parser
reads from it the old document with just these changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_py_backend.config import pbtxt
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import ConfigError

_TOKEN = re.compile(
    r"""(?P<gap>\s+|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<word>[^\s\#"'{}<>\[\]:,;]+)|(?P<mark>[{}<>\[\]:,;])""",
    re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Value:
    """A value's place in the text; a message has fields, a list has elements."""

    start: int
    end: int
    fields: tuple[_Field, ...] = ()
    elements: tuple[_Value, ...] = ()


@dataclass(frozen=True, slots=True)
class _Field:
    """A field's place in the text, its separator included."""

    name: str
    start: int
    end: int
    value: _Value

    @property
    def values(self) -> Sequence[_Value]:
        """What it holds, whether written as a list or alone."""
        return self.value.elements or (self.value,)


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


def edit(
    model: str, written: str, parameters: Mapping[str, str | None], instances: int | None
) -> str:
    """The text of a config.pbtxt with other settings.

    Args:
        model: the model's name.
        written: the text as it is.
        parameters: values by key; None takes the parameter out. Another key of the same meaning
            is taken out, too.
        instances: the count of its instance group; None: as it is.

    Raises:
        ConfigError: the text is no config.pbtxt, or is written in a way that this cannot edit.
    """
    before = pbtxt.parse(model, written)
    wished = _with_other_keys(parameters)
    expected = _changed(model, before, wished, instances)
    if expected == before:
        return written
    try:
        text = _edited(written, wished, instances, before)
        reached = pbtxt.parse(model, text) == expected
    except (ConfigError, IndexError):  # the tokens ended early: Triton reads some text otherwise
        reached = False
    if not reached:
        raise ConfigError(
            model,
            "config.pbtxt is written in a way that cannot be edited without changing more",
            cure=f"Write this into it yourself: {_by_hand(parameters, instances)}",
        )
    return text


def _edited(
    text: str, parameters: Mapping[str, str | None], instances: int | None, before: Any
) -> str:
    # One change after another: each finds its places in the text that the last one left.
    for key, value in parameters.items():
        text = _set_parameter(text, key, value)
    return text if instances is None else _set_instances(text, instances, before)


def _with_other_keys(parameters: Mapping[str, str | None]) -> dict[str, str | None]:
    also = {row.key: row.also for row in TABLE}
    others = {other: None for key in parameters for other in also.get(key, ())}
    return {**others, **parameters}


def _changed(
    model: str, before: Any, parameters: Mapping[str, str | None], instances: int | None
) -> Any:
    """The document that the edited text must parse to."""
    after = type(before)()
    after.CopyFrom(before)
    for key, value in parameters.items():
        if value is not None:
            after.parameters[key].string_value = value
        elif key in after.parameters:
            del after.parameters[key]
    if instances is not None and instances != count(model, before):
        group = after.instance_group[0] if after.instance_group else after.instance_group.add()
        group.count = instances
    return after


def count(model: str, message: Any) -> int:
    """The count of a config's one instance group; 1 where it says none.

    Raises:
        ConfigError: there are several.
    """
    if len(message.instance_group) > 1:
        raise ConfigError(
            model,
            f"config.pbtxt has {len(message.instance_group)} instance groups",
            expected="one, whose count can be chosen",
            cure="Leave one of them, or set the counts yourself.",
        )
    found = message.instance_group[0].count if message.instance_group else 0
    return found or 1


def _by_hand(parameters: Mapping[str, str | None], instances: int | None) -> str:
    lines = [
        _parameter(key, value) if value is not None else f"no {key}"
        for key, value in parameters.items()
    ]
    if instances is not None:
        lines.append(f"instance_group count: {instances}")
    return "; ".join(lines)


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: {_quoted(value)} }} }}'


def _quoted(value: str) -> str:
    # JSON's escapes of quotes and backslashes are protobuf's as well.
    return json.dumps(value, ensure_ascii=False)


# --- changes ---------------------------------------------------------------------------------


def _set_parameter(text: str, key: str, value: str | None) -> str:
    edits: list[_Edit] = []
    for field in _top(text, "parameters"):
        found = [one for one in field.values if _key(text, one) == key]
        if value is None:
            edits += _removal(text, field, found)
        else:
            edits += [_new_value(text, one, key, value) for one in found]
    if edits or value is None:
        return _apply(text, edits)
    return _append(text, _parameter(key, value))


def _key(text: str, entry: _Value) -> str | None:
    for field in entry.fields:
        if field.name == "key":
            return text[field.value.start + 1 : field.value.end - 1]
    return None


def _new_value(text: str, entry: _Value, key: str, value: str) -> _Edit:
    for outer in entry.fields:
        for inner in outer.value.fields if outer.name == "value" else ():
            if inner.name == "string_value":
                return _Edit(inner.value.start, inner.value.end, _quoted(value))
    opened, closed = text[entry.start], text[entry.end - 1]
    inside = f' key: "{key}" value {{ string_value: {_quoted(value)} }} '
    return _Edit(entry.start, entry.end, f"{opened}{inside}{closed}")


def _removal(text: str, field: _Field, found: Sequence[_Value]) -> list[_Edit]:
    if not found:
        return []
    if len(found) == len(field.values):
        return [_whole_lines(text, field.start, field.end)]
    edits = []
    for one in found:
        comma = _next_comma(text, one.end)
        if comma is not None:
            edits.append(_whole_lines(text, one.start, comma))
        else:  # the last of the list: the comma before it goes, too, wherever that stands
            edits.append(_whole_lines(text, one.start, one.end))
    kept = [one for one in field.values if one not in found]
    if field.values[-1] in found:
        end = _next_comma(text, kept[-1].end)
        if end is not None and not any(edit.start < end <= edit.end for edit in edits):
            edits.append(_Edit(end - 1, end, ""))
    return edits


def _next_comma(text: str, start: int) -> int | None:
    """The end of the comma that comes next, if nothing but a gap comes before it."""
    token = next(_tokens(text, start), None)
    return token.end if token is not None and token.text == "," else None


def _whole_lines(text: str, start: int, end: int) -> _Edit:
    """A removal that leaves no blank line behind."""
    line = text.rfind("\n", 0, start) + 1
    rest = re.compile(r"[ \t]*\r?\n?").match(text, end)
    if rest is not None and not text[line:start].strip() and rest[0].endswith("\n"):
        return _Edit(line, rest.end(), "")
    return _Edit(start, end, "")


def _set_instances(text: str, instances: int, before: Any) -> str:
    found = [group for field in _top(text, "instance_group") for group in field.values]
    if not before.instance_group:
        return (
            text if instances == 1 else _append(text, f"instance_group [{{ count: {instances} }}]")
        )
    counts = [field for field in found[0].fields if field.name == "count"]
    if counts:
        place = counts[-1].value
        return _apply(text, [_Edit(place.start, place.end, str(instances))])
    if instances == 1:
        return text
    inside = found[0].start + 1
    return _apply(text, [_Edit(inside, inside, f" count: {instances}")])


def _append(text: str, line: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text or text.endswith("\n") else newline
    return f"{text}{gap}{line}{newline}"


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    for one in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: one.start] + one.text + text[one.end :]
    return text


# --- places ----------------------------------------------------------------------------------


def _top(text: str, name: str) -> list[_Field]:
    """The fields of this name at the top of the document, in order."""
    reader = _Reader(list(_tokens(text, 0)))
    return [field for field in reader.message("") if field.name == name]


def _tokens(text: str, start: int) -> Iterator[_Token]:
    while start < len(text):
        match = _TOKEN.match(text, start)
        if match is None:
            return  # what comes out is not what was expected, and is refused
        if match.lastgroup != "gap":
            yield _Token(match[0], match.start(), match.end())
        start = match.end()


class _Reader:
    """Places of fields and values in the tokens of a text that Triton's parser has accepted."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._position = 0

    def _next(self) -> str:
        more = self._position < len(self._tokens)
        return self._tokens[self._position].text if more else ""

    def _take(self) -> _Token:
        self._position += 1
        return self._tokens[self._position - 1]

    def message(self, closing: str) -> tuple[_Field, ...]:
        """Fields up to this mark; the mark is left."""
        fields = []
        while self._next() not in (closing, ""):
            fields.append(self._field())
        return tuple(fields)

    def _field(self) -> _Field:
        name = self._take()
        if name.text == "[":  # the name of an extension, which is in brackets
            while self._take().text != "]":
                pass
        if self._next() == ":":
            self._take()
        value = self._value()
        end = self._take().end if self._next() in (",", ";") else value.end
        return _Field(name.text, name.start, end, value)

    def _value(self) -> _Value:
        first = self._take()
        if first.text in _CLOSING:
            fields = self.message(_CLOSING[first.text])
            return _Value(first.start, self._take().end, fields=fields)
        if first.text == "[":
            return self._list(first)
        end = first.end
        while first.text[0] in "\"'" and self._next()[:1] in ('"', "'"):
            end = self._take().end  # strings that stand side by side are one
        return _Value(first.start, end)

    def _list(self, first: _Token) -> _Value:
        elements = []
        while self._next() != "]":
            elements.append(self._value())
            if self._next() == ",":
                self._take()
        return _Value(first.start, self._take().end, elements=tuple(elements))
