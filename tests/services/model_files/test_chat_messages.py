"""What templates are given of messages: the form that each reads, with tools, results and a message to be continued."""

import json
from typing import Any

import pytest

from tokenbus_services.model_files import ChatTemplate, ChatTemplateError

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
    """Return the messages that a template is given, which ends with what shows them."""
    text = ChatTemplate({"default": source + "|||" + SHOWN}, {}).render(messages)
    return json.loads(text.rpartition("|||")[2])


@pytest.mark.parametrize("source", LOOPS)
def test_template_that_goes_through_parts_is_given_parts(source: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": PARTS},
    ]
    assert [each["content"] for each in given(source, *messages)] == [
        [{"type": "text", "text": "x"}],
        PARTS,
        [],
        "a\nb",
    ]


def test_other_templates_are_given_texts() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": PARTS}, {"role": "assistant"}]
    assert [each["content"] for each in given(source, *messages)] == ["a\nb", ""]


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
