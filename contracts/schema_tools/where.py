"""The list of modules at the end of docs/where.md, from their docstrings: `python -m schema_tools.where` writes it."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from schema_tools.api import first_sentence

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "where.md"
_NEAR = "services/tokenbus_services/"
_HEADING = "## The other modules"
_ABOUT = "The table does not name these; each has the first sentence of its docstring (`python -m schema_tools.where`)."


def page() -> str:
    """Return docs/where.md with the table that it has, and every module that the table does not name."""
    table = PAGE.read_text().partition(_HEADING)[0].rstrip()
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    lines = [table, "", _HEADING, "", _ABOUT, ""]
    for folder, modules in groupby(_modules(named), lambda each: each[0].rpartition("/")[0]):
        lines += [f"**`{folder or _NEAR.rstrip('/')}/`**", ""]
        lines += [f"- `{path.rpartition('/')[2]}`: {text}" for path, text in modules]
        lines.append("")
    return "\n".join(lines)


def _modules(named: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the path of each module that is not named, as the page writes it, and what its docstring says first."""
    found = [path for top in ("contracts", "gpu_ops", "services") for path in (ROOT / top).glob("*/**/*.py")]
    for path in sorted(found, key=lambda each: (each.parent, each.name)):
        short = path.relative_to(ROOT).as_posix().removeprefix(_NEAR).removeprefix("services/")
        if path.name != "__init__.py" and not path.name.endswith("_pb2.py") and short not in named:
            yield short, first_sentence(ast.get_docstring(ast.parse(path.read_text())) or "")


if __name__ == "__main__":
    PAGE.write_text(page())
