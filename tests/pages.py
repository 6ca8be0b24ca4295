"""The documents' examples, as tests run them."""

import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: str
    """The page, as its path from the root."""
    text: str
    line: int
    """How many lines are before it."""


def blocks(language: str, *, of: str = "") -> list[Block]:
    return [
        Block(str(page.relative_to(ROOT)), found[2], found.string.count("\n", 0, found.start(2)))
        for page in PAGES
        if of in ("", str(page.relative_to(ROOT)))
        for found in _BLOCK.finditer(page.read_text())
        if found[1] == language
    ]


def module_of(block: Block, name: str) -> ModuleType:
    module = ModuleType(name)
    placed = "\n" * block.line + block.text  # so that what it raises names the page's line
    exec(compile(placed, str(ROOT / block.page), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - our own documents
    return module
