"""Write the page of all settings: `python -m tokenbus_services.settings > docs/settings.md`."""

import sys
from collections.abc import Iterator

from tokenbus_services.settings import ENTRIES, SECTIONS, Entry

_INTRODUCTION = """\
# Settings

Written by `python -m tokenbus_services.settings` from the code; a test holds it equal.

A setting comes from the command line, else from the environment, else from a file, else from its default.
`worker.id` is the variable `TOKENBUS_WORKER_ID`, and `id` in the table `[bus]` of the TOML file that
`TOKENBUS_SETTINGS` names. A key that does not exist, a value out of its range and two values that contradict each other
end the start with one line that names the key, where it came from, the limit and the value.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    return "\n".join([_INTRODUCTION, *(line for section in SECTIONS for line in _section(section))])


def _section(section: str) -> Iterator[str]:
    yield f"## {section}"
    yield ""
    yield _SUMMARIES[section]
    yield ""
    yield "| key | default | valid | meaning |"
    yield "|---|---|---|---|"
    yield from (_row(entry) for entry in ENTRIES.values() if entry.section == section)
    yield ""


def _row(entry: Entry) -> str:
    return f"| `{entry.name}` | {_default(entry.default)} | {entry.valid} | {entry.meaning} |"


def _default(value: object) -> str:
    match value:
        case "":
            return "empty"
        case bool():
            return f"`{str(value).lower()}`"
        case _:
            return f"`{value}`"


def _summary(maker: type) -> str:
    return (maker.__doc__ or "").partition("\n")[0]


_SUMMARIES = {section: _summary(maker) for section, maker in SECTIONS.items()} | {
    "limits": "The most that a batch may hold: the schema's bounds, or tighter."
}

if __name__ == "__main__":
    sys.stdout.write(page())
