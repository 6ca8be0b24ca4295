"""Looking at a token: by pointer, by keyboard, and what the panel then says."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.doing import ask, ended, panel, tell, token_at, tokens, told_story
from tests.gateway.page.made import row, token
from tests.gateway.page.scripted import ScriptedGateway

pytestmark = pytest.mark.xdist_group("browser")


def plain(found: Locator) -> list[str]:
    return [" ".join(each.split()) for each in found.all_inner_texts()]


def fact(page: Page, name: str) -> str:
    return panel(page).locator("dl div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()


def test_hovering_shows_the_token(page: Page, gateway: ScriptedGateway) -> None:
    """While the pointer is over a token, the panel has its text, probability, rank, and where it came from.

    Before anything is chosen, the first token is.

    Each alternative has a bar as long as its probability, the chosen one is marked, and the rest is one bar; a token
    of a high rank stands below the alternatives that it was chosen against.
    """
    stream = told_story(page, gateway)
    expect(panel(page).locator("h2 bdi")).to_have_text("There")
    expect(token_at(page, 0)).to_have_class(re.compile("marked"))
    token_at(page, 2).hover()
    expect(panel(page).locator("h2 bdi")).to_have_text("␣something")
    expect(panel(page).locator(".probability")).to_have_text("74.0\u202f%rank 1")
    facts = {"Logprob": "\u22120.3011", "Position": "2", "Step": "12", "Worker": "worker-0", "Epoch": "77"}
    assert {name: fact(page, name) for name in facts} == facts
    bars = panel(page).locator(".bars li")
    assert plain(bars.locator("bdi")) == ["␣something (chosen)", "␣other"]
    assert bars.locator(".share").all_inner_texts() == ["74.0\u202f%", "13.0\u202f%", "13.0\u202f%"]
    lengths = bars.locator(".gauge i").evaluate_all("all => all.map(i => i.offsetWidth / i.parentNode.offsetWidth)")
    assert lengths == pytest.approx([0.74, 0.13, 0.13], abs=0.02)
    token_at(page, 3).hover()
    expect(panel(page).locator(".probability")).to_have_text("0.40\u202f%rank 37")
    assert plain(bars.locator("bdi")) == ["␣one", "␣other", "␣new (chosen)"]
    page.get_by_label("Prompt").hover()
    expect(panel(page).locator("h2 bdi")).to_have_text("There")
    ended(page, stream)


def test_drafts_of_every_kind_are_shown(page: Page, gateway: ScriptedGateway) -> None:
    """Draft proposals for a position are shown with their fate: accepted, rejected, or dropped after a rejection.

    The other colouring marks tokens that a draft had right, those that replaced a draft, and no others.
    """
    stream = told_story(page, gateway)
    kinds = tokens(page).evaluate_all("all => all.map(each => each.classList[2])")
    assert kinds == ["own", "accepted", "accepted", "corrected", "corrected", "accepted", "accepted", "own"]
    history = panel(page).locator(".history li")
    told = {
        1: ["␣is accepted step 12 · head 1 · id 252 · 90.0 % by the draft"],
        3: ["␣alive rejected step 12 · head 3 · id 561 · 80.0 % by the draft"],
        5: [
            "␣the accepted step 14 · head 1 · id 353 · 80.0 % by the draft",
            "␣the dropped after a rejected one step 13 · head 2 · id 353 · 70.0 % by the draft",
        ],
    }
    for index, expected in told.items():
        token_at(page, index).hover()
        expect(history).to_have_count(len(expected))
        assert plain(history) == expected
    token_at(page, 0).hover()
    expect(panel(page)).to_contain_text("No draft for this position")
    look = "node => getComputedStyle(node).backgroundColor"
    before = token_at(page, 3).evaluate(look)
    page.get_by_text("Drafts", exact=True).click()
    legend = page.locator('[data-for="drafts"] .corrected')
    expect(legend).to_be_visible()
    assert token_at(page, 3).evaluate(look) == legend.evaluate(look) != before
    ended(page, stream)


def test_keyboard_and_clicks_choose_a_token(page: Page, gateway: ScriptedGateway) -> None:
    """Arrows, Home and End move; each token says its text, probability and rank; Escape closes, and arrows go on.

    A token that was clicked is shown again when the pointer leaves; the panel's buttons go to its neighbours.
    """
    ended(page, told_story(page, gateway))
    title = panel(page).locator("h2 bdi")
    page.locator("#tokens").focus()
    focused = page.locator("#tokens :focus")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "There, 62.0\u202f%, rank 1")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "is, 97.0\u202f%, rank 1")
    expect(title).to_have_text("␣is")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_text("There")
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_attribute("data-open", "false")
    page.keyboard.press("End")
    expect(focused).to_have_attribute("data-i", "7")
    page.keyboard.press("Home")
    expect(focused).to_have_attribute("data-i", "0")
    token_at(page, 5).click()
    token_at(page, 1).hover()
    expect(title).to_have_text("␣is")
    page.get_by_label("Prompt").hover()
    expect(title).to_have_text("␣the")
    page.get_by_role("button", name="Token after").click()
    expect(title).to_have_text("␣dough")
    page.get_by_role("button", name="Token before").click()
    page.get_by_role("button", name="Token before").click()
    expect(title).to_have_text("␣in")
    page.get_by_role("button", name="Close").click()
    expect(panel(page)).to_have_attribute("data-open", "false")


def test_keyboard_moves_between_lines(page: Page, gateway: ScriptedGateway) -> None:
    stream = ask(page, gateway)
    tell(stream, [row(1, 0, [token(text, 0.5) for text in ("one", " two", "\n", "six", " ten", "\n")])])
    expect(tokens(page)).to_have_count(6)
    token_at(page, 1).click()
    page.locator("#tokens").focus()
    focused = page.locator("#tokens :focus")
    for key, index in {"Enter": 1, "ArrowDown": 4, "ArrowUp": 1}.items():
        page.keyboard.press(key)
        expect(focused).to_have_attribute("data-i", str(index))
    page.keyboard.press("ArrowUp")
    expect(focused).to_have_attribute("data-i", "1")
    ended(page, stream)


def test_panel_says_what_is_known(page: Page, gateway: ScriptedGateway) -> None:
    """Entropy is shown where it is known; a token that was not scored has no bars and no colour of a probability.

    Two tokens that make a character together are named by their bytes, and the second says what it completes.
    """
    stream = ask(page, gateway)
    unscored = {"id": 3, "text": "plain", "logprob": None, "rank": None, "alternatives": []}
    halves = [("", "bytes:\\xc3"), ("\u00e9", "bytes:\\xa9")]
    made = [{**token(text, 0.5), "name": name, "alternatives": [[7, " a", -1.0]]} for text, name in halves]
    tell(stream, [row(1, 0, [token("a", 0.5) | {"entropy": 1.25}, unscored, *made])])
    token_at(page, 0).click()
    assert fact(page, "Entropy") == "1.2500"
    token_at(page, 1).click()
    expect(panel(page).locator(".probability")).to_have_text("not scored")
    expect(panel(page)).to_contain_text("This token has no alternatives.")
    expect(panel(page).get_by_text("Entropy")).to_have_count(0)
    assert token_at(page, 1).evaluate("node => node.classList.contains('unscored')")
    for index, (_, name) in enumerate(halves, 2):
        token_at(page, index).click()
        expect(panel(page).locator("h2 bdi")).to_have_text(name)
        assert plain(panel(page).locator(".bars bdi"))[1] == f"{name} (chosen)"
    assert fact(page, "Completes") == "\u00e9"
    assert page.locator("#tokens").evaluate("box => box.textContent") == "aplain\u00e9"
    ended(page, stream, count=4)
