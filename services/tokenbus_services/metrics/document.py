"""The page of all metrics for operators, and the rule file of their alerts for Prometheus."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenbus_services.gateway.metrics import GATEWAY
from tokenbus_services.metrics.families import Family, Kind
from tokenbus_services.metrics.peers import PEERS, SPECULATION
from tokenbus_services.metrics.publisher import PUBLISHER
from tokenbus_services.metrics.requests import REQUESTS, TIMES
from tokenbus_services.metrics.streams import STREAMS

_INTRODUCTION = """\
# Metrics

Written by `python -m tokenbus_services.metrics` from the code; a test holds it equal.

A processor serves its metrics at `metrics.address`, a worker at `worker.metrics_address` and a gateway at
`gateway.metrics_address`, where nothing is served unless it is set: no two processes of a host can have one address.
Port 0 takes any that is free; the log says which.

- `GET /metrics` is Prometheus' text format. It is read from plain counters on a thread of its own: a scrape makes no
  step wait, and a process whose event loop is stuck still answers.
- `GET /healthz` is status 200 while the process listens (a worker: publishes, and is not refused; a gateway: is not
  refused) and its event loop has answered within `metrics.stall_timeout_ms`; else 503. Its body is JSON, with what is
  wrong in `problems`.

Labels have few values: workers by their ids, and words from fixed lists. No request, client or error text is one.
Counters of a worker go on when it comes back, and stay for a while when it is gone. Beside what is below there are
`tokenbus_build_info` and the `process_` metrics that Prometheus' own library has of every process.

`docker compose up` starts a Prometheus with the alerts below ([deploy/alerts.yml](../deploy/alerts.yml)) and a Grafana
with a dashboard of all of this.
"""

_SPECULATIVE = """\
A row that verified d draft tokens and emitted n tokens accepted n - 1 of them, because the last one is the target
model's own. Rows without drafts, and rows that emitted nothing, do not count. Over a time range, take the counters:

| what FastDeploy's users look for | query |
|---|---|
| draft acceptance rate | {acceptance} |
| efficiency | {efficiency} |
| acceptance rate of each head | {heads} |
"""
_RANGE = "[5m]"
_ACCEPTANCE = (
    f"sum(rate(tokenbus_speculative_accepted_tokens_total{_RANGE}))"
    f" / (sum(rate(tokenbus_speculative_draft_tokens_total{_RANGE})) > 0)"
)
_EFFICIENCY = (
    f"sum(rate(tokenbus_speculative_emitted_tokens_total{_RANGE}))"
    f" / (sum(rate(tokenbus_speculative_draft_tokens_total{_RANGE}))"
    f" + sum(rate(tokenbus_speculative_rows_total{_RANGE})) > 0)"
)
_HEADS = (
    f"sum by (head) (rate(tokenbus_speculative_head_accepted_tokens_total{_RANGE}))"
    f" / (sum by (head) (rate(tokenbus_speculative_head_draft_tokens_total{_RANGE})) > 0)"
)

_SECTIONS: tuple[tuple[str, str, Iterable[Family[Any]]], ...] = (
    ("Streams", "What comes from each worker.", STREAMS),
    ("Requests", "What becomes of requests, and what is refused.", REQUESTS),
    ("Time", "How long things take, and how late the processor itself is.", TIMES),
    ("Peers and buffers", "Who is connected, and what waits for each consumer.", PEERS),
    (
        "Speculative decoding",
        _SPECULATIVE.format(acceptance=f"`{_ACCEPTANCE}`", efficiency=f"`{_EFFICIENCY}`", heads=f"`{_HEADS}`").rstrip(),
        SPECULATION,
    ),
    ("Workers", "What a worker serves; its label `worker` is the one that the processor uses.", PUBLISHER),
    ("Gateway", "What a gateway serves, at `/metrics` of its own address too.", GATEWAY),
)


def families() -> list[Family[Any]]:
    """Return all metrics, the processor's first."""
    return [family for _, _, members in _SECTIONS for family in members]


def page() -> str:
    """Return the whole page, as Markdown."""
    return "\n".join([_INTRODUCTION, *(line for section in _SECTIONS for line in _section(*section))])


def rules() -> str:
    """Return the alerts, as a rule file for Prometheus."""
    head = "# Written by `python -m tokenbus_services.metrics alerts` from the code; a test holds it equal.\n"
    alerts = [line for family in families() if family.alert for line in _rule(family)]
    return head + "\n".join(["groups:", "  - name: tokenbus", "    rules:", *alerts, ""])


def alert_name(family: Family[Any]) -> str:
    """Return the name of a metric's alert."""
    return "".join(word.capitalize() for word in family.name.removesuffix("_total").split("_"))


def _section(name: str, summary: str, members: Iterable[Family[Any]]) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield summary
    yield ""
    yield "| metric | kind | labels | what it says | what to do | alert |"
    yield "|---|---|---|---|---|---|"
    yield from (_row(family) for family in members)
    yield ""


def _row(family: Family[Any]) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    alert = family.alert.replace("|", "\\|")
    cells = (f"`{family.name}`", family.kind, labels, family.meaning, family.advice, f"`{alert}`" if alert else "")
    return f"| {' | '.join(cells)} |"


def _rule(family: Family[Any]) -> Iterator[str]:
    yield f"      - alert: {alert_name(family)}"
    yield f"        expr: {json.dumps(family.alert)}"
    if family.kind is Kind.GAUGE:  # a gauge may be high for a moment; a counter that moved has moved
        yield "        for: 1m"
    yield "        annotations:"
    yield f"          summary: {json.dumps(family.meaning)}"
    yield f"          description: {json.dumps(family.advice)}"
