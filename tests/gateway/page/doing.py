"""What a person does with the page, and what a test waits for."""

from collections.abc import Iterable, Mapping
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.made import BEGIN, STORY, STORY_TOKENS
from tests.gateway.page.scripted import ScriptedGateway, Stream
from tests.support.waiting import MOST

expect.set_options(timeout=MOST * 1000)


def ask(page: Page, gateway: ScriptedGateway, prompt: str = "Why does bread rise?") -> Stream:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Generate").click()
    stream = gateway.next_stream()
    stream.send("begin", BEGIN)
    return stream


def tell(stream: Stream, rows: Iterable[Mapping[str, Any]]) -> None:
    for each in rows:
        stream.send("row", each)


def told_story(page: Page, gateway: ScriptedGateway) -> Stream:
    """Ask, and answer with the story; return when all of it is on the page, still open."""
    stream = ask(page, gateway)
    tell(stream, STORY)
    expect(tokens(page)).to_have_count(STORY_TOKENS)
    return stream


def ended(page: Page, stream: Stream, reason: str = "stop", count: int = STORY_TOKENS) -> None:
    stream.send("end", {"reason": reason, "tokens": count})
    stream.finish()
    wait_for(page, "done")


def wait_for(page: Page, state: str) -> None:
    expect(page.locator("body")).to_have_attribute("data-state", state)


def tokens(page: Page) -> Locator:
    return page.locator("#tokens .t")


def token_at(page: Page, index: int) -> Locator:
    return page.locator(f'#tokens [data-i="{index}"]')


def panel(page: Page) -> Locator:
    return page.locator("#panel")
