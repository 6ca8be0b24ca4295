"""Typing a prompt, and tokens that arrive."""

import json
import math
import re

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.page.doing import ask, ended, panel, tell, token_at, tokens, told_story, wait_for
from tests.gateway.page.made import BEGIN, STORY, STORY_TEXT, STORY_TOKENS, long_story, row, token
from tests.gateway.page.scripted import ScriptedGateway

_COUNT_CHANGES = """() => {
  globalThis.changes = 0;
  globalThis.heard = [];
  const watched = new MutationObserver(() => { changes += 1; });
  watched.observe(document.getElementById("tokens"), { childList: true, subtree: true });
  const told = (changes) =>
    changes.forEach(({ addedNodes }) => heard.push(...[...addedNodes].map((node) => node.textContent)));
  new MutationObserver(told).observe(document.getElementById("spoken"), { childList: true });
}"""
_LOOK = "node => getComputedStyle(node).backgroundColor"
pytestmark = pytest.mark.xdist_group("browser")


def test_request_is_what_was_typed(page: Page, gateway: ScriptedGateway) -> None:
    for label, value in {"Max tokens": "64", "Temperature": "0.7", "Alternatives": "5", "Top p": "0.9"}.items():
        page.get_by_label(label).fill(value)
    stream = ask(page, gateway, "Grüße,\n世界")
    sampling = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "top_logprobs": 5, "seed": None}
    assert stream.body == {"prompt": "Grüße,\n世界", **sampling, "stop": [], "drafts": True, "return_entropies": False}
    ended(page, stream)
    page.get_by_label("Seed").fill("41")
    page.get_by_label("Entropy").check()
    body = ask(page, gateway).body
    assert (body["seed"], body["return_entropies"]) == (41, True)


def test_one_wish_is_one_request(page: Page, gateway: ScriptedGateway) -> None:
    """A double click, and Ctrl+Enter that is held down, ask once."""
    page.get_by_role("button", name="Generate").dblclick()
    for prompt in ("the second wish", "the third wish"):
        stream = gateway.next_stream()
        stream.send("begin", BEGIN)
        tell(stream, STORY)
        ended(page, stream)
        page.get_by_label("Prompt").fill(prompt)
        page.keyboard.down("Control")
        for _ in range(3):
            page.keyboard.down("Enter")
        page.keyboard.up("Enter")
        page.keyboard.up("Control")
    assert gateway.next_stream().body["prompt"] == "the third wish"


def test_story_appears_and_is_summed_up(page: Page, gateway: ScriptedGateway) -> None:
    """Each row is on the page before the next one is sent; the figures and the chart are counted from what came.

    A polite live region has the text sentence by sentence, and how it ended; the tokens themselves are not live.
    """
    stream = ask(page, gateway)
    wait_for(page, "streaming")
    shown = 0
    for each in STORY:
        tell(stream, [each])
        shown += len(each["tokens"])
        expect(tokens(page)).to_have_count(shown)
    assert page.locator("#tokens").evaluate("box => box.textContent") == STORY_TEXT
    ended(page, stream)
    ending = "The model ended its text: 8 tokens."
    expect(page.locator("#ending")).to_have_text(ending)
    logprobs = [token["logprob"] for each in STORY for token in each["tokens"]]
    expected: dict[str, str | re.Pattern[str]] = {
        "tokens": "8",
        "tokens/s": re.compile(r"^[\d,]+$"),
        "tokens a step": "2.00",
        "drafts accepted": "57.1\u202f%",
        "perplexity": f"{math.exp(-sum(logprobs) / len(logprobs)):.2f}",
    }
    for name, value in expected.items():
        figure = page.locator("#figures div", has=page.get_by_text(name, exact=True)).locator("dd")
        expect(figure).to_have_text(value)
    expect(page.locator("#origin")).to_have_text(f"made · 5 prompt tokens · request {BEGIN['request']}")
    chart = page.locator("#chart > svg")
    expect(chart).to_have_attribute(
        "aria-label", "Accepted drafts over 4 steps: head 1 66.7\u202f%, head 2 66.7\u202f%, head 3 0.0\u202f%"
    )
    assert chart.locator("polyline").count() == 3
    assert len((chart.locator("polyline").first.get_attribute("points") or "").split()) == 3
    spoken = page.get_by_role("log")
    expect(spoken).to_have_attribute("aria-live", "polite")
    expect(spoken.locator("p")).to_have_text([STORY_TEXT.strip(), ending])
    assert page.locator("#tokens").get_attribute("aria-live") is None


def test_tokens_have_the_colour_of_their_probability(page: Page, gateway: ScriptedGateway) -> None:
    stream = ask(page, gateway)
    edges = [1.0, 0.9, 0.8999, 0.7, 0.5, 0.3001, 0.1, 0.01, 0.0099]
    tell(stream, [row(1, 0, [token("x", probability) for probability in edges])])
    expect(tokens(page)).to_have_count(len(edges))
    classes = tokens(page).evaluate_all("all => all.map(each => each.className.split(' ').find(c => /^p\\d$/.test(c)))")
    assert classes == ["p0", "p0", "p1", "p1", "p2", "p3", "p4", "p5", "p6"]
    legend = page.locator('[data-for="probability"] li').evaluate_all(f"all => all.map({_LOOK})")
    assert len(set(legend)) == 7
    assert [token_at(page, index).evaluate(_LOOK) for index in (0, 2, 4, 5, 6, 7, 8)] == legend
    ended(page, stream, count=len(edges))


