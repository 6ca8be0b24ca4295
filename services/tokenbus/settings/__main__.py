"""Generates docs/settings.md: `python -m tokenbus.settings > docs/settings.md`."""

import sys

from tokenbus.settings import ENTRIES, SECTIONS

_INTRODUCTION = """\
# Settings

Generated from the code by `python -m tokenbus.settings`.

A command-line option overrides an environment variable, which overrides the settings file, which overrides the default.
The setting `worker.id` is the variable `TOKENBUS_WORKER_ID`, and `id` in the table `[worker]` of the TOML file that
`TOKENBUS_SETTINGS` names. An unknown key, a value out of range, or two values that contradict each other end the start
with one line: the key, its source, the limit and the value. The default and the limits are in parentheses.
"""
_OF_LIMITS = "The size limits of a batch: the schema's bounds, or tighter."


def page() -> str:
    lines = [_INTRODUCTION]
    for section, maker in SECTIONS.items():
        summary = _OF_LIMITS if section == "limits" else maker.__doc__.partition("\n")[0]
        lines += [f"## {section}", "", summary, ""]
        lines += [
            f"- `{entry.name}` ({_default(entry.default)}{_limits(entry.valid)}): {entry.meaning}"
            for entry in ENTRIES.values()
            if entry.section == section
        ]
        lines.append("")
    return "\n".join(lines)


def _limits(valid: str) -> str:
    return "" if valid == "true or false" or valid.startswith("text of ") else f"; {valid}"


def _default(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


if __name__ == "__main__":
    sys.stdout.write(page())
