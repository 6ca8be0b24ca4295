"""How the page looks: on a phone, in the dark, without motion, and as the pictures in the documents."""

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.page.conftest import Open
from tests.gateway.page.doing import ended, panel, token_at, told_story
from tests.gateway.page.made import worker
from tests.gateway.page.picture import TAKEN_OF, digest
from tests.gateway.page.scripted import ScriptedGateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("browser")
PHONE = {"viewport": {"width": 320, "height": 640}, "is_mobile": True, "has_touch": True}
_LOOK = "node => getComputedStyle(node).backgroundColor"
_CONTRASTS = """() => {
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const colour = text => text.match(/[\\d.]+/g).map(Number);
  return [...document.querySelectorAll(
    '.legend li, .t, .blank, h1, h1 span, label, button, dt, dd, b, .note, .outcome, .state, .share, ' +
    '.id, .role, .break')]
    .filter(node => node.offsetParent).map(node => {
      const seen = node.matches('.break') ? getComputedStyle(node, '::before') : getComputedStyle(node);
      for (let each = node; each; each = each.parentElement)
        if (!node.disabled && getComputedStyle(each).opacity !== '1') return [`faded: ${node.textContent}`, 1];
      let behind = node;
      while (/^rgba.*, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
      const shades = [seen.color, getComputedStyle(behind).backgroundColor];
      const [one, other] = shades.map(colour).map(light);
      return [node.textContent, node.disabled ? 21 : (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
}"""


def test_phone_shows_all_without_scrolling_sideways(open_page: Open, gateway: ScriptedGateway) -> None:
    """At 320 pixels nothing is wider than the window, with the panel open too, and what is tapped stays in sight.

    Every button and field is at least 40 pixels high, so that a finger finds it.
    """
    gateway.bus["workers"] = [worker("a-worker-with-quite-a-long-name", tokens=123456789)]
    page = open_page(gateway.url, **PHONE)
    expect(page.locator(".worker")).to_be_visible()
    ended(page, told_story(page, gateway))
    wide = "document.documentElement.scrollWidth <= 320 && visualViewport.width === 320"
    assert page.evaluate(wide)
    expect(page.locator("#origin")).to_contain_text("request")
    token_at(page, 4).tap()
    expect(panel(page).locator("h2 bdi")).to_have_text("␣in")
    assert page.evaluate(wide)
    in_sight = "node => node.getBoundingClientRect().top >= 0 && node.getBoundingClientRect().bottom <= innerHeight + 1"
    assert token_at(page, 4).evaluate(in_sight)
    assert panel(page).evaluate(in_sight)
    small = "all => all.filter(each => each.offsetParent && each.offsetHeight < 40).map(each => each.outerHTML)"
    assert page.locator("button, textarea, input:not([type=radio])").evaluate_all(small) == []
    page.get_by_role("button", name="Close").tap()
    expect(panel(page)).to_contain_text("Point at a token, tap it")


def test_picture_is_of_this_page() -> None:
    """The README's picture was taken of the page as it is: `python -m tests.gateway.page.picture` takes it."""
    assert TAKEN_OF.read_text().strip() == digest()


def test_everything_can_be_read(page: Page, gateway: ScriptedGateway) -> None:
    """In light and in dark every text, of tokens and of lost workers too, has a contrast of 4.5 or more."""
    gateway.bus["workers"] = [worker("stays"), worker("goes")]
    expect(page.locator(".worker")).to_have_count(2)
    gateway.bus["workers"] = [worker("stays")]
    expect(page.locator(".worker.lost")).to_be_visible()
    ended(page, told_story(page, gateway))
    token_at(page, 4).click()
    shades = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shades[scheme] = sum(int(part) for part in ground[4:-1].split(","))
        for view in ("Probability", "Drafts"):
            page.get_by_text(view, exact=True).click()
            assert page.evaluate(_CONTRASTS) == []
    assert shades["light"] > 600
    assert shades["dark"] < 100


def test_forced_colours_keep_what_says_something(page: Page, gateway: ScriptedGateway) -> None:
    ended(page, told_story(page, gateway))
    token_at(page, 4).click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, forced_colors="active")
        gauge = panel(page).locator(".gauge").first
        assert gauge.evaluate(_LOOK) != gauge.locator("i").evaluate(_LOOK)
        for view, kinds in {"Probability": 7, "Drafts": 3}.items():
            page.get_by_text(view, exact=True).click()
            shades = page.locator(f'[data-for="{view.lower()}"] li').evaluate_all(f"all => all.map({_LOOK})")
            assert len(set(shades)) == kinds
            assert token_at(page, 3).evaluate(_LOOK) in shades
            chosen, other = page.locator(".switch :checked + span"), page.locator(".switch :not(:checked) + span")
            assert chosen.evaluate(_LOOK) != other.evaluate(_LOOK)
        assert page.evaluate(_CONTRASTS) == []


@pytest.mark.parametrize("width", [320, 1024, 1280, 1440, 1920])
def test_panel_covers_and_moves_nothing(width: int, open_page: Open, gateway: ScriptedGateway) -> None:
    gateway.bus["workers"] = [worker(f"worker-{number:02}") for number in range(24)]
    page = open_page(gateway.url, viewport={"width": width, "height": 900})
    expect(page.locator(".worker")).to_have_count(24)
    ended(page, told_story(page, gateway))
    expect(page.locator("#chart > svg")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = "() => [...document.querySelectorAll('.card')].map(each => each.getBoundingClientRect().toJSON())"
    found = page.evaluate(boxes)
    for place, one in enumerate(found):
        for other in found[:place]:
            beside = one["left"] >= other["right"] or other["left"] >= one["right"]
            assert beside or one["top"] >= other["bottom"] or other["top"] >= one["bottom"]
    if width < 1024:
        return
    page.evaluate("scrollTo(0, 260)")
    places = "() => [...document.querySelectorAll('.card:not(.panel), .t')].map(each => each.getBoundingClientRect().y)"

    def moved_nothing() -> bool:
        """Look at a token; what the page draws late for other reasons has been drawn sooner or later."""
        before = page.evaluate(places)
        for index in (5, 1):
            token_at(page, index).hover()
        expect(panel(page).locator("h2 bdi")).to_have_text("␣is")
        return bool(page.evaluate(places) == before)

    wait_until(moved_nothing)
    assert -1 < page.evaluate("document.getElementById('panel').getBoundingClientRect().y") < 100


def test_nothing_moves_for_who_wants_no_motion(open_page: Open, gateway: ScriptedGateway) -> None:
    """With reduced motion no element is animated or in transition while tokens come; without, the cursor breathes."""
    page = open_page(gateway.url, reduced_motion="reduce", **PHONE)
    stream = told_story(page, gateway)
    token_at(page, 2).tap()
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("document.getAnimations().length") == 1
    ended(page, stream)


def test_keyboard_reaches_everything_in_order(page: Page) -> None:
    """Tab goes from the skip link through the form to the button that sends it.

    The skip link leads to the tokens' part of the page, before there is a token too.
    """
    focused = "document.activeElement"
    name = f"{focused}.name || {focused}.textContent.trim() || {focused}.id"
    found = []
    for _ in range(10):
        page.keyboard.press("Tab")
        found.append(page.evaluate(name))
    fields = ["prompt", "max_tokens", "temperature", "top_logprobs", "top_p", "seed", "return_entropies", "key"]
    assert found == ["Skip to the tokens", *fields, "Generate"]
    page.get_by_text("Skip to the tokens").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#output-title")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator('[name="view"]:checked')).to_be_focused()
