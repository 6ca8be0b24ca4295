"""The results as one self-contained HTML page with tables and plots, light and dark."""

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, zip_longest

from benchmarks.running import Result

_RULE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?\s?[x%]?")
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfc; --line: #d5d9de; --quiet: #5b6570;
  --good: #04664f; --bad: #a8321a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #16191d; --line: #363c44; --quiet: #9aa5b1;
  --good: #54c7a4; --bad: #ff9c80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
a { color: inherit; } .quiet { color: var(--quiet); } .good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } pre { font-size: 13px; line-height: 1.35; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
.number { text-align: right; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
"""
_VERDICTS = {True: ("met", "good"), False: ("missed", "bad")}


def page(results: Sequence[Result], *, quick: bool, made: str, version: str) -> str:
    """Return the whole page."""
    kind = " Quick runs say whether it works; their figures are rough." if quick else ""
    rows = [
        [f'<a href="#{_safe(r.benchmark.name)}">{_safe(r.benchmark.name)}</a>', *map(_safe, _overview(r))]
        for r in results
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Tokenbus benchmarks</title><style>{_STYLE}</style></head><body>",
        f'<h1>Tokenbus benchmarks</h1><p class="quiet">Tokenbus {_safe(version)}, {_safe(made)}.{kind}</p>',
        _table(["benchmark", "what it measures", "outcome", "seconds"], rows),
        *(_section(result) for result in results),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _overview(result: Result) -> tuple[str, str, str]:
    return result.benchmark.title, result.verdict, f"{result.seconds:.0f}"


def _section(result: Result) -> str:
    name = _safe(result.benchmark.name)
    parts = [f'<h2 id="{name}">{name}</h2><p>{_safe(result.benchmark.title)}</p>']
    if result.trouble:
        parts.append(f'<p class="bad">{_safe(result.trouble)}</p>')
    parts.append(_machine(result))
    parts.append(_goals(result))
    if result.plot is not None:
        data = base64.b64encode(result.plot).decode()
        parts.append(f'<p><img alt="The figures of {name} as a plot" src="data:image/svg+xml;base64,{data}"></p>')
    parts += _texts(result.report)
    return "\n".join(part for part in parts if part)


def _machine(result: Result) -> str:
    machine = (result.record or {}).get("machine")
    if not isinstance(machine, dict):
        return ""
    return f'<p class="quiet">{_safe(", ".join(f"{name}: {value}" for name, value in machine.items()))}</p>'


def _goals(result: Result) -> str:
    if not result.goals:
        return ""
    columns = list(dict.fromkeys(name for goal in result.goals for name in goal))
    return _table(columns, [[_cell(goal.get(name)) for name in columns] for goal in result.goals])


def _texts(report: str) -> Iterator[str]:
    """Yield a report's tables as HTML tables, and the text between them as it was printed."""
    for is_table, group in groupby(report.strip("\n").split("\n"), lambda line: line.startswith("|")):
        lines = list(group)
        if is_table:
            # The outer bars alone are taken off: a cell that is empty still has its place.
            bare = [line.strip().removeprefix("|").removesuffix("|") for line in lines]
            cells = [[_safe(cell.strip()) for cell in line.split("|")] for line in bare]
            kept = [row for row, line in zip(cells, lines, strict=True) if not _RULE.fullmatch(line.strip())]
            yield _table(kept[0], kept[1:], is_safe=True) if kept else ""
        elif any(lines):
            text = "\n".join(lines).strip("\n")
            yield f'<div class="wide"><pre>{_safe(text)}</pre></div>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], *, is_safe: bool = False) -> str:
    """Return a table; the cells of its body are HTML already, and with `is_safe` those of its head."""
    kept = list(rows)
    kinds = [_kind(column) for column in zip_longest(*kept, fillvalue="")]
    titles = "".join(
        f"<th{kind}>{title if is_safe else _safe(title)}</th>" for title, kind in zip_longest(head, kinds, fillvalue="")
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=False)) + "</tr>"
        for row in kept
    )
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(column: Iterable[str]) -> str:
    """Return the attribute of a column's cells: numbers are aligned to the right."""
    return ' class="number"' if all(_NUMBER.fullmatch(cell) for cell in column if cell) else ""


def _cell(value: object) -> str:
    if isinstance(value, bool):
        word, kind = _VERDICTS[value]
        return f'<span class="{kind}">{word}</span>'
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else _safe(str(value))


def _safe(text: str) -> str:
    return escape(text, quote=True)