def test_stream_is_closed_when_nobody_wants_it(page: Page, gateway: ScriptedGateway) -> None:
    """Stop, another request and a reload close the connection, which is what aborts the request.

    Stop keeps what came, and the keyboard's focus goes to Generate, because Stop is disabled; another request keeps
    nothing of the old answer; after a reload a new one can be sent at once.
    """
    stream = told_story(page, gateway)
    page.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    assert stream.wait_until_closed()
    wait_for(page, "stopped")
    expect(tokens(page)).to_have_count(STORY_TOKENS)
    expect(page.locator("#ending")).to_have_text("Stopped: 8 tokens.")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.get_by_role("button", name="Generate")).to_be_focused()
    first = told_story(page, gateway)
    second = ask(page, gateway, "again")
    assert first.wait_until_closed()
    tell(second, STORY[:1])
    expect(tokens(page)).to_have_count(1)
    ended(page, second, "length", 1)
    expect(page.locator("#ending")).to_have_text("Max tokens reached: 1 token.")
    stream = told_story(page, gateway)
    page.reload()
    assert stream.wait_until_closed()
    wait_for(page, "idle")
    ended(page, told_story(page, gateway))


def test_stream_in_pieces_is_the_same_stream(page: Page, gateway: ScriptedGateway) -> None:
    stream = ask(page, gateway)
    data = '{"step": 1, "position": 0, "tokens": [{"id": 1, "text": "é 😀", "logprob": -1, "rank": 1}]}'
    for byte in f"event: row\ndata: {data}\n\n".encode():
        stream.write(bytes([byte]))
    expect(token_at(page, 0)).to_have_text("é 😀")
    ended(page, stream, count=1)


def test_text_is_only_ever_text(page: Page, gateway: ScriptedGateway) -> None:
    """Markup, invisible characters and parts of characters are shown as what they are, in the text and in the panel.

    What has no ink has a mark that is wide enough to be pointed at.
    """
    stream = ask(page, gateway)
    texts = {
        "<img src=x onerror=alert(1)>": "<img␣src=x␣onerror=alert(1)>",
        "": "∅",
        "\u202e": "\\u{202e}",
        " ": "␣",
        "\n\n": "↵↵",
        "\u200b": None,
        "\r": None,
        "\n": None,
    }
    tell(stream, [row(1, 0, [token(text, 0.5) for text in texts])])
    expect(tokens(page)).to_have_count(len(texts))
    assert page.locator("#tokens").evaluate("box => box.textContent") == "".join(texts)
    assert page.locator("#tokens img").count() == 0
    widths = tokens(page).evaluate_all("all => all.map(each => each.getBoundingClientRect().width)")
    assert min(widths) > 5
    for index, shown in enumerate(texts.values()):
        if shown is not None:
            token_at(page, index).dispatch_event("click")
            expect(panel(page).locator("h2 bdi")).to_have_text(shown)
    ended(page, stream, count=len(texts))


def test_lines_have_their_own_direction(page: Page, gateway: ScriptedGateway) -> None:
    """Hebrew begins at the right, the next line at the left, and a token that turns the text turns no other."""
    stream = ask(page, gateway)
    texts = ["\u05e9\u05dc\u05d5\u05dd", "\u05e2\u05d5\u05dc\u05dd", "\n", "one", "\u202e", "two", "three"]
    tell(stream, [row(1, 0, [token(text, 0.5) for text in texts])])
    expect(tokens(page)).to_have_count(len(texts))
    lefts = tokens(page).evaluate_all("all => all.map(each => each.getBoundingClientRect().left)")
    assert lefts[0] > lefts[1]
    assert lefts[3] < lefts[4] < lefts[5] < lefts[6]
    assert lefts[1] - lefts[3] > 100
    ended(page, stream, count=len(texts))


def test_thousands_of_tokens_stay_in_order(page: Page, gateway: ScriptedGateway) -> None:
    """Eight thousand tokens are there, in order, in few changes of the page, and the end of the text is in sight.

    They are read out in a few pieces, which together are the whole text.
    """
    page.evaluate(_COUNT_CHANGES)
    stream, rows = ask(page, gateway), long_story(2000)
    stream.write("".join(f"event: row\ndata: {json.dumps(each)}\n\n" for each in rows).encode())
    expect(tokens(page)).to_have_count(8000)
    text = "".join(token["text"] for each in rows for token in each["tokens"])
    assert page.locator("#tokens").evaluate("box => box.textContent") == text
    assert page.evaluate("changes") < 500
    expect(token_at(page, 7999)).to_be_in_viewport()
    ended(page, stream, count=8000)
    heard = page.evaluate("heard")
    assert len(heard) < 20
    assert "".join("".join(heard[:-1]).split()) == "".join(text.split())


def test_drawing_that_takes_long_leaves_time_for_the_rest(page: Page) -> None:
    """What takes 50 ms to draw is drawn some five times a second, and what takes none in every frame."""
    drawn = page.evaluate("""async () => {
      const { eachFrame } = await import("/page/dom.js");
      let now = 0;
      const due = [];
      performance.now = () => now;
      globalThis.requestAnimationFrame = (call) => due.push([now + 16, call]);
      globalThis.setTimeout = (call, wait, ...rest) => due.push([now + wait, () => call(...rest)]);
      const times = (cost) => {
        const found = [];
        const draw = eachFrame(() => { found.push(now); now += cost; });
        for (const until = now + 1000; now < until; ) {
          draw();
          due.sort(([one], [other]) => one - other);
          const [at, call] = due.shift();
          now = Math.max(now, at);
          call();
        }
        return found.length;
      };
      return [times(50), times(0)];
    }""")
    assert 3 <= drawn[0] <= 6
    assert drawn[1] >= 50
