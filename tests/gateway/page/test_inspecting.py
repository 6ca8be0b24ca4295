"""Looking at a token: by pointer, by keyboard, and what the panel then says."""

import json

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.doing import ask, ended, panel, tell, token_at, tokens, told_story
from tests.gateway.page.made import long_story, row, token
from tests.gateway.page.scripted import ScriptedGateway

pytestmark = pytest.mark.xdist_group("browser")


def plain(found: Locator) -> list[str]:
    """Return what each element says, in a line."""
    return [" ".join(each.split()) for each in found.all_inner_texts()]


def fact(page: Page, name: str) -> str:
    return panel(page).locator("dl div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()


def test_hovering_shows_the_token(page: Page, gateway: ScriptedGateway) -> None:
    """While the pointer is over a token, the panel has its text, probability, rank, and where it came from."""
    stream = told_story(page, gateway)
    token_at(page, 2).hover()
    expect(panel(page).locator("h2 bdi")).to_have_text("␣something")
    expect(panel(page).locator(".probability")).to_have_text("74.0\u202f%rank 1")
    facts = {"Logprob": "\u22120.3011", "Position": "2", "Step": "12", "Worker": "worker-0", "Epoch": "77"}
    assert {name: fact(page, name) for name in facts} == facts
    page.get_by_label("Prompt").hover()
    expect(panel(page)).to_have_attribute("data-open", "false")
    ended(page, stream)


def test_entropy_is_shown_where_it_is_known(page: Page, gateway: ScriptedGateway) -> None:
    stream = ask(page, gateway)
    tell(stream, [row(1, 0, [token("a", 0.5) | {"entropy": 1.25}, token("b", 0.5)])])
    token_at(page, 0).click()
    assert fact(page, "Entropy") == "1.2500"
    token_at(page, 1).click()
    expect(panel(page).get_by_text("Entropy")).to_have_count(0)


def test_alternatives_are_bars(page: Page, gateway: ScriptedGateway) -> None:
    """Each alternative has a bar as long as its probability, the chosen one is marked, and the rest is one bar."""
    stream = told_story(page, gateway)
    token_at(page, 2).hover()
    bars = panel(page).locator(".bars li")
    expect(bars).to_have_count(3)
    assert plain(bars.locator("bdi")) == ["␣something (chosen)", "␣other"]
    assert bars.locator(".share").all_inner_texts() == ["74.0\u202f%", "13.0\u202f%", "13.0\u202f%"]
    lengths = bars.locator(".gauge i").evaluate_all("all => all.map(i => i.offsetWidth / i.parentNode.offsetWidth)")
    assert lengths == pytest.approx([0.74, 0.13, 0.13], abs=0.02)
    ended(page, stream)


def test_token_that_is_no_alternative_has_its_own_bar(page: Page, gateway: ScriptedGateway) -> None:
    """A token of a high rank stands below the alternatives that it was chosen against."""
    stream = told_story(page, gateway)
    token_at(page, 3).hover()
    expect(panel(page).locator(".probability")).to_have_text("0.40\u202f%rank 37")
    assert plain(panel(page).locator(".bars bdi")) == ["␣one", "␣other", "␣new (chosen)"]
    ended(page, stream)


def test_draft_history_of_every_kind(page: Page, gateway: ScriptedGateway) -> None:
    """Draft proposals for a position are shown with their fate: accepted, rejected, or dropped after a rejection."""
    stream = told_story(page, gateway)
    history = panel(page).locator(".history li")
    told = {
        1: ["␣is accepted step 12 · head 1 · id 252 · 90.0 % by the draft"],
        3: ["␣alive rejected step 12 · head 3 · id 561 · 80.0 % by the draft"],
        5: [
            "␣the accepted step 14 · head 1 · id 353 · 80.0 % by the draft",
            "␣the dropped: one before it was rejected step 13 · head 2 · id 353 · 70.0 % by the draft",
        ],
    }
    for index, expected in told.items():
        token_at(page, index).hover()
        expect(history).to_have_count(len(expected))
        assert plain(history) == expected
    token_at(page, 0).hover()
    expect(panel(page)).to_contain_text("No draft for this position")
    ended(page, stream)


def test_drafts_can_be_seen_in_the_text(page: Page, gateway: ScriptedGateway) -> None:
    """The other colouring marks tokens that a draft had right, those that replaced a draft, and no others."""
    stream = told_story(page, gateway)
    kinds = tokens(page).evaluate_all("all => all.map(each => each.className.split(' ').at(-1))")
    assert kinds == ["own", "accepted", "accepted", "corrected", "corrected", "accepted", "accepted", "own"]
    look = "node => getComputedStyle(node).backgroundColor"
    before = token_at(page, 3).evaluate(look)
    page.get_by_text("Drafts", exact=True).click()
    legend = page.locator('[data-for="drafts"] .corrected')
    expect(legend).to_be_visible()
    assert token_at(page, 3).evaluate(look) == legend.evaluate(look) != before
    ended(page, stream)


def test_keyboard_moves_between_tokens(page: Page, gateway: ScriptedGateway) -> None:
    """Arrows, Home and End move; each token says its text, probability and rank; Escape closes, and arrows go on."""
    ended(page, told_story(page, gateway))
    page.locator("#tokens").focus()
    focused = page.locator("#tokens :focus")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "There, 62.0\u202f%, rank 1")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "is, 97.0\u202f%, rank 1")
    expect(panel(page).locator("h2 bdi")).to_have_text("␣is")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_text("There")
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_attribute("data-open", "false")
    page.keyboard.press("End")
    expect(focused).to_have_attribute("data-i", "7")
    page.keyboard.press("Home")
    expect(focused).to_have_attribute("data-i", "0")


