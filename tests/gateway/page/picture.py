"""The README's picture of the inspector, as it is today: `python -m tests.gateway.page.picture`."""

import json
import tempfile
from hashlib import sha256
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.gateway.page.conftest import chromium
from tests.gateway.page.scripted import PAGE
from tests.pages import ROOT
from tests.system.deployment import COMMAND, Deployment

PICTURE = ROOT / "docs" / "images" / "inspector.png"
TAKEN_OF = PICTURE.with_suffix(".sha256")
"""The digest of the page's files that the picture was taken of."""


def digest() -> str:
    found = sha256()
    for path in sorted(PAGE.iterdir()):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def take(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme="light")
    page.goto(url)
    page.get_by_label("Prompt").fill("In the evening the old man said")
    page.get_by_label("Seed").fill("1")
    page.get_by_role("button", name="Generate").click()
    page.locator('body[data-state="done"]').wait_for()
    page.locator("#tokens .corrected").first.click()
    page.mouse.move(0, 0)
    page.locator(".doing .accepting").first.wait_for()  # the bus has told of the text
    page.screenshot(path=PICTURE)


def main() -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="tb") as folder:
        deployment = Deployment(Path(folder), {"gateway.address": "127.0.0.1:0"})
        try:
            deployment.start_processor()
            for name in ("worker-0", "worker-1"):
                deployment.start(name, [COMMAND, "worker"], worker__id=name).wait_for('"connected"')
            gateway = deployment.start("gateway", [COMMAND, "gateway"])
            take(
                playwright.chromium.launch(executable_path=chromium()),
                json.loads(gateway.wait_for('"logger":"gateway"'))["address"],
            )
        finally:
            deployment.close()
    TAKEN_OF.write_text(digest() + "\n")


if __name__ == "__main__":
    main()
