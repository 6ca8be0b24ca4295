"""What follows from the metrics: the page and the alerts, which are generated, and the dashboard, which names them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tokenbus_services.metrics.document import alert_name, families, page, rules

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tokenbus.json"
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} | {
    "process_start_time_seconds",
    "tokenbus_build_info",
}


def names_in(query: str) -> set[str]:
    """Return the metrics that a query names; a histogram's series stand for it."""
    return {name.removesuffix("_bucket") for name in re.findall(r"\b(?:tokenbus|process)_[a-z_]+", query)}


@pytest.mark.parametrize(
    ("path", "written", "argument"),
    [
        (ROOT / "docs" / "metrics.md", page(), []),
        (ROOT / "deploy" / "alerts.yml", rules(), ["alerts"]),
    ],
    ids=["page", "alerts"],
)
def test_what_is_written_is_fresh(path: Path, written: str, argument: list[str]) -> None:
    """The file is what the code says, and what the command that it names writes."""
    assert path.read_text() == written
    command = [sys.executable, "-m", "tokenbus_services.metrics", *argument]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == written


def test_every_metric_is_on_the_page() -> None:
    """The page has a row for each metric, whose cells no query breaks."""
    rows = [line for line in page().splitlines() if line.startswith("| `tokenbus_")]
    assert [re.findall(r"`([a-z_]+)`", row)[0] for row in rows] == [family.name for family in families()]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}


def test_alerts_name_metrics_that_are_told() -> None:
    """Every alert's condition names its own metric, with a comparison; the rule file has each once."""
    alerting = [family for family in families() if family.alert]
    for family in alerting:
        assert names_in(family.alert) == {family.name}
        assert re.search(r"[<>=] ?[\d.]+$", family.alert)
    (group,) = YAML(typ="safe").load(rules())["groups"]
    assert [(rule["alert"], rule["expr"]) for rule in group["rules"]] == [
        (alert_name(family), family.alert) for family in alerting
    ]
    assert len({rule["alert"] for rule in group["rules"]}) == len(alerting)


def test_every_query_of_the_dashboard_names_metrics_that_are_told() -> None:
    """No panel asks for what no collector exports, and every metric is in some panel."""
    asked: set[str] = set()
    for panel in _panels():
        for target in panel["targets"]:
            names = names_in(target["expr"])
            assert names, target
            asked |= names
    known = {family.name for family in families()}
    assert asked <= known | PROCESS
    # A head's ratio is asked for by its counters too; every other name by itself.
    assert known <= asked


def test_queries_fit_the_kinds_of_their_metrics() -> None:
    """Counters are asked for by rate or increase, histograms by quantile, gauges as they are; parentheses close."""
    kinds = {family.name: family.kind for family in families()}
    for panel in _panels():
        for target in panel["targets"]:
            query = target["expr"]
            assert query.count("(") == query.count(")")
            for name in names_in(query) & set(kinds):
                rated = re.search(rf"(rate|increase)\({name}(_bucket)?(\{{[^}}]*\}})?\[", query) is not None
                assert rated == (kinds[name] != "gauge"), query
                assert ("histogram_quantile" in query) == (kinds[name] == "histogram")


def test_legends_name_labels_that_the_query_keeps() -> None:
    """A legend's label is one that the metric has, and that no aggregation drops."""
    labels = {family.name: set(family.labels) for family in families()}
    for panel in _panels():
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {
                "instance",
                "job",
                "version",
                "service",
            }
            kept = re.findall(r"sum by \(([^)]*)\)", target["expr"])
            dropped = "sum(" in target["expr"] and not kept
            has = set().union(*(labels.get(name, set()) for name in names_in(target["expr"])))
            has = set(kept[0].split(", ")) & (has | {"le"}) if kept else (set() if dropped else has)
            assert wanted <= has, target


def test_the_dashboard_has_the_rows_that_operators_look_for() -> None:
    """The rows are there, panels have numbers of their own, and none lies upon another."""
    model = json.loads(DASHBOARD.read_text())
    rows = {panel["title"] for panel in model["panels"] if panel["type"] == "row"}
    assert {"Overview", "Streams", "Requests", "Loss and healing", "Latency", "Speculative decoding"} <= rows
    assert {"Clients", "Process"} <= rows
    cells = [
        (x, y)
        for panel in model["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
