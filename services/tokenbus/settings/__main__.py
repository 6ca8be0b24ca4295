"""Write the page of all settings: `python -m tokenbus.settings > docs/settings.md`."""

import sys

from tokenbus.settings import ENTRIES, SECTIONS

_INTRODUCTION = """\
# Settings

Written by `python -m tokenbus.settings` from the code; a test holds it equal.

A setting comes from the command line, else from the environment, else from a file, else from its default.
`worker.id` is the variable `TOKENBUS_WORKER_ID`, and `id` in the table `[worker]` of the TOML file that
`TOKENBUS_SETTINGS` names. A key that does not exist, a value out of its range and two values that contradict each other
end the start with one line that names the key, where it came from, the limit and the value.
"""


_OF_LIMITS = "The most that a batch may hold: the schema's bounds, or tighter."


def page() -> str:
    """Return the whole page, as Markdown."""
    lines = [_INTRODUCTION]
    for section, maker in SECTIONS.items():
        summary = _OF_LIMITS if section == "limits" else maker.__doc__.partition("\n")[0]
        lines += [f"## {section}", "", summary, "", "| key | default | valid | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{entry.name}` | {_default(entry.default)} | {entry.valid} | {entry.meaning} |"
            for entry in ENTRIES.values()
            if entry.section == section
        ]
        lines.append("")
    return "\n".join(lines)


def _default(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


if __name__ == "__main__":
    sys.stdout.write(page())
