"""Calls in the text of a model that may call functions: found whole or as the text comes, and nothing is lost."""

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.in_process.builders import settings
from tokenbus.gateway.tool_parsers import PARSERS, Call
from tokenbus.settings import SettingsError

Written = Callable[[Sequence[tuple[str, dict[str, Any]]]], str]
NOW = Call("now", "{}")
WEATHER = Call("weather", '{"city": "Bern", "days": 3}')
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
HERMES_NOW = '<tool_call>{"arguments":{},"name":"now"}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city":"Bern","days":3}}'
PYTHON = "[weather(city='Bern', days=3)]"
DEEP = "[" * 3000


def taken(parser: str, texts: Sequence[str]) -> tuple[str, list[Call]]:
    made = PARSERS[parser]()
    found = [made.add(text) for text in texts] + [made.add("", is_last=True)]
    assert made.held == 0
    return "".join(content for content, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", [WEATHER]),
        ("hermes", f"I look.\n{HERMES}\n{HERMES_NOW}\n", "I look.\n", [WEATHER, NOW]),
        ("hermes", f"{HERMES} Behind it. {HERMES_NOW}", "Behind it. ", [WEATHER, NOW]),
        ("hermes", f"{HERMES}<tool_call>{{</tool_call>{HERMES_NOW}", "<tool_call>{</tool_call>", [WEATHER, NOW]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [WEATHER]),
        ("hermes", HERMES.removesuffix("call>"), "", [WEATHER]),
        ("llama3_json", LLAMA, "", [WEATHER]),
        ("llama3_json", f"\n<|python_tag|> {LLAMA}", "", [WEATHER]),
        ("llama3_json", f'{LLAMA}; {{"type": "function", "name": "now", "arguments": {{}}}};', "", [WEATHER, NOW]),
        ("llama3_json", f"{LLAMA}\n{LLAMA}\n", "", [WEATHER, WEATHER]),
        ("llama3_json", LLAMA + "; and more", "; and more", [WEATHER]),
        ("llama3_json", LLAMA + '; {"a": 1}', '; {"a": 1}', [WEATHER]),
        ("pythonic", PYTHON, "", [WEATHER]),
        ("pythonic", f" {PYTHON}\n", "", [WEATHER]),
        ("pythonic", '[now(), a.b(x=[-1, (2.5, None)], y={"k": true, "l": "\\d)]"})]', "", [
            NOW, Call("a.b", '{"x": [-1, [2.5, null]], "y": {"k": true, "l": "\\\\d)]"}}')
        ]),
        ("pythonic", PYTHON + " behind it", " behind it", [WEATHER]),
    ],
)  # fmt: skip
def test_calls_are_found(parser: str, text: str, content: str, calls: list[Call]) -> None:
    assert taken(parser, [text]) == taken(parser, list(text)) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *((parser, text) for parser in PARSERS for text in ("", " ", "It rains.", "a < b", "<", DEEP)),
        ("hermes", "<tool_call>no object</tool_call> behind it"),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {DEEP}'),
        ("hermes", "<tool_call>" + HERMES),
        ("hermes", HERMES[:40]),
        ("hermes", "<tool_"),
        ("llama3_json", "I look. " + LLAMA),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "<|python"),
        ("llama3_json", '{"city": "Bern"}'),
        ("llama3_json", "[" + LLAMA + "]"),
        ("llama3_json", LLAMA[:30]),
        ("llama3_json", '{"name": "f", "parameters": ]}'),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[]"),
        ("pythonic", "[now()"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a=b'')]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a={[]: 1})]"),
        ("pythonic", "[f()()]"),
        ("pythonic", "[f(a=\0)]"),
        ("pythonic", f"[f(a={'-' * 9000}1)]"),
        ("pythonic", f"[f(a=1{'+1' * 9000})]"),
        ("pythonic", f"[f(a={'9' * 9000})]"),
    ],
)
def test_text_that_is_no_call_stays(parser: str, text: str) -> None:
    assert taken(parser, [text]) == taken(parser, list(text)) == (text, [])


def test_parser_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match=f"one of nothing, {', '.join(PARSERS)}, got 'mistral'"):
        settings({"gateway.tool_call_parser": "mistral"})


@pytest.mark.parametrize(
    ("parser", "pieces"),
    [
        ("hermes", [("Hi <tool", "Hi "), ("ing> ", "<tooling> "), ("<tool_call>{", ""), ("}</tool_call>", None)]),
        ("llama3_json", [("<|python", ""), (" is a language", "<|python is a language"), (" {", " {")]),
        ("pythonic", [(" ", ""), ("[", ""), ("1]", " [1]"), (" [f()]", " [f()]")]),
    ],
)
def test_only_what_may_be_a_call_is_held_back(parser: str, pieces: list[tuple[str, str | None]]) -> None:
    made = PARSERS[parser]()
    for text, content in pieces:
        assert made.add(text) == (content if content is not None else "<tool_call>{}</tool_call>", [])


@pytest.mark.parametrize(
    ("parser", "begin"),
    [("hermes", "<tool_call>"), ("llama3_json", "{"), ("llama3_json", ""), ("pythonic", "["), ("pythonic", "[f(a='")],
)
def test_what_is_held_back_is_bounded(parser: str, begin: str) -> None:
    made, pieces = PARSERS[parser](), [begin, *[" " * 1000] * 200]
    content, most = "", 0
    for text in pieces:
        content += made.add(text)[0]
        most = max(most, made.held)
    assert most < 140_000
    assert content + made.add("", is_last=True)[0] == "".join(pieces)


@pytest.mark.parametrize(
    ("parser", "before", "behind"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "', '"}}'),
        ("pythonic", '[f(a="', '")]'),
    ],
)
def test_call_that_is_too_long_is_a_text_however_it_comes(parser: str, before: str, behind: str) -> None:
    text = before + "x" * 140_000 + behind
    assert taken(parser, [text]) == taken(parser, [text[:70_000], text[70_000:]]) == (text, [])
    short = before + "x" * 130_000 + behind
    assert taken(parser, [short]) == ("", [Call("f", json.dumps({"a": "x" * 130_000}))])


def hermes(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)


def llama(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    listed = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    text = f"[{', '.join(listed)}]"
    ast.parse(text)
    return text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("a\"'\\{}[]()<>;,é\n", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a\"'}", max_size=3), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(st.sampled_from("abc"), VALUES)), min_size=1)


@given(
    st.sampled_from([("hermes", hermes), ("llama3_json", llama), ("pythonic", pythonic)]),
    CALLS,
    st.lists(st.integers(1, 9), min_size=1),
)
@pytest.mark.long
def test_calls_are_the_same_however_their_text_is_cut(
    parser: tuple[str, Written], calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    name, write = parser
    text = write(calls)
    pieces: list[str] = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    content, found = taken(name, pieces)
    assert (content, [(each.name, json.loads(each.arguments)) for each in found]) == ("", calls)


FRAGMENTS = [
    *["<tool_call>", "</tool_call>", "<", "[", "]", "{", "}", "f(", ")", "f()", '"', "'", "\\", ";", "a", "=", "1"],
    *(" ", HERMES_NOW, LLAMA, PYTHON, '{"name": "f", "parameters": 1}'),
]


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(FRAGMENTS)))
def test_any_text_is_read_the_same_in_pieces(parser: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = taken(parser, [text])
    assert taken(parser, pieces) == taken(parser, list(text)) == (content, calls)
    assert calls or content == text
