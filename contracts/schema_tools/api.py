"""Writes docs/api.md from the docstrings of the public names: `python -m schema_tools.api > docs/api.md`."""

import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple, TypeGuard

from google.protobuf.message import Message

import tokenbus

_HEAD = """\
<!-- Generated from the docstrings by `python -m schema_tools.api > docs/api.md`. Do not edit. -->

# The public names

All are in `tokenbus`. A client begins with [connect](#connect), an engine with [run_engine](#run_engine).
`help(tokenbus.connect)` shows a name's arguments and errors, and an example that the tests run.
"""
_GROUPS = {
    "Clients": "connect Client Generation Token TokenExtras RequestParameters StructuredOutput Stream StepRows "
    "RequestEnd Generate PromptScores Turn WeightSpan Operator ControlError load_tokenizer",
    "Engines": "run_engine BaseEngine Engine StepArrays token_logprobs Publisher StepAssembler",
    "Processors": "Processor Step Settings",
    "Recordings and the durable log": "read_recording read_log StreamItem read_sessions Session",
    "Messages": "LogprobBatch BatchHeader Row Extras Extra encode decode Limits BatchKind RowStatus Scoring "
    "SpeculativeMethod StepPhase ValueKind",
    "Errors": "ContractError Rule RequestFailedError AddressError LogError RecordingError SettingsError PublishError "
    "RetentionFullError NotRunningError WouldWaitError EngineStepError EngineBrokenError PluginError",
}
INTERNAL = {
    "Client": "is_running",
    "PromptScores": "end is_last chunks of check joined",
    "Publisher": "begin end waiting_records addressed lose lose_all",
    "Processor": "is_listening failed_ticks usage",
    "Step": "sequence token_lists keep first_arrival is_explained",
    "Settings": "most_connections",
    "LogprobBatch": "of_views of_message headed arrays is_message has_consistent_lengths nbytes row_bytes runs stop "
    "between joined concatenated",
    "Extras": "as_lists",
}
"""The members that only Tokenbus's own packages use, by class. The page omits these members."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[a-z0-9`)\"']\.)\s+(?=[A-Z`])|\n\n")


class Documented(NamedTuple):
    """A public name, or a public method of a public class."""

    name: str
    """The name without the prefix `tokenbus.`."""
    signature: str
    """The parameters, or an empty string for a name that users do not call."""
    text: str
    """The text of the docstring before the first section."""
    sections: dict[str, str]
    """The sections Args, Returns, Raises and Example, without their indentation."""


def public_names() -> Iterator[tuple[str, list[Documented]]]:
    """Yield each heading of the page with its public names. The public methods of a class follow the class."""
    for heading, names in _GROUPS.items():
        yield heading, [each for name in names.split() for each in _of(name)]


def _of(name: str) -> Iterator[Documented]:
    found = getattr(tokenbus, name)
    yield documented(name, found)
    if not _has_own_members(found) or issubclass(found, enum.Enum):
        return
    internal = INTERNAL.get(name, "").split()
    for member, value in vars(found).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if (
            member not in internal
            and not member.startswith("_")
            and (inspect.isfunction(function) or isinstance(value, property))
        ):
            yield documented(f"{name}.{member}", function)


def _has_own_members(found: object) -> TypeGuard[type]:
    return (
        inspect.isclass(found)
        and found.__module__.startswith(("tokenbus.", "tokenbus_"))
        and "_pb2" not in found.__module__
    )


def documented(name: str, found: object) -> Documented:
    """Return a name with the sections of its docstring."""
    parts = _SECTION.split(inspect.getdoc(found) or "")
    bodies = [textwrap.dedent(part.strip("\n")).rstrip() for part in parts[2::2]]
    return Documented(name, _signature(found), parts[0].strip(), dict(zip(parts[1::2], bodies, strict=True)))


def _signature(found: object) -> str:
    """Return the parameters without annotations. A default that is not a plain value becomes `...`."""
    made_elsewhere = (enum.Enum, Exception, dict, Message)
    is_protocol = getattr(found, "_is_protocol", False)
    if not callable(found) or is_protocol or (isinstance(found, type) and issubclass(found, made_elsewhere)):
        return ""
    kept = [each for each in inspect.signature(found).parameters.values() if each.name not in {"self", "cls"}]
    plain = [each.replace(annotation=each.empty, default=_shown(each.default)) for each in kept]
    return re.sub(r"<(\S+): \d+>", r"\1", str(inspect.Signature(plain)).replace("Ellipsis", "..."))


def _shown(default: object) -> object:
    is_plain = default is None or isinstance(default, str | int | float | enum.Enum)
    return default if is_plain or default is inspect.Parameter.empty else ...


def _fields(found: object) -> dict[str, str]:
    """Return a class's fields with their docstrings."""
    if not _has_own_members(found) or issubclass(found, enum.Enum):
        return {}
    internal = INTERNAL.get(found.__name__, "").split()
    (kind,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    fields = {}
    for node, below in pairwise(kind.body if isinstance(kind, ast.ClassDef) else []):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if not name.startswith("_") and name not in internal:
                fields[name] = first_sentence(text)
    return fields


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring on one line."""
    return " ".join(_SENTENCE.split(text, maxsplit=1)[0].split())


def page() -> str:
    lines = [_HEAD]
    for heading, names in public_names():
        lines.append(f"## {heading}\n")
        for top, members in groupby(names, lambda each: each.name.partition(".")[0]):
            lines += [f"### {top}\n", *_entry(*members), ""]
    return "\n".join(lines).rstrip() + "\n"


def _entry(top: Documented, *methods: Documented) -> Iterator[str]:
    found = getattr(tokenbus, top.name)
    fields = _fields(found)
    is_made_by_users = f"tokenbus.{top.name}(" in top.sections.get("Example", "") and not fields  # listed below
    call = f"`{top.name}{top.signature}`: " if top.signature and is_made_by_users else ""
    members = getattr(found, "__members__", ())
    yield (
        call + first_sentence(top.text) + (f" One of {', '.join(f'`{each}`' for each in members)}." if members else "")
    )
    if fields or methods:
        yield ""
    yield from (f"- `{name}`: {text}" for name, text in fields.items())
    for each in methods:
        first_clause = re.split("[;:] ", first_sentence(each.text))[0].rstrip(".")
        yield f"- `{each.name}{each.signature}`: {first_clause}."


if __name__ == "__main__":
    sys.stdout.write(page())
