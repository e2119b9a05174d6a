"""The dashboard and the alerts: what they ask for exists, and the documents say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import documentation
import monitoring
import pytest
import yaml
from documentation import DOCS, ROOT
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from torch_py_backend.engine import metrics as metric_families

_QUERIES = monitoring.queries()
_RULES = monitoring.rules()
_KNOWN = monitoring.known()
# Of the server, by Prometheus and its operator.
_OF_TARGETS = {"job", "instance", "namespace"}
_TEMPLATE = re.compile(r"\{\{(.*?)\}\}")


@pytest.mark.parametrize("place", _QUERIES)
def test_query(place: str) -> None:
    """Prometheus can read it, and of this backend it names what there is, with labels it has."""
    selectors = list(monitoring.selectors(_QUERIES[place]))
    assert selectors
    for one in selectors:
        name = str(one.name)
        if name.startswith("nv_"):  # tests/live/test_metrics.py
            continue
        assert name in _KNOWN, name
        row = _KNOWN[name]
        labels = {matcher.name for matcher in one.matchers.matchers}
        assert labels <= _OF_TARGETS | set(row.labels if row else ())


def test_every_metric_is_on_the_dashboard() -> None:
    """What is told can be seen."""
    named = {str(one.name) for query in _QUERIES.values() for one in monitoring.selectors(query)}
    assert metric_families.BY_NAME.keys() <= named


# --- alerts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_alert(rule: dict[str, Any]) -> None:
    """It has a severity, says what it is about, and leads to a page that helps."""
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    path, _, anchor = notes["runbook_url"].partition("#")
    page = ROOT / path
    assert page.parent == DOCS
    assert page.is_file()
    assert not anchor or anchor in documentation.anchors(page)


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_alert_names_labels_that_its_query_keeps(rule: dict[str, Any]) -> None:
    """A label that an aggregation drops would be empty in the message."""
    grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
    if grouped:
        kept = set.intersection(*({one.strip() for one in names.split(",")} for names in grouped))
    else:
        (selector, *_) = monitoring.selectors(rule["expr"])
        row = _KNOWN[str(selector.name)]
        kept = _OF_TARGETS | set(row.labels if row else ())
    notes = rule["annotations"]
    used = _TEMPLATE.findall(notes["summary"] + notes["description"])
    labels = {one.strip().removeprefix("$labels.") for one in used if "$labels." in one}
    assert labels
    assert labels <= kept


def test_alerts_are_in_the_page() -> None:
    """docs/metrics.md lists each alert with its severity."""
    text = monitoring.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(TorchPy\w+)` \| (\w+) \|", text, flags=re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in _RULES]


def test_promtool(tmp_path: Path) -> None:
    """Where Prometheus' own tool is at hand, the alerts fire when they should."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; promql-parser has read each query")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(monitoring.alerts()), encoding="utf-8")
    tests = shutil.copy(monitoring.ALERT_TESTS, tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", tests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- the dashboard ---------------------------------------------------------------------------


def test_grafana_knows_all_of_it() -> None:
    """Read and written by Grafana's own models, the dashboard is the same: no field is unknown."""
    register_default_plugins()
    taken = Dashboard.from_json(monitoring.dashboard())
    written = json.loads(JSONEncoder(sort_keys=True).encode(taken))
    assert _common(monitoring.dashboard(), written) == monitoring.dashboard()


def _common(sent: Any, taken: Any) -> Any:
    """What was sent, as far as it was taken; defaults that were added are left out."""
    if isinstance(sent, dict) and isinstance(taken, dict):
        return {key: _common(sent[key], taken[key]) for key in sent if key in taken}
    if isinstance(sent, list) and isinstance(taken, list):
        return [_common(*pair) for pair in zip(sent, taken, strict=False)]
    return taken


def test_panels() -> None:
    """Each has a title, queries of the chosen data source, a unit, and a place of its own."""
    taken: set[tuple[int, int]] = set()
    identities = [panel["id"] for panel in monitoring.dashboard()["panels"]]
    assert len(set(identities)) == len(identities)
    for panel in monitoring.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in monitoring.panels():
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_variables() -> None:
    """Data source, models, versions and servers may be chosen, and each query goes by them."""
    listed = {one["name"]: one for one in monitoring.dashboard()["templating"]["list"]}
    assert set(listed) == {"datasource", "model", "version", "instance"}
    for panel in monitoring.panels():
        for target in panel["targets"]:
            for selector in re.findall(r"\{([^{}]*)\}", target["expr"]):
                assert 'instance=~"$instance"' in selector, panel["title"]
    used = set(re.findall(r"\$(\w+)", json.dumps(monitoring.dashboard())))
    assert used - set(listed) == {"__rate_interval", "__all"}


def test_table_of_metrics() -> None:
    """Every metric, as the code has it; `python tests/monitoring.py` writes it."""
    assert monitoring.table_in_page() == monitoring.table()


def test_units() -> None:
    """Each metric of the page has a unit, models and a meaning; names have base units."""
    endings = {"bytes": "_bytes", "seconds": "_seconds"}
    for name, (unit, models, meaning) in monitoring.written_by_hand().items():
        assert endings.get(unit, "") in name
        assert models
        assert meaning


def test_queries_of_the_page() -> None:
    """What docs/metrics.md suggests to ask can be asked."""
    text = monitoring.PAGE.read_text(encoding="utf-8")
    cells = re.findall(r"^\|[^|]*\| `(.*)` \|$", text, flags=re.MULTILINE)
    found = [one for one in cells if "rate(" in one]
    assert len(found) == 4
    for query in found:
        for one in monitoring.selectors(query.replace("\\|", "|")):
            assert str(one.name) in _KNOWN or str(one.name).startswith("nv_inference_")
