"""Tool parsers, which find calls in a model's text. The formats have the same names as in vLLM."""

import ast
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from tokenbus.gateway.stop_strings import beginning

_MOST_CHARACTERS = 131_072
"""Maximum number of characters of a call or of a list of calls. A longer text counts as content."""
_MOST_BEFORE = 1024
"""Maximum number of characters before a call. Only spaces and a mark may precede a call."""
_OPENING, _CLOSING = "{[", "}]"
_NAMES: Mapping[str, bool | None] = MappingProxyType({"true": True, "false": False, "null": None})
"""The constants of JSON, which models mix with those of Python."""
_MALFORMED = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError)
"""Errors that the parsers of JSON and Python raise for malformed or too deeply nested texts."""


class Call(NamedTuple):
    """A function call."""

    name: str
    arguments: str


class Nesting:
    """Finds the end of a value in pieces of text, by following brackets and strings."""

    def __init__(self, quotes: str = '"') -> None:
        self.depth = 0
        self._quotes = quotes
        self._quote = ""
        self._is_escaped = False

    def end(self, text: str, begin: int = 0) -> int | None:
        """Return the index of the value's end after `begin`, or None if the value continues in the next piece."""
        for at in range(begin, len(text)):
            character = text[at]
            if self._quote:
                if self._is_escaped or character == "\\":
                    self._is_escaped = not self._is_escaped
                elif character == self._quote:
                    self._quote = ""
                    if not self.depth:
                        return at + 1
                continue
            if not self.depth and (character in ",}]" or character.isspace()):  # the end of a number or a constant
                return at
            self._quote = character if character in self._quotes else ""
            self.depth += (character in _OPENING) - (character in _CLOSING)
            if not self.depth and character in _CLOSING:
                return at + 1
        return None


class ToolParser(ABC):
    """Separates calls from content in pieces of text, and holds back text that may be a call."""

    shows_special: ClassVar[bool] = False
    """Whether the format's marks may be special tokens, so that the text must contain special tokens."""

    def __init__(self) -> None:
        self.held = 0
        self._held: list[str] = []
        self._content: list[str] = []
        self._calls: list[Call] = []

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[Call]]:
        """Add the next text of a stream. Return the content and the calls that are now certain."""
        self._read(text)
        if is_last:
            self._finish()
        found = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return found

    @abstractmethod
    def _read(self, text: str) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self.held += len(text)

    def _take(self) -> str:
        text = "".join(self._held)
        self._held, self.held = [], 0
        return text


class Hermes(ToolParser):
    """Calls within a text. A call is an object with `name` and `arguments` between `<tool_call>` and `</tool_call>`."""

    shows_special = True
    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False
        self._tail = ""
        """Characters at the end of the text that may begin the next mark."""
        self._is_behind = False
        """Whether the last item of the text was a call. Spaces after a call are dropped."""

    def _read(self, text: str) -> None:
        text, begin = self._tail + text, 0
        while (at := text.find(mark := self._END if self._is_inside else self._BEGIN, begin)) >= 0:
            if self._is_inside:
                self._hold(text[begin:at])
                self._close(mark)
            else:
                self._say(text[begin:at])
            self._is_inside = not self._is_inside
            begin = at + len(mark)
        end = len(text) - beginning(text[begin:], mark)
        self._tail = text[end:]
        if not self._is_inside:
            self._say(text[begin:end])
            return
        self._hold(text[begin:end])
        if self.held > _MOST_CHARACTERS:
            self._is_inside = False
            self._say(self._BEGIN + self._take())

    def _finish(self) -> None:
        if self._is_inside:  # the text may end before the mark
            self._close(self._tail)
        else:
            self._say(self._tail)
        self._tail = ""

    def _close(self, mark: str) -> None:
        text = self._take()
        call = _call_in(text, "arguments")
        if call is None:
            self._say(self._BEGIN + text + mark)
        else:
            self._calls.append(call)
            self._is_behind = True

    def _say(self, text: str) -> None:
        if self._is_behind:
            text = text.lstrip()
        if text:
            self._content.append(text)
            self._is_behind = False


