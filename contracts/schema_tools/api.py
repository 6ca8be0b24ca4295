"""The page of the public names, docs/api.md, from their docstrings: `python -m schema_tools.api > docs/api.md`."""

import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

from google.protobuf.message import Message

import tokenbus

_HEAD = """\
<!-- Generated from the docstrings by `python -m schema_tools.api > docs/api.md`. Do not edit: a test compares them. -->

# The public names

All of them are in one package: `import tokenbus`. A client begins with [connect](#connect), an engine with
[run_engine](#run_engine), a batch without a server with [LLM](#llm); [the contract](contract.md) says what columns may
hold, and [the glossary](glossary.md) what the words mean. The examples run as they are written: `address` is where a
processor takes clients, and `await` is possible, as in `python -m asyncio`.
"""
_GROUPS = {
    "Clients": "connect Client Generation Token RequestParameters StructuredOutput Stream StepRows RequestEnd Generate",
    "Offline": "LLM Outputs Output",
    "Engines": "run_engine Engine StepArrays token_logprobs Publisher StepAssembler",
    "Processors": "Processor Step Settings",
    "Recordings and the durable log": "read_recording read_log StreamItem",
    "Messages": "LogprobBatch BatchHeader Row encode decode Limits BatchKind RowStatus Scoring SpeculativeMethod "
    "StepPhase ValueKind",
    "Errors": "ContractError Rule RequestFailedError AddressError LogError RecordingError SettingsError PublishError "
    "RetentionFullError NotRunningError WouldWaitError EngineStepError EngineBrokenError",
}
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)


class Documented(NamedTuple):
    """A public name, or a public method of one."""

    name: str
    """As it is written after `tokenbus.`."""
    signature: str
    """Its parameters; empty for what is not called."""
    text: str
    """Its docstring up to the first section."""
    sections: dict[str, str]
    """Args, Returns, Raises and Example, each without its indentation."""
    fields: dict[str, str] = {}  # noqa: RUF012 - a default that nothing changes
    """A class's fields, or an enum's members, each with its docstring."""


def documented(name: str, found: object, signature: str = "") -> Documented:
    """Return what a docstring says."""
    parts = _SECTION.split(inspect.getdoc(found) or "")
    bodies = [textwrap.dedent(part.strip("\n")).rstrip() for part in parts[2::2]]
    return Documented(name, signature, parts[0].strip(), dict(zip(parts[1::2], bodies, strict=True)))


def public_names() -> Iterator[tuple[str, list[Documented]]]:
    """Yield each heading with the names under it, each followed by its public methods."""
    for heading, names in _GROUPS.items():
        yield heading, [each for name in names.split() for each in _of(name)]


def _of(name: str) -> Iterator[Documented]:
    found = getattr(tokenbus, name)
    yield documented(name, found, _signature(found))._replace(fields=_fields(found))
    if not inspect.isclass(found) or not found.__module__.startswith("tokenbus_") or issubclass(found, enum.Enum):
        return
    for member, value in vars(found).items():
        if not member.startswith("_"):
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(function):
                yield documented(f"{name}.{member}", function, _signature(function))
            elif isinstance(value, property):
                yield documented(f"{name}.{member}", value)


def _fields(found: object) -> dict[str, str]:
    """Return a class's fields, each with the docstring under it."""
    if not inspect.isclass(found) or not found.__module__.startswith("tokenbus_") or "_pb2" in found.__module__:
        return {}
    (kind,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    fields, last = {}, ""
    for node in kind.body if isinstance(kind, ast.ClassDef) else []:
        match node:
            case ast.AnnAssign(target=ast.Name(id=last)) | ast.Assign(targets=[ast.Name(id=last)]):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if last:
                fields[last] = " ".join(text.split())
                last = ""
            case _:
                last = ""
    return {name: text for name, text in fields.items() if not name.startswith("_")}


def _signature(found: Callable[..., object]) -> str:
    if inspect.isclass(found) and not _is_called(found):
        return ""
    parameters = inspect.signature(found).parameters.values()
    kept = [each for each in parameters if each.name not in {"self", "cls"}]
    return str(inspect.Signature([each.replace(annotation=each.empty, default=_shown(each.default)) for each in kept]))


class _Elsewhere:
    """A default that is no plain value, and may say something of this machine."""

    def __repr__(self) -> str:
        return "..."


def _shown(default: object) -> object:
    is_plain = default is None or isinstance(default, str | int | float | enum.Enum)
    return default if is_plain or default is inspect.Parameter.empty else _Elsewhere()


def _is_called(kind: type) -> bool:
    """Tell whether users make a class's objects themselves, with arguments that are worth showing."""
    others = (enum.Enum, Exception, dict, Message)
    return not issubclass(kind, others) and not getattr(kind, "_is_protocol", False)


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for heading, names in public_names():
        lines.append(f"## {heading}\n")
        for each in names:
            lines.extend(_entry(each))
    return "\n".join(lines)


def _entry(each: Documented) -> Iterator[str]:
    if "." in each.name and not each.sections:
        text = " ".join(each.text.split("\n\n")[0].split())
        yield f"**`{each.name}{each.signature}`** {text}\n"
        return
    yield f"{'####' if '.' in each.name else '###'} {each.name}\n"
    if each.signature:
        yield f"`{each.name}{each.signature}`\n"
    yield each.text + "\n"
    if each.fields:
        yield "\n".join(f"- `{name}`: {text}" for name, text in each.fields.items()) + "\n"
    for title, body in each.sections.items():
        if title == "Example":
            yield f"```python\n{body}\n```\n"
        elif title == "Returns":
            yield f"Returns {body}\n"
        else:
            yield f"{title}:\n"
            yield re.sub(r"^([\w, ]+): ", r"- `\1`: ", body, flags=re.MULTILINE) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
