"""docs/operations.md: what it names is there, and what an operator can see has its place in it."""

import configparser
import importlib
import re
import shlex
from functools import cache
from operator import itemgetter

import numpy as np
import pytest
from ruamel.yaml import YAML

from schema_tools.metrics import families
from tests.pages import ROOT, blocks
from tokenbus.cli.arguments import Parser
from tokenbus.delivery.errors import code_name
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor.stream import ItemOutcome
from tokenbus.settings import ENTRIES, SECTIONS, Settings
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, encode
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate, SamplingParameters

PATH = ROOT / "docs" / "operations.md"
PAGE = PATH.read_text()
TOKENBUS = ROOT / "services" / "tokenbus"
METRICS = {family.name for family in families()}
CODES = {code_name(code) for code in ErrorCode.values() if code}
THEIR_OWN = {"invalid_request", "duplicate_request", "unknown_request"}
"""What a client is told of its own mistakes, which no operator need see."""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if " | " in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


_STARTS = [
    r"_log\.(?P<level>debug|info|warning|error|exception)\(",
    r"repeated_log\.begin\(\s*[^\n]+?,\s+(?:[\w.]*log\.)?(?P<repeated>\w+),",  # its key, how it is logged
    r"_refused_messages\.add\(",
    r"_warn_once\(\(.+?\),",
    r"self\._warn\(",
    r"(?<![\w.])log\(",  # at a level that was chosen just above
    r"\bevent = ",
]
_LOGGED = re.compile("(?:" + "|".join(_STARTS) + r')\s*f?"(?P<event>[^"]+)"')
_MADE = {
    "{self._kind} refused": ["worker refused", "client refused"],
    "item {outcome}": [f"item {outcome}" for outcome in (ItemOutcome.DAMAGED, ItemOutcome.DIVERGENT)],
}


@cache
def events() -> dict[str, bool]:
    """Return the events that the services log, and whether each may be one that is worse than news."""
    found: dict[str, bool] = {}
    for path in TOKENBUS.rglob("*.py"):
        for each in _LOGGED.finditer(path.read_text()):
            level = each["level"] or each["repeated"] or "warning"
            for event in _MADE.get(each["event"], [each["event"]]):
                found[event] = found.get(event, False) or level in {"warning", "error", "exception"}
    return found


def test_metrics_that_it_names_are_measured() -> None:
    named = {name for name in quoted(PAGE) if name.startswith("tokenbus_")}
    assert len(named) >= 5
    assert named <= METRICS


def test_settings_that_it_names_can_be_set() -> None:
    named = {name for name in quoted(PAGE) if re.fullmatch(rf"(?:{'|'.join(SECTIONS)})\.\w+", name)}
    assert len(named) > 30
    assert named <= ENTRIES.keys()
    variables = {entry.variable for entry in ENTRIES.values()}
    assert set(re.findall(r"TOKENBUS_[A-Z_]+", PAGE)) <= variables


def test_runbook_names_what_is_there() -> None:
    table = rows("Runbook")
    assert len(table) > 25
    for log, _, client, _ in table:
        assert set(quoted(client)) - ENTRIES.keys() <= CODES
        assert set(quoted(log)) - ENTRIES.keys() <= events().keys()


def test_every_failure_that_can_be_seen_is_explained() -> None:
    assert {name for row in rows("Runbook") for name in quoted(row[2])} >= CODES - THEIR_OWN
    assert {event for event, is_worse in events().items() if is_worse} - set(quoted(PAGE)) == set()


def test_every_alert_has_its_question_and_severity() -> None:
    given = YAML(typ="safe").load((ROOT / "deploy" / "alerts.yml").read_text())
    (group,) = given["groups"]
    rules = [(rule["alert"], rule["labels"]) for rule in group["rules"]]
    told = [
        (f"Tokenbus{name}", {"severity": severity})
        for _, severity, names in rows("The alerts")
        for name in names.split(", ")
    ]
    assert sorted(told, key=itemgetter(0)) == sorted(rules, key=itemgetter(0))
    assert set(re.findall(r"\bTokenbus[A-Z]\w+", PAGE)) <= dict(rules).keys()


def test_unit_starts_what_can_be_started() -> None:
    """The unit for systemd is one, its command is understood, and it is given longer to stop than the drain takes."""
    (block,) = blocks("ini", of="docs/operations.md")
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block.text)
    program, command, *rest = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/tokenbus")
    parser = Parser(prog=command)
    importlib.import_module(f"tokenbus.cli.{command}").declare(parser)
    assert parser.options(rest).settings == "/etc/tokenbus.toml"
    settings = Settings.load(environment={})
    drains = max(settings.processor.drain_timeout_ms, 2 * settings.worker.drain_timeout_ms)
    assert int(unit["Service"]["TimeoutStopSec"]) * 1000 > drains


@pytest.mark.parametrize(("top_k", "told", "seconds"), [(0, 15_000, 163), (20, 138_000, 19)])
def test_sizes_are_what_messages_have(top_k: int, told: int, seconds: int) -> None:
    """A step of 256 rows is as large as the page says, and retention lasts as long as it says."""
    engine = SyntheticEngine(tokens_per_step=3)
    for key in range(1, 257):
        engine.admit(Generate(request_id=key, sampling=SamplingParameters(max_tokens=9), top_logprobs=top_k))
    (batch,) = StepAssembler(Limits.default()).assemble(engine.step()[0])
    header = batch.header._replace(worker_id="worker-0", epoch=1, sequence=1)
    size = len(encode(type(batch).of_views(header, batch.columns)))
    assert told / 1000 == pytest.approx(size / 1000, rel=0.02)
    assert f"{told // 1000} kB" in PAGE
    worker = Settings.load(environment={}).worker
    lasts = np.floor(min(worker.most_items, worker.retention_bytes / size) / 100)
    assert abs(lasts - seconds) <= 1 if top_k == 0 else lasts == seconds
    assert "for 163 and 19 seconds" in PAGE.replace("\n", " ")
