"""Writes docs/metrics.md from the metric families: `python -m schema_tools.metrics > docs/metrics.md`."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tokenbus.gateway.metrics import GATEWAY, VLLM
from tokenbus.metrics.families import Family
from tokenbus.metrics.processor import PROCESSOR
from tokenbus.metrics.publisher import PUBLISHER

_HEAD = """\
<!-- Generated from the metrics by `python -m schema_tools.metrics > docs/metrics.md`. Do not edit. -->

# Metrics

A processor serves its metrics at `processor.metrics_address`, a worker at `worker.metrics_address`, a gateway at
`/metrics` of `gateway.address` and at `gateway.metrics_address`. Each process of a host needs its own address.

A name that ends in `_total` is a counter; the advice in italics applies when it moves. Labels, in braces, have few
values: never a request, a client or an error text. For peaks ask Prometheus: `max_over_time(tokenbus_fill_ratio[1d])`.
`tokenbus_build_info` and the `process_` metrics of Prometheus's library are served as well.
"""
_SPECULATION = """\
If a row verified d draft tokens and emitted n tokens, it accepted n - 1 draft tokens; the last token is the target
model's. Rows without drafts or without tokens do not count. Queries for FastDeploy's figures:

| figure | query |
|---|---|
| draft acceptance rate | `sum(rate(tokenbus_speculative_accepted_tokens_total[5m])) / (sum(rate(tokenbus_speculative_draft_tokens_total[5m])) > 0)` |
| efficiency | `(sum(rate(tokenbus_speculative_accepted_tokens_total[5m])) + sum(rate(tokenbus_speculative_rows_total[5m]))) / (sum(rate(tokenbus_speculative_draft_tokens_total[5m])) + sum(rate(tokenbus_speculative_rows_total[5m])) > 0)` |
| acceptance rate of each head | `sum by (head) (rate(tokenbus_speculative_accepted_tokens_total[5m])) / (sum by (head) (rate(tokenbus_speculative_draft_tokens_total[5m])) > 0)` |
"""  # noqa: E501 - a row of a table is one line
_OF_VLLM = """\
A gateway also serves these metrics of vLLM's server, for dashboards and autoscalers. A request counts when it ends, and
each choice counts as one request; `model_name` is the model that the request named, or the first. A gateway cannot
distinguish queued requests from those in prefill, so `vllm:num_requests_waiting` has both. Sum the values of several
gateways, except for `vllm:kv_cache_usage_perc`: every gateway reports all workers (`engine`), at most two seconds old.
`vllm:prefix_cache_hits_total` and the like do not exist.
"""
_SECTIONS = {
    "fill_ratio": ("Every process", ""),
    "stream_items_total": ("Streams", ""),
    "speculative_rows_total": ("Speculative decoding", _SPECULATION),
    "open_requests": ("Requests", ""),
    "peers": ("Peers", ""),
    "log_items_total": ("The durable log", "Only a processor with [a durable log](log.md) has values here.\n"),
    "worker_connected_processors": (
        "Workers",
        "A worker serves these. The label `worker` has the same values as at the processor.\n",
    ),
    "gateway_connected_processors": ("Gateway", ""),
}
"""The heading and the introduction of each section, by the name of the section's first metric."""


def families() -> list[Family[Any]]:
    """Return all metrics except vLLM's, in the order of the page."""
    declared: Iterable[Family[Any]] = (*PROCESSOR, *PUBLISHER, *GATEWAY)
    return list({family.name: family for family in declared}.values())


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD.rstrip("\n")
    for family in families():
        if section := _SECTIONS.get(family.name.removeprefix("tokenbus_")):
            heading, introduction = section
            yield f"\n## {heading}\n"
            if introduction:
                yield introduction
        yield f"- `{family.title}`: {family.help} *{family.advice}*"
    yield from ("\n### vLLM's names\n", _OF_VLLM)
    yield ", ".join(f"`{family.title}`" for family in VLLM) + "."


if __name__ == "__main__":
    sys.stdout.write(page())
