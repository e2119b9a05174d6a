"""Edit parameters and the instance count in the text of a config.pbtxt; the rest stays as it is.

Regular expressions propose edits. The first one is accepted from whose text Triton's parser reads
the expected document.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch_py_backend.config import pbtxt
from torch_py_backend.config.options import TABLE
from torch_py_backend.errors import ConfigError

_STRING = r"""(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_COMMENT = r"#[^\n]*"
_GAP = rf"(?:\s|{_COMMENT})*"
_FIELDS = rf"""(?:{_STRING}|{_COMMENT}|[^{{}}<>"'#])*"""
# An entry of the map `parameters`: a message with a key and a message.
_ENTRY = rf"[{{<]{_FIELDS}(?:[{{<]{_FIELDS}[}}>]{_FIELDS})?[}}>]"
_VALUE = re.compile(rf"\bstring_value\s*:?\s*({_STRING}(?:{_GAP}{_STRING})*)")
# An entry is removed with its field, or with a comma of its list; comments beside it are kept.
_REMOVED = [
    re.compile(pattern)
    for pattern in (
        rf"\bparameters\s*:?\s*(?:{_ENTRY}|\[\s*{_ENTRY}\s*\])(?:\s*[,;])?",
        rf"{_ENTRY}(?P<gap>{_GAP}),",
        rf",(?P<gap>{_GAP}){_ENTRY}",
    )
]
_COUNT = re.compile(r"\bcount\s*:\s*(\d+)")
_GROUP = re.compile(r"\binstance_group\s*:?\s*\[?\s*[{<]")


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
    lines = [
        f"no {key}" if value is None else pbtxt.parameter(key, value)
        for key, value in parameters.items()
    ]
    if instances is not None:
        lines.append(f"instance_group count: {instances}")
    refusal = ConfigError(
        model,
        "config.pbtxt is written in a way that cannot be edited without changing more",
        cure=f"Write this into it yourself: {'; '.join(lines)}",
    )
    aliases = {row.key: row.aliases for row in TABLE}
    removed = {alias: None for key in parameters for alias in aliases.get(key, ())}
    document = pbtxt.parse(model, text)
    for key, value in {**removed, **parameters}.items():
        current = document.parameters[key].string_value if key in document.parameters else None
        if value == current:
            continue
        if value is None:
            del document.parameters[key]
            proposals = _without_entry(text)
        else:
            document.parameters[key].string_value = value
            proposals = _with_parameter(text, key, value)
        text = _accepted(document, proposals, refusal)
    if instances not in (None, count(model, document)):
        groups = document.instance_group
        (groups[0] if groups else groups.add()).count = instances
        text = _accepted(document, _with_count(text, str(instances)), refusal)
    return text


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


def _accepted(document: Any, proposals: Iterable[str], refusal: ConfigError) -> str:
    """Return the first text with the expected document, or raise the refusal."""
    for text in proposals:
        with contextlib.suppress(ConfigError):  # the text cannot be parsed any more
            if pbtxt.parse(document.name, text) == document:
                return text
    raise refusal


def _with_parameter(text: str, key: str, value: str) -> Iterator[str]:
    quoted = pbtxt.quote(value)
    for match in _VALUE.finditer(text):
        yield text[: match.start(1)] + quoted + text[match.end(1) :]
    yield _append(text, pbtxt.parameter(key, value))


def _without_entry(text: str) -> Iterator[str]:
    for pattern in _REMOVED:
        for match in pattern.finditer(text):
            gap = match.groupdict(default="").get("gap", "").rstrip()
            before, after = text[: match.start()] + gap, text[match.end() :]
            line = before.rpartition("\n")[2]
            blank = re.match(r"[ \t]*\r?\n", after)
            if blank and not line.strip():  # nothing else is on the line
                yield before.removesuffix(line) + after[blank.end() :]
            else:
                yield before + after


def _with_count(text: str, instances: str) -> Iterator[str]:
    for match in _COUNT.finditer(text):
        yield text[: match.start(1)] + instances + text[match.end(1) :]
    for match in _GROUP.finditer(text):
        yield f"{text[: match.end()]} count: {instances}{text[match.end() :]}"
    yield _append(text, f"instance_group [{{ count: {instances} }}]")


def _append(text: str, line: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text or text.endswith("\n") else newline
    return f"{text}{gap}{line}{newline}"
