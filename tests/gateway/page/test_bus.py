"""The bus on the page: its workers, their state, and which were lost."""

import re
import time

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.made import worker
from tests.gateway.page.scripted import ScriptedGateway

pytestmark = pytest.mark.xdist_group("browser")


def card(page: Page, name: str) -> Locator:
    return page.locator(f'[data-worker="{name}"]')


def number(page: Page, name: str, figure: str) -> Locator:
    return card(page, name).locator("dl div", has=page.get_by_text(figure, exact=True)).locator("dd")


def test_workers_are_shown_live(page: Page, gateway: ScriptedGateway) -> None:
    """An empty bus says how to start a worker; a worker has its role and its numbers, which follow the bus.

    Each worker names its processor only where there are several.
    """
    expect(page.locator("#bus")).to_contain_text("Start one with: tokenbus worker")
    expect(page.locator("#pulse")).to_have_text("0 workers")
    one = worker("decode-0", role="decode", lag=3, gaps=1, replays=2, retained=9, processor="p-0")
    gateway.bus["processor"] = {"open_requests": 41, "tokens": 123456}
    gateway.bus["workers"] = [one, worker("other", processor="p-0")]
    expect(card(page, "decode-0")).to_contain_text("decode")
    figures = {"open": "1", "lag": "3", "retained": "9", "gaps": "1", "replays": "2", "tokens": "1,234"}
    for figure, value in figures.items():
        expect(number(page, "decode-0", figure)).to_have_text(value)
    expect(card(page, "decode-0").get_by_role("img")).to_have_attribute(
        "aria-label", "Accepted: head 1 80.0\u202f%, head 2 50.0\u202f%"
    )
    expect(page.locator(".totals")).to_contain_text("123,456")
    expect(page.locator(".processor")).to_have_count(0)
    gateway.bus["workers"] = [one | {"open_requests": 7}, worker("other", processor="p-1")]
    expect(number(page, "decode-0", "open")).to_have_text("7")
    expect(card(page, "decode-0").locator(".processor")).to_have_text("at p-0")
    expect(card(page, "other").locator(".processor")).to_have_text("at p-1")


def test_lost_worker_is_shown_as_lost(open_page: Open, gateway: ScriptedGateway) -> None:
    """A worker that is away is said to be, one that disappears is lost, and one that comes back is connected.

    Where the bus cannot be asked the page says why, keeps what it knew, and goes on when it can be asked again.
    """
    gateway.bus["workers"] = [worker("stays"), worker("goes")]
    page = open_page(gateway.url, refused=("bus",))
    expect(page.locator("#pulse")).to_have_text("2 workers")
    gateway.bus["workers"] = [worker("stays"), worker("goes", connected=False)]
    expect(card(page, "goes").locator(".state")).to_have_text("away")
    gateway.bus["workers"] = [worker("stays")]
    expect(card(page, "goes").locator(".state")).to_have_text(re.compile(r"lost \d+ s ago"))
    expect(card(page, "stays").locator(".state")).to_have_text("connected")
    expect(page.locator("#pulse")).to_have_text("1 worker, 1 lost")
    gateway.bus, gateway.bus_status = {"error": "processor.metrics_address: nobody answers at 127.0.0.1:9"}, 503
    expect(page.locator("#bus .fault")).to_have_text(
        "The bus is unavailable: processor.metrics_address: nobody answers at 127.0.0.1:9"
    )
    expect(card(page, "stays")).to_be_visible()
    expect(page.locator("#bus")).to_contain_text("Last known state:")
    gateway.reset()
    gateway.bus["workers"] = [worker("stays"), worker("goes", epoch="78")]
    expect(card(page, "goes").locator(".state")).to_have_text("connected")
    expect(page.locator("#pulse")).to_have_text("2 workers")
    expect(page.locator("#bus .fault")).to_have_count(0)


def test_stalled_and_paused_workers_are_told_apart(page: Page, gateway: ScriptedGateway) -> None:
    """A pause is told with who asked for it and for how long it lasts, but of a worker that is away that it is."""
    pause = {"paused_by": "client: trainer", "paused_since": time.time() - 600}
    gateway.bus["workers"] = [worker("a", stalled=True), worker("b", **pause), worker("c", connected=False, **pause)]
    expect(card(page, "a").locator(".state")).to_have_text("stalled")
    expect(card(page, "b").locator(".state")).to_have_text("paused by client: trainer for 10 min")
    expect(card(page, "c").locator(".state")).to_have_text("away")


def test_value_that_no_engine_computes_cannot_be_asked_for(page: Page, gateway: ScriptedGateway) -> None:
    entropy = page.get_by_role("checkbox", name="Entropy")
    gateway.bus["workers"] = [worker("one", token_scores=[])]
    expect(entropy).to_be_disabled()
    expect(page.get_by_text("(not with this engine)")).to_be_visible()
    gateway.bus["workers"] = [worker("one", token_scores=[]), worker("other")]
    expect(entropy).to_be_enabled()
    expect(page.get_by_text("(not with this engine)")).to_be_hidden()
