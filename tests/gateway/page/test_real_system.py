"""The page in front of a real gateway, with a processor and workers that are processes of their own."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.doing import panel, token_at, tokens, wait_for
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program

pytestmark = pytest.mark.xdist_group("browser")


class System(NamedTuple):
    """What runs, and where its page is."""

    url: str
    worker: Program


@contextlib.contextmanager
def running(tokenizer: str, *engine: str) -> Iterator[System]:
    """Run a processor, a worker that takes its time, and a gateway."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder), {"bus.heartbeat_timeout_ms": 2000, "gateway.address": "127.0.0.1:0"})
        try:
            deployment.start_processor()
            command = [COMMAND, "worker", "--steps-per-second", "50", "--engine", *engine]
            worker = deployment.start("worker", command, worker__id="worker-7")
            worker.wait_for('"connected"')
            gateway = deployment.start("gateway", [COMMAND, "gateway"], gateway__tokenizer=tokenizer)
            yield System(json.loads(gateway.wait_for('"logger":"gateway"'))["address"], worker)
        finally:
            deployment.close()


@pytest.fixture
def talking(browser: Browser) -> Iterator[System]:
    """Run the engine that people see first; without a browser nothing is started."""
    del browser
    with running("ngram", "ngram") as system:
        yield system


@pytest.fixture
def endless(browser: Browser) -> Iterator[System]:
    """Run an engine whose requests never end before their length does; without a browser nothing is started."""
    del browser
    with running("numbers", "synthetic", "--drafts") as system:
        yield system


def begun(system: System, open_page: Open) -> Page:
    """Open the page, and ask for more tokens than a test has time for; return when the first have come."""
    page = open_page(system.url)
    page.get_by_label("Max tokens").fill("30000")
    page.get_by_label("Alternatives").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(token_at(page, 5)).to_be_attached()
    return page


def test_real_tokens_can_be_looked_at(talking: System, open_page: Open) -> None:
    """A prompt becomes tokens of a real engine, with alternatives, a worker, a step, and heads that drafted."""
    page = open_page(talking.url)
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Seed").fill("36")
    page.get_by_role("button", name="Generate").click()
    wait_for(page, "done")
    expect(tokens(page)).to_have_count(40)
    expect(page.locator("#ending")).to_have_text("Max tokens reached: 40 tokens.")
    token_at(page, 3).hover()
    expect(panel(page)).to_contain_text("worker-7")
    assert panel(page).locator(".bars li").count() >= 10
    assert panel(page).locator(".history li").count() >= 1
    expect(page.locator("#chart > svg")).to_have_attribute("aria-label", re.compile(r"head 1 .*, head 2 .*, head 3"))
    expect(page.locator('[data-worker="worker-7"] .state')).to_have_text("connected")


def test_real_stop_aborts_the_request_at_its_worker(endless: System, open_page: Open) -> None:
    """After Stop the worker has no open request any more, long before it would have come to the end."""
    page = begun(endless, open_page)
    opened = page.locator('[data-worker="worker-7"] dl div', has=page.get_by_text("open", exact=True))
    expect(opened.locator("dd")).to_have_text("1")
    page.get_by_role("button", name="Stop").click()
    wait_for(page, "stopped")
    expect(opened.locator("dd")).to_have_text("0")


def test_real_killed_worker_is_shown(endless: System, open_page: Open) -> None:
    """A worker that is killed ends the text with a message that counts its tokens, and the bus shows it as lost."""
    page = begun(endless, open_page)
    endless.worker.kill()
    wait_for(page, "failed")
    told = page.get_by_role("alert").inner_text()
    assert told.startswith("The worker was lost")
    came = re.search(r"([\d,]+) tokens came before that, and are kept below\.$", told)
    assert came, told
    expect(tokens(page)).to_have_count(int(came[1].replace(",", "")))
    expect(page.locator('[data-worker="worker-7"] .state')).to_have_text(re.compile("lost|away"))
    expect(page.locator("#pulse")).to_have_text("0 workers, 1 lost")
