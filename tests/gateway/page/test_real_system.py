"""The page in front of a real gateway, with a processor and workers that are processes of their own."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.doing import panel, token_at, tokens, wait_for
from tests.system.deployment import COMMAND, Deployment
from tests.system.programs import Program

pytestmark = pytest.mark.xdist_group("browser")


class System(NamedTuple):
    url: str
    worker: Program


@pytest.fixture
def system(browser: Browser) -> Iterator[System]:
    """Run a processor, a worker that takes its time, and a gateway; without a browser nothing is started."""
    del browser
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder), {"bus.heartbeat_timeout_ms": 2000, "gateway.address": "127.0.0.1:0"})
        try:
            deployment.start_processor()
            command = [COMMAND, "worker", "--steps-per-second", "50", "--engine", "synthetic", "--drafts"]
            worker = deployment.start("worker", command, worker__id="worker-7")
            worker.wait_for('"connected"')
            own = {"gateway__tokenizer": "numbers", "client__resume_timeout_ms": 5000}
            gateway = deployment.start("gateway", [COMMAND, "gateway"], **own)
            yield System(json.loads(gateway.wait_for('"logger":"gateway"'))["address"], worker)
        finally:
            deployment.close()


def test_real_tokens_a_real_stop_and_a_real_death_are_shown(system: System, open_page: Open) -> None:
    """A prompt becomes tokens of a real worker, with alternatives, a step, and heads that drafted.

    After Stop the worker has no open request any more, long before it would have come to the end. A worker that is
    killed ends the text with a message that counts its tokens, and the bus shows it as lost.
    """
    page = open_page(system.url)
    generate = page.get_by_role("button", name="Generate")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Seed").fill("36")
    generate.click()
    wait_for(page, "done")
    expect(tokens(page)).to_have_count(40)
    expect(page.locator("#ending")).to_have_text("Max tokens reached: 40 tokens.")
    token_at(page, 3).hover()
    expect(panel(page)).to_contain_text("worker-7")
    assert panel(page).locator(".bars li").count() >= 10
    assert panel(page).locator(".history li").count() >= 1
    expect(page.locator("#chart > svg")).to_have_attribute("aria-label", re.compile(r"head 1 .*, head 2 .*, head 3"))
    worker = page.locator('[data-worker="worker-7"]')
    expect(worker.locator(".state")).to_have_text("connected")

    page.get_by_label("Max tokens").fill("30000")
    generate.click()
    opened = worker.locator("dl div", has=page.get_by_text("open", exact=True)).locator("dd")
    expect(opened).to_have_text("1")
    page.get_by_role("button", name="Stop").click()
    wait_for(page, "stopped")
    expect(opened).to_have_text("0")

    generate.click()
    expect(token_at(page, 5)).to_be_attached()
    system.worker.kill()
    wait_for(page, "failed")
    told = page.get_by_role("alert").inner_text()
    assert told.startswith("The worker was lost")
    came = re.search(r"([\d,]+) tokens came before that, and are kept below\.$", told)
    assert came, told
    expect(tokens(page)).to_have_count(int(came[1].replace(",", "")))
    expect(worker.locator(".state")).to_have_text(re.compile("lost|away"))
    expect(page.locator("#pulse")).to_have_text("0 workers, 1 lost")
