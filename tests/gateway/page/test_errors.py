"""What a person sees when something goes wrong."""

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.doing import ask, ended, tokens, told_story, wait_for
from tests.gateway.page.made import STORY_TOKENS
from tests.gateway.page.scripted import ScriptedGateway

pytestmark = pytest.mark.xdist_group("browser")


def problem(page: Page) -> str:
    wait_for(page, "failed")
    return " ".join(page.get_by_role("alert").inner_text().split())


def test_broken_stream_is_an_error_that_counts(page: Page, gateway: ScriptedGateway) -> None:
    """An error event, an end without a word and a damaged event each become a message with how many tokens came.

    The tokens stay, and the next request clears the message.
    """
    stream = told_story(page, gateway)
    stream.send("error", {"code": "worker_lost", "message": "worker worker-0 was lost", "tokens": STORY_TOKENS})
    stream.finish()
    expected = "The worker was lost Worker worker-0 was lost. 8 tokens came before that, and are kept below."
    assert problem(page) == expected
    expect(tokens(page)).to_have_count(STORY_TOKENS)
    told_story(page, gateway).finish()
    assert "The stream stopped without saying how the request ended. 8 tokens came" in problem(page)
    stream = told_story(page, gateway)
    stream.write(b"event: row\ndata: {broken\n\n")
    assert "The gateway sent an event that is not JSON." in problem(page)
    assert stream.wait_until_closed()
    ended(page, ask(page, gateway))
    expect(page.get_by_role("alert")).to_be_hidden()


def test_refusal_says_what_to_change(open_page: Open, gateway: ScriptedGateway) -> None:
    """A refused request shows the gateway's own words, with the field at fault in focus, or when to try again.

    A field that is empty, out of range or beyond the numbers that can be sent exactly makes no request at all.
    """
    page = open_page(gateway.url, refused=("inspect",))
    generate = page.get_by_role("button", name="Generate")
    for field, number in {"Max tokens": "0", "Top p": "", "Seed": "9007199254740993"}.items():
        right = page.get_by_label(field).input_value()
        page.get_by_label(field).fill(number)
        generate.click()
        expect(page.get_by_label(field)).to_be_focused()
        expect(page.locator("body")).to_have_attribute("data-state", "idle")
        page.get_by_label(field).fill(right)
    gateway.refuse(400, "temperature: at most 2, got 9", param="temperature")
    generate.click()
    assert problem(page) == "The request failed temperature: at most 2, got 9. No token came."
    expect(page.get_by_label("Temperature")).to_be_focused()
    gateway.refuse(429, "gateway.max_requests: at most 4, got 5", headers={"Retry-After": "3"}, code="overloaded")
    generate.click()
    expect(page.get_by_role("alert")).to_contain_text("The system is overloaded")
    assert problem(page).startswith("The system is overloaded gateway.max_requests: at most 4, got 5.")
    assert problem(page).endswith("Try again in 3 s.")
