"""Generates docs/settings.md: `python -m tokenbus.settings > docs/settings.md`."""

import sys

from tokenbus.settings import ENTRIES, SECTIONS

_INTRODUCTION = """\
# Settings

Generated from the code by `python -m tokenbus.settings`.

Command-line options override environment variables, which override the settings file, which overrides the defaults.
The variable of the setting `worker.id` is `TOKENBUS_WORKER_ID`.
In the TOML file that `TOKENBUS_SETTINGS` names, it is `id` in the table `[worker]`.
An invalid value or an unknown key ends the start with one line: the key, its source, the limit and the value.
Defaults and limits are in parentheses. Port 0 means any free port.
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
