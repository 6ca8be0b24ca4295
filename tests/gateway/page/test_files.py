"""What the page is made of, seen without a browser."""

import re

from tests.gateway.page.scripted import PAGE

MOST_BYTES = 150_000
FILES = sorted(path for path in PAGE.iterdir() if path.is_file())


def test_page_is_light() -> None:
    """All that the first view loads, uncompressed, stays under 150 KB."""
    assert {"index.html", "style.css", "app.js"} <= {path.name for path in FILES}
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES


def test_page_names_no_other_host() -> None:
    """No file has an address of another host; the names of SVG's elements are no address that a browser loads."""
    for path in FILES:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}|@import|url\(", text) == [], path.name


def test_page_obeys_the_strictest_policy() -> None:
    """Nothing in the page is inline: scripts, styles and handlers are files of its own, as the policy wants."""
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)|javascript:|data:", page) == []


def test_every_file_is_used() -> None:
    named = {"index.html"}
    for path in FILES:
        named |= set(re.findall(r'(?:"page/|from "\./)([\w.]+)"', path.read_text()))
    assert named == {path.name for path in FILES}
