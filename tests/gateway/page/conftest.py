"""A browser, a gateway that does what the test says, and a page that must not complain."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.gateway.page.scripted import ScriptedGateway
from tests.support.waiting import MOST

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_NOT_RUN = "no chromium here, so the inspector page was not tried in a browser (Debian: apt-get install chromium)"
Open = Callable[..., Page]


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


# A package's, not the session's: while Playwright runs, no test of this process can run an event loop of its own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    found = chromium()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(_NOT_RUN)
        pytest.skip(_NOT_RUN)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def running_gateway() -> Iterator[ScriptedGateway]:
    """Run one gateway for all tests: to start and to stop it takes as long as a test."""
    with ScriptedGateway().running() as gateway:
        yield gateway


@pytest.fixture
def gateway(running_gateway: ScriptedGateway) -> ScriptedGateway:
    running_gateway.reset()
    return running_gateway


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    contexts = []
    complaints: list[str] = []

    def open_(url: str, *, refused: tuple[str, ...] = (), **options: Any) -> Page:  # noqa: ANN401 - the browser's own
        """Open an address; `refused` are the paths that the test lets fail, which the browser itself complains of."""
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(MOST * 1000)
        page = context.new_page()

        def heard(message: ConsoleMessage) -> None:
            is_refused = message.text.startswith("Failed to load resource") and message.location["url"] in {
                f"{url}/{path}" for path in refused
            }
            if message.type in {"error", "warning"} and not is_refused:
                complaints.append(message.text)

        page.on("console", heard)

        def asked(request: Request) -> None:
            if not request.url.startswith(f"{url}/"):
                complaints.append(request.url)

        page.on("request", asked)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(open_page: Open, gateway: ScriptedGateway) -> Page:
    return open_page(gateway.url)
