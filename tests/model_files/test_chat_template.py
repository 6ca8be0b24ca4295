"""ChatTemplate: a model's own template, in a sandbox."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folder import byte_level, write_model
from tokenbus.model_files import ChatTemplate, ChatTemplateError, ModelFilesError, ModelTokenizer

CHAT = [{"role": "user", "content": "a < b"}]


def rendered(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(CHAT)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "a < b"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n{% endif %}\n", "x\n"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert rendered(source) == text


def test_template_is_given_the_time_and_tools() -> None:
    """The template named tool_use is taken where there are tools."""
    january = datetime(2026, 1, 5)  # noqa: DTZ001 - a template's time is the machine's own
    texts = {"default": "{{ strftime_now('%d %b %Y') }}", "tool_use": "{{ tools[0].name }}"}
    told = ChatTemplate(texts, {}, lambda: january)
    assert told.render(CHAT) == "05 Jan 2026"
    assert told.render(CHAT, [{"name": "search"}]) == "search"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[3].content.x }}", "has no element 3$"),
        ("{{ 1 / 0 }}", "^ZeroDivisionError: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_template_that_refuses_or_fails(source: str, line: str) -> None:
    with pytest.raises(ChatTemplateError, match=line) as raised:
        rendered(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("template", "file", "line"),
    [
        ("{% if %}", None, "cannot be compiled"),
        ([{"name": "rag", "template": "x"}], None, "one must be 'default', got rag"),
        ([{"name": "default"}], None, "cannot be read: KeyError: 'template'"),
        (7, None, "a text, or texts by name, got int"),
        (None, ("chat_template.json", "{"), "cannot be read: JSONDecodeError"),
        (None, ("chat_template.jinja", b"\xff"), "cannot be read: UnicodeDecodeError"),
    ],
)
def test_template_that_cannot_be_used(
    template: object, file: tuple[str, str | bytes] | None, line: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", byte_level(), template)
    if file is not None:
        name, content = file
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelFilesError, match=line) as raised:
        ModelTokenizer(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.jinja", "of the file"), ("chat_template.json", json.dumps({"chat_template": "of the file"}))],
)
def test_template_in_a_file_of_its_own(name: str, content: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level())
    (folder / name).write_text(content)
    template = ModelTokenizer(folder).chat_template
    assert template is not None
    assert template.render(CHAT) == "of the file"


# What templates are given of messages: the form that each reads.

SHOWN = "{{ messages | tojson }}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MACRO = "{% macro write(what) %}{% for part in what %}{{ part.text }}{% endfor %}{% endmacro %}"
LOOPS = [
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m['content'][1:] | list %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set said = m.content %}{% for part in said %}{{ part.text }}{% endfor %}{% endfor %}",
    MACRO + "{% for m in messages %}{{ write(m.content) }}{% endfor %}",
    MACRO + "{% for m in messages %}{{ write(what=m.content) }}{% endfor %}",
]


def given(source: str, *messages: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    text = ChatTemplate({"default": source + "|||" + SHOWN}, {}).render(messages)
    return json.loads(text.rpartition("|||")[2])


@pytest.mark.parametrize("source", [*LOOPS, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_template_that_goes_through_parts_is_given_parts(source: str) -> None:
    """Other templates are given texts."""
    contents = ["x", PARTS, None]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content} for content in contents]
    found = [each["content"] for each in given(source, *messages, {"role": "tool", "content": PARTS})]
    parts = [[{"type": "text", "text": "x"}], PARTS, []]
    assert found == [*(parts if source in LOOPS else ["x", "a\nb", ""]), "a\nb"]


def test_calls_and_their_results() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": None, "type": None, "function": {"name": "g", "arguments": "{'a'"}},
        {"function": {"name": "h", "arguments": "[1]"}},
    ]
    found = given(
        "",
        {"role": "assistant", "content": "", "tool_calls": calls, "name": None, "reasoning": "so"},
        {"role": "tool", "content": "r", "tool_call_id": "1", "tool_calls": None},
        {"role": "user", "content": "x", "name": "Ada", "tool_calls": []},
    )
    assert found == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": None, "type": "function", "function": {"name": "g", "arguments": {}}},
                {"id": None, "type": "function", "function": {"name": "h", "arguments": {}}},
            ],
            "reasoning": "so",
            "reasoning_content": "so",
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": "x", "name": "Ada"},
    ]


def test_half_of_a_pair_in_a_calls_arguments_is_replaced() -> None:
    """A model may write one, escaped as JSON has it; the chat goes on, in text that a tokenizer takes."""
    call = {"function": {"name": "f", "arguments": r'{"a": "x\ud800y", "b": "\ud83d\ude00"}'}}
    template = ChatTemplate({"default": "{{ messages[0].tool_calls[0].function.arguments | tojson }}"}, {})
    text = template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert text == '{"a": "x\ufffdy", "b": "\U0001f600"}'


def test_developer_is_the_system_of_templates_that_do_not_know_it() -> None:
    user, said = {"role": "user", "content": "u"}, {"role": "developer", "content": "d"}
    assert given("", said, user) == [{"role": "system", "content": "d"}, user]
    mixed: list[dict[str, Any]] = [{"role": "system", "content": PARTS}, user, said]
    assert given("", *mixed) == [{"role": "system", "content": "a\nb\n\nd"}, user]
    known = "{% if messages[0].role == 'developer' %}{% endif %}"
    assert given(known, user, said) == [user, said]


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "Once ", "<assistant>Once "),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}", "Once ", "<assistant>Once"),
        ("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}", PARTS, "[a][b"),
    ],
)
def test_last_message_is_continued(source: str, content: Any, text: str) -> None:  # noqa: ANN401 - JSON
    template = ChatTemplate({"default": source}, {})
    assert template.render([{"role": "assistant", "content": content}], continues_last=True) == text


@pytest.mark.parametrize(
    ("source", "content", "line"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "a", "the template does not show it$"),
        ("{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}", None, "has no content"),
    ],
)
def test_last_message_that_cannot_be_continued(source: str, content: str | None, line: str) -> None:
    with pytest.raises(ChatTemplateError, match=line):
        ChatTemplate({"default": source}, {}).render([{"role": "assistant", "content": content}], continues_last=True)
