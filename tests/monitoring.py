"""The dashboard and the alerts as data: which queries they ask, and which metrics these name.

`python tests/monitoring.py` writes the table in docs/metrics.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import fixtures  # noqa: F401  the fake of Triton's utilities
import promql_parser
import yaml
from documentation import DOCS, ROOT, generated

from torch_py_backend.adapter import metrics as metric_families
from torch_py_backend.adapter.metrics import Family

ALERTS = ROOT / "deploy" / "kustomize" / "base" / "alerts.yaml"
SCALED_OBJECT = ROOT / "deploy/kustomize/components/keda/scaled-object.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "torch-py-backend.json"
PAGE = DOCS / "metrics.md"
# What Prometheus is told to call these servers.
JOB = "torch-py-backend"
# Labels of what scrapes, not of what is scraped.
OF_TARGETS = {"job", "instance", "namespace", "pod"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every query, by where it stands; with a value for each of Grafana's variables."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):  # rows have none
            found[f"panel {panel['title']} {target['refId']}"] = _filled(target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (series,) = re.findall(r"^label_values\((.+), \w+\)$", variable["query"]["query"])
            found[f"variable {variable['name']}"] = _filled(series)
    scaled = yaml.safe_load(SCALED_OBJECT.read_text(encoding="utf-8"))
    for trigger in scaled["spec"]["triggers"]:
        found[f"autoscaler {trigger['name']}"] = trigger["metadata"]["query"]
    return found


def _filled(query: str) -> str:
    return query.replace("$__rate_interval", "1m")


def selectors(query: str) -> Iterator[promql_parser.VectorSelector]:
    """The series that a query asks for.

    Raises:
        ValueError: Prometheus cannot read it.
    """
    yield from _selectors(promql_parser.parse(query))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for part in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
        inner = getattr(node, part, None)
        if inner is not None:
            yield from _selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from _selectors(inner)


BY_NAME = {row.name: row for row in metric_families.TABLE}


def table() -> str:
    """The table of metrics, as the code has it; what is written by hand is kept."""
    columns = ("metric", "type", "description", "models", "what a change means")
    kept = written_by_hand()
    rows = [f"{_row(row)}{' | '.join(kept.get(row.name, []))} |" for row in metric_families.TABLE]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


def written_by_hand() -> dict[str, list[str]]:
    """The models that report each metric, and what a change means."""
    rows = [line.strip("| ").split(" | ") for line in generated(PAGE, "metrics").splitlines()[2:]]
    return {cells[0].split("`")[1]: cells[3:] for cells in rows}


def _row(row: Family) -> str:
    name = row.name.removeprefix("pytorch_py_")
    labels = [f"`{label}`" for label in row.labels if label not in ("model", "version")]
    parts = ", ".join(["counter" if row.grows else "gauge", *labels])
    return f'| <a id="{name}"></a>`{row.name}` | {parts} | {row.doc}. | '


if __name__ == "__main__":
    generated(PAGE, "metrics", table())
