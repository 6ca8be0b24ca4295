"""The page that `tokenbus inspect --html` writes, opened as a file in a real browser."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.services.cli.helpers import payloads, recording
from tests.services.cli.test_inspect import Step, moved, recorded
from tests.services.gateway_page.doing import panel
from tests.support.waiting import MOST
from tokenbus_contracts.generated.request_pb2 import TokenScoring
from tokenbus_services.cli import main

pytestmark = pytest.mark.xdist_group("browser")
Open = Callable[..., Page]


@pytest.fixture
def open_(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Return a function that writes a page of files and opens it; none may complain, or load anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(MOST * 1000)
    heard: list[str] = []

    def opened(*arguments: str | Path) -> Page:
        path = tmp_path / "page.html"
        main(["inspect", *map(str, arguments), "--html", str(path)])
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url))
        page.goto(path.as_uri())
        assert heard == [path.as_uri()]
        heard.clear()
        return page

    yield opened
    context.close()
    assert heard == []


def tokens(page: Page, request: int) -> list[str]:
    """Return the classes of a request's tokens, in their order."""
    box = page.get_by_role("group", name=f"Tokens of request {request}.")
    expect(box.locator(".t").first).to_be_visible()
    return [str(node.get_attribute("class")).split()[1] for node in box.locator(".t").all()]


def test_recording(open_: Open, tmp_path: Path) -> None:
    """Tokens are coloured by probability, or by entropy, and one that is pointed at has its alternatives."""
    source = tmp_path / "a.tokenbus"
    source.write_bytes(recording(payloads(scoring={2: TokenScoring(entropies=True)})))
    page = open_(source)
    expect(page.locator("#shown")).to_contain_text("3 requests of 3 and 27 tokens of 27 are on this page")
    assert set(tokens(page, 1)) <= {f"p{each}" for each in range(7)}
    page.get_by_role("group", name="Tokens of request 2.").locator(".t").nth(4).hover()
    expect(panel(page)).to_contain_text("Entropy")
    expect(panel(page).get_by_role("listitem").first).to_be_visible()
    expect(panel(page)).not_to_contain_text("Draft history")
    page.get_by_text("Entropy", exact=True).first.click()
    assert set(tokens(page, 1)) == {"unscored"}
    assert "unscored" not in tokens(page, 2)


def test_two_recordings(open_: Open, tmp_path: Path) -> None:
    """Tokens are coloured by how far they are apart; the keyboard moves between them, Escape closes the panel."""
    steps = [Step(place, {5: [(100 + place, -1.0)]}) for place in range(6)]
    far = (0.0, -0.05, -0.25, -0.75, 0.0, 0.0)
    other = moved(steps, lambda _, place, logprob: logprob + far[place])
    other[4].tokens[5][0] = (999, -1.0)
    page = open_(recorded(tmp_path / "a", steps), recorded(tmp_path / "b", other))
    assert tokens(page, 5) == ["p0", "p2", "p4", "p5", "p6", "unscored"]
    box = page.get_by_role("group", name="Tokens of request 5.")
    box.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(panel(page)).to_contain_text("999")
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_attribute("data-open", "false")