class _OnlyCalls(ToolParser):
    """Calls that make up a whole answer. Calls are in brackets, with a mark before the first call or between calls."""

    _opening: ClassVar[str]
    _quotes: ClassVar[str]
    _first: ClassVar[str] = ""
    _between: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self._before = ""
        self._call: Nesting | None = None
        self._has_calls = False
        self._is_text = False

    @abstractmethod
    def _calls_in(self, text: str) -> list[Call] | None:
        """Return the calls in a text in brackets, or None if the text is something else."""

    def _read(self, text: str) -> None:
        begin = 0
        while begin < len(text) and not self._is_text:
            begin = self._read_before(text, begin) if self._call is None else self._read_call(self._call, text, begin)
        self._content.append(text[begin:])

    def _read_before(self, text: str, begin: int) -> int:
        at = text.find(self._opening, begin)
        end = len(text) if at < 0 else at
        self._before += text[begin:end]
        self.held = len(self._before)
        before, mark = self._before.strip(), self._between if self._has_calls else self._first
        is_right = before in ("", mark) or (at < 0 and mark.startswith(before))
        if not is_right or self.held > _MOST_BEFORE:
            self._give_up()
        elif at >= 0:
            self._call = Nesting(self._quotes)
        return end

    def _read_call(self, call: Nesting, text: str, begin: int) -> int:
        end = call.end(text, begin)
        self._hold(text[begin:end])
        if end is not None:
            self._call = None
            calls = self._calls_in("".join(self._held))
            if calls is None:
                self._give_up()
            else:
                self._calls += calls
                self._has_calls = True
                self._take()
                self._before = ""
        elif self.held > _MOST_CHARACTERS:
            self._give_up()
        return len(text) if end is None else end

    def _give_up(self) -> None:
        self._content.append(self._before + self._take())
        self._before = ""
        self._is_text = True

    def _finish(self) -> None:
        if self._call is not None or not self._has_calls:
            self._give_up()
        else:  # drop spaces and marks after the last call
            self._before, self.held = "", 0


class Llama3Json(_OnlyCalls):
    """Calls as objects with `name` and `parameters` or `arguments`, separated by semicolons."""

    _opening = "{"
    _quotes = '"'
    _first = "<|python_tag|>"
    _between = ";"

    def _calls_in(self, text: str) -> list[Call] | None:
        call = _call_in(text, "arguments", "parameters")
        return None if call is None else [call]


class Pythonic(_OnlyCalls):
    """A list of calls in Python syntax, with keyword arguments."""

    _opening = "["
    _quotes = "\"'"

    def _calls_in(self, text: str) -> list[Call] | None:
        if len(text) > _MOST_CHARACTERS:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns about unknown escapes in strings
                listed = ast.parse(text, mode="eval").body
            return [_python_call(each) for each in listed.elts] or None if isinstance(listed, ast.List) else None
        except _MALFORMED:
            return None


PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {"hermes": Hermes, "llama3_json": Llama3Json, "pythonic": Pythonic}
)
"""Parsers by vLLM's names, which the setting `gateway.tool_call_parser` uses."""


def written(arguments: object) -> str:
    """Return arguments as JSON. Lone surrogates stay escaped, because UTF-8 cannot encode them."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def _call_in(text: str, *names: str) -> Call | None:
    """Return the call in a JSON object with `name` and, under one of the given names, arguments.

    Return None if the text is not a call.
    """
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        found = json.loads(text)
        return _call(found["name"], next(found[name] for name in names if name in found))
    except (*_MALFORMED, StopIteration):
        return None


def _call(name: object, arguments: object) -> Call:
    if not isinstance(name, str) or not name:
        raise ValueError("a name")
    name.encode()
    return Call(name, written(arguments))


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("a call with arguments by name")
    return _call(_python_name(node.func), {each.arg: _python_value(each.value) for each in node.keywords})


def _python_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{_python_name(value)}.{name}"
    raise ValueError("a name")


def _python_value(node: ast.expr | None) -> Any:  # noqa: ANN401 - JSON
    match node:
        case ast.Constant(value):
            return value
        case ast.List(items) | ast.Tuple(items):
            return [_python_value(each) for each in items]
        case ast.Dict(keys, values):
            return {_python_value(key): _python_value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
    raise ValueError("a value")
