"""What a person sees when something goes wrong."""

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.doing import ask, ended, tokens, told_story, wait_for
from tests.gateway.page.made import STORY_TOKENS
from tests.gateway.page.scripted import ScriptedGateway, Stream

pytestmark = pytest.mark.xdist_group("browser")


def problem(page: Page) -> str:
    """Return the message that the page shows."""
    wait_for(page, "failed")
    return " ".join(page.get_by_role("alert").inner_text().split())


def cut(stream: Stream) -> None:
    """End an answer without a word of how the request ended."""
    stream.finish()


def test_killed_worker_is_an_error_that_counts(page: Page, gateway: ScriptedGateway) -> None:
    """An error event becomes a message with how many tokens came; they stay, and the next request clears it."""
    stream = told_story(page, gateway)
    stream.send("error", {"code": "worker_lost", "message": "worker worker-0 was lost", "tokens": STORY_TOKENS})
    stream.finish()
    expected = "The worker was lost Worker worker-0 was lost. 8 tokens came before that, and are kept below."
    assert problem(page) == expected
    expect(tokens(page)).to_have_count(STORY_TOKENS)
    ended(page, ask(page, gateway))
    expect(page.get_by_role("alert")).to_be_hidden()


def test_stream_that_just_stops_is_an_error(page: Page, gateway: ScriptedGateway) -> None:
    """A stream that stops without an end or an error is never taken for a complete answer."""
    cut(told_story(page, gateway))
    assert "The stream stopped without saying how the request ended. 8 tokens came" in problem(page)


def test_refusal_names_the_field(open_page: Open, gateway: ScriptedGateway) -> None:
    """A refused request shows the gateway's own words, and the field that is at fault has the focus."""
    page = open_page(gateway.url, refused=("inspect",))
    gateway.refuse(400, "temperature: at most 2, got 9", param="temperature")
    page.get_by_role("button", name="Generate").click()
    assert problem(page) == "The request failed temperature: at most 2, got 9. No token came."
    expect(page.get_by_label("Temperature")).to_be_focused()


def test_full_system_says_when_to_come_again(open_page: Open, gateway: ScriptedGateway) -> None:
    """Over capacity the message says when to try again."""
    page = open_page(gateway.url, refused=("inspect",))
    gateway.refuse(429, "gateway.max_requests: at most 4, got 5", headers={"Retry-After": "3"}, code="overloaded")
    page.get_by_role("button", name="Generate").click()
    assert problem(page).startswith("The system is overloaded gateway.max_requests: at most 4, got 5.")
    assert problem(page).endswith("Try again in 3 s.")


def test_event_that_is_no_json_is_an_error(page: Page, gateway: ScriptedGateway) -> None:
    """A damaged event ends the request with a message, and the connection with it."""
    stream = told_story(page, gateway)
    stream.write(b"event: row\ndata: {broken\n\n")
    assert "The gateway sent an event that is not JSON." in problem(page)
    assert stream.wait_until_closed()


@pytest.mark.parametrize(("field", "number"), [("Max tokens", "0"), ("Top p", ""), ("Seed", "9007199254740993")])
def test_wrong_numbers_are_not_sent(page: Page, field: str, number: str) -> None:
    """A field that is empty, out of range or beyond what is sent exactly is marked, and no request is made."""
    page.get_by_label(field).fill(number)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label(field)).to_be_focused()
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
