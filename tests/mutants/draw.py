"""Small faults that a source could have: one expression or statement replaced, at places drawn by seed."""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.sabotage.table import ROOT

CORE = (
    "contracts/tokenbus_contracts",
    *(f"services/tokenbus/{name}" for name in ("bus", "worker", "processor", "client", "delivery", "gateway")),
)
"""The packages that mutants are drawn from, each as often as its share of their lines."""
_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.BitAnd: "|", ast.BitOr: "&"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: the text that occurs once in a file, what replaces it, and the line where that begins."""

    file: str
    text: str
    broken: str
    number: int


def draw(seed: int, count: int) -> list[Mutant]:
    """Return mutants of the core, one a line at most; the same seed draws the same from the same sources."""
    chance = random.Random(seed)  # noqa: S311 - a sample, and no secret
    found = [mutant for package in CORE for path in sorted((ROOT / package).rglob("*.py")) for mutant in _of(path)]
    by_line = {(mutant.file, mutant.number): mutant for mutant in chance.sample(found, len(found))}
    places = sorted(by_line)
    return [by_line[place] for place in sorted(chance.sample(places, min(count, len(places))))]


def _of(path: Path) -> Iterator[Mutant]:
    """Yield what can be broken in a module, except what is generated and what only says types and texts."""
    if "generated" in path.parts:
        return
    source = path.read_text()
    for node in _running(ast.parse(source)):
        for place, broken in _faults(node, source):
            text, replaced = _once(source, place, broken)
            yield Mutant(path.relative_to(ROOT).as_posix(), text, replaced, place.lineno)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below functions, without their annotations, docstrings and what they raise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _inside(statement)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns"}:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _inside(each)


def _faults(node: ast.AST, source: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if type(operation) in _COMPARED:
            yield node, f"{text(left)} {_COMPARED[type(operation)]} {text(right)}"
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _COMPUTED:
            yield node, f"{text(left)} {_COMPUTED[type(operation)]} {text(right)}"
        case ast.BoolOp(op=operation, values=[first, *others]):
            word = "or" if isinstance(operation, ast.And) else "and"
            yield node, f"({f' {word} '.join(text(each) for each in (first, *others))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"bool({text(operand)})"
        case _:
            yield from _other_faults(node, text)


def _other_faults(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, f"({text(orelse)} if {text(test)} else {text(body)})"
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield test, f"not ({text(test)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield node, "pass"


def _offset(source: str, line: int, column: int) -> int:
    """Return where a place of Python's tree, whose columns count bytes, lies in the text."""
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def _once(source: str, place: ast.expr | ast.stmt, broken: str) -> tuple[str, str]:
    """Return as many whole lines around a place as occur once, and these lines with the place replaced."""
    start = _offset(source, place.lineno, place.col_offset)
    end = _offset(source, place.end_lineno or place.lineno, place.end_col_offset or 0)
    first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
    while source.count(source[first:last]) > 1:
        first = source.rfind("\n", 0, first - 1) + 1
    return source[first:last], source[first:start] + broken + source[end:last]
