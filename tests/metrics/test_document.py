"""What follows from the metrics: the page, the alerts and the dashboard, which name them."""

import json
import re

from ruamel.yaml import YAML

from schema_tools.metrics import families, page
from tests.pages import ROOT
from tokenbus.gateway.metrics import VLLM

FAMILIES = families()
PAGE = (ROOT / "docs" / "metrics.md").read_text()
BY_NAME = {family.name: family for family in (*FAMILIES, *VLLM)}
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tokenbus.json"
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} | {
    "process_start_time_seconds",
    "tokenbus_build_info",
}


def names_in(query: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in re.findall(r"\b(?:tokenbus_|process_|vllm:)[a-z_]+", query)}


def test_families_stay_few() -> None:
    """There is one family for each thing that an operator asks: at most 81 in all."""
    assert len(FAMILIES) + len(VLLM) <= 81


def test_page_is_what_the_code_says() -> None:
    """docs/metrics.md is what `python -m schema_tools.metrics` prints, and each of our metrics has advice."""
    assert page() == PAGE
    assert all(family.advice for family in FAMILIES)


def test_alerts_name_metrics_that_are_told() -> None:
    given = YAML(typ="safe").load((ROOT / "deploy" / "alerts.yml").read_text())
    (group,) = given["groups"]
    assert (list(given), set(group)) == (["groups"], {"name", "rules"})
    for rule in group["rules"]:
        (name,) = names_in(rule["expr"])
        family = BY_NAME[name]
        metric = "".join(word.capitalize() for word in name.removesuffix("_total").split("_"))
        value = rule["alert"].removeprefix(metric).lower()
        assert rule["alert"].startswith(metric)
        assert not value or f'"{value}"' in rule["expr"]
        assert re.search(r"[<>=] ?[\d.]+$", rule["expr"])
        assert rule.get("for") == ("1m" if family.kind == "gauge" else None)
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["annotations"]["summary"] == family.help
        assert rule["annotations"]["description"] in family.advice
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 30


def test_queries_of_the_dashboard_fit_their_metrics() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels if panel["type"] != "row" for target in panel["targets"]]
    for query in queries:
        assert query.count("(") == query.count(")")
        assert names_in(query), query
        for name in names_in(query) & BY_NAME.keys():
            kind = BY_NAME[name].kind
            rated = re.search(rf"(rate|increase)\({name}(_bucket)?(\{{[^}}]*\}})?\[", query) is not None
            assert rated == (kind != "gauge"), query
            assert ("histogram_quantile" in query) == (kind == "histogram")
    asked = set().union(*map(names_in, queries))
    assert {family.name for family in FAMILIES} <= asked <= BY_NAME.keys() | PROCESS
