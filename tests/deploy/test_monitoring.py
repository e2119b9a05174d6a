"""The dashboard, the alerts and the page of metrics name what there is."""

from __future__ import annotations

import re
from typing import Any

import monitoring
import pytest
from documentation import DOCS, ROOT, generated

from scripts import check_pages

_QUERIES = monitoring.queries()
_RULES = monitoring.rules()
# The series of this backend, and Prometheus' own of every server that it asks.
_KNOWN = {**monitoring.BY_NAME, "up": None}


@pytest.mark.parametrize("place", _QUERIES)
def test_prometheus_can_read_a_query_which_names_what_there_is(place: str) -> None:
    selectors = list(monitoring.selectors(_QUERIES[place]))
    assert selectors
    for selector in selectors:
        name = str(selector.name)
        if name.startswith("nv_"):  # tests/live/test_scenarios.py
            continue
        assert name in _KNOWN, name
        row = _KNOWN[name]
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= monitoring.OF_TARGETS | set(row.labels if row else ())


def test_every_metric_is_in_a_query() -> None:
    named = {str(one.name) for query in _QUERIES.values() for one in monitoring.selectors(query)}
    assert monitoring.BY_NAME.keys() <= named


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_alert(rule: dict[str, Any]) -> None:
    """It leads to a page that helps, and its message has only labels that its query keeps."""
    notes = rule["annotations"]
    path, _, anchor = notes["runbook_url"].partition("#")
    page = ROOT / path
    assert page.parent == DOCS
    assert not anchor or anchor in check_pages.anchors(page)
    grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
    if grouped:
        kept = set.intersection(*({one.strip() for one in names.split(",")} for names in grouped))
    else:
        (selector, *_) = monitoring.selectors(rule["expr"])
        row = _KNOWN[str(selector.name)]
        kept = monitoring.OF_TARGETS | set(row.labels if row else ())
    used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    assert used
    assert used <= kept


def test_alerts_are_in_the_page() -> None:
    """docs/metrics.md lists each alert with its severity."""
    text = monitoring.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(TorchPy\w+)` \| (\w+) \|", text, flags=re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in _RULES]


def test_table_of_metrics() -> None:
    """The page has every metric, as the code has it; `python tests/monitoring.py` writes it."""
    assert generated(monitoring.PAGE, "metrics") == monitoring.table()
    assert all(len(cells) == 2 and all(cells) for cells in monitoring.written_by_hand().values())