def test_keyboard_moves_between_lines(page: Page, gateway: ScriptedGateway) -> None:
    """Down goes to the token below, up back to where one was, and at the first line up stays."""
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


def test_clicked_token_stays(page: Page, gateway: ScriptedGateway) -> None:
    """A token that was clicked is shown again when the pointer leaves; the panel's buttons go to its neighbours."""
    ended(page, told_story(page, gateway))
    title = panel(page).locator("h2 bdi")
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


def test_token_without_a_logprob(page: Page, gateway: ScriptedGateway) -> None:
    """A token that was not scored says so, and has no bars and no colour of a probability."""
    stream = ask(page, gateway)
    plain = {"id": 3, "text": "plain", "logprob": None, "rank": None, "alternatives": []}
    tell(stream, [row(1, 0, [plain])])
    token_at(page, 0).click()
    expect(panel(page).locator(".probability")).to_have_text("not scored")
    expect(panel(page)).to_contain_text("This token has no alternatives.")
    assert token_at(page, 0).evaluate("node => node.classList.contains('unscored')")
    ended(page, stream, count=1)


def test_acceptance_has_a_line_for_each_head(page: Page, gateway: ScriptedGateway) -> None:
    """The chart has a line for each head that drafted, and says each head's rate in words too."""
    ended(page, told_story(page, gateway))
    expect(page.locator("#chart > svg")).to_have_attribute(
        "aria-label", "Accepted drafts over 4 steps: head 1 66.7\u202f%, head 2 66.7\u202f%, head 3 0.0\u202f%"
    )
    assert page.locator("#chart > svg polyline").count() == 3
    points = page.locator("#chart > svg polyline").first.get_attribute("points") or ""
    assert len(points.split()) == 3


def test_text_is_read_out_in_phrases(page: Page, gateway: ScriptedGateway) -> None:
    """A polite live region has the text sentence by sentence, and how it ended; the tokens themselves are not live."""
    ended(page, told_story(page, gateway))
    spoken = page.get_by_role("log")
    expect(spoken).to_have_attribute("aria-live", "polite")
    expect(spoken.locator("p")).to_have_text(
        ["There is something new in the dough.", "The model ended its text: 8 tokens."]
    )
    assert page.locator("#tokens").get_attribute("aria-live") is None


def test_part_of_a_character_has_its_name(page: Page, gateway: ScriptedGateway) -> None:
    """Two tokens that make a character together are named by their bytes, and the second says what it completes."""
    stream = ask(page, gateway)
    halves = [("", "bytes:\\xc3"), ("\u00e9", "bytes:\\xa9")]
    made = [{**token(text, 0.5), "name": name, "alternatives": [[7, " a", -1.0]]} for text, name in halves]
    tell(stream, [row(1, 0, made)])
    for index, (_, name) in enumerate(halves):
        token_at(page, index).click()
        expect(panel(page).locator("h2 bdi")).to_have_text(name)
        assert plain(panel(page).locator(".bars bdi"))[1] == f"{name} (chosen)"
    assert fact(page, "Completes") == "\u00e9"
    assert page.locator("#tokens").evaluate("box => box.textContent") == "\u00e9"
    ended(page, stream, count=2)


def test_fast_text_floods_nobody(page: Page, gateway: ScriptedGateway) -> None:
    """Hundreds of sentences at once are read out in a few pieces, which together are the whole text."""
    page.evaluate("""() => {
      globalThis.heard = [];
      const told = (changes) =>
        changes.forEach(({ addedNodes }) => heard.push(...[...addedNodes].map((node) => node.textContent)));
      new MutationObserver(told).observe(document.getElementById("spoken"), { childList: true });
    }""")
    stream, rows = ask(page, gateway), long_story(500)
    stream.write("".join(f"event: row\ndata: {json.dumps(each)}\n\n" for each in rows).encode())
    ended(page, stream, count=2000)
    heard = page.evaluate("heard")
    assert len(heard) < 20
    text = "".join(token["text"] for each in rows for token in each["tokens"])
    assert "".join("".join(heard[:-1]).split()) == "".join(text.split())
