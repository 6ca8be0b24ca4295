"""docs/glossary.md has every term once, in order, each with a module that is there."""

import re

from tests.pages import ROOT

SERVICES = ROOT / "services" / "tokenbus_services"
PAGE = (ROOT / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| \*\*([^*]+)\*\* \| (.+) \| `([^`]+)` \|$", PAGE, re.MULTILINE)
WORDS = (
    *(
        "frame",
        "send queue",
        "dead letter",
        "pending ack",
        "ack tracker",
        "ack",
        "request registry",
        "connection manager",
    ),
    *("reconnecting session", "handshake", "unknown peer", "hand-off target", "deduplicated log", "request id"),
    *("evict the slowest consumer", "deadline extension", "reconcile request ids", "rate limit", "backpressure"),
    *("in flight", "out of order", "idempotent", "credit", "replay", "heartbeat", "epoch", "sequence", "retention"),
)
"""The field's words that code, logs and documents of this project use, and standard ones beside them."""


def test_terms_are_in_order_and_there_once() -> None:
    """Each term has one row, alphabetically, and every line of the table is one."""
    terms = [term for term, _, _ in ROWS]
    assert terms == sorted(set(terms), key=str.lower)
    assert len(terms) == PAGE.count("\n| **")
    assert len(terms) > 60


def test_the_fields_words_are_there() -> None:
    """Every word that replaced one of our own has its row."""
    assert set(WORDS) <= {term for term, _, _ in ROWS}


def test_modules_are_there() -> None:
    """The module that a term names exists."""
    for term, _, module in ROWS:
        folder = ROOT if module.startswith("contracts/") else SERVICES
        assert (folder / module).is_file(), f"{term}: {module}"


def test_meanings_are_short() -> None:
    """A term is said in a sentence or two."""
    for term, text, _ in ROWS:
        assert len(re.findall(r"[.:;] |\.$", text)) <= 4, term
