"""ChatTemplate: a model's own template, in a sandbox."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.model_folder import END, byte_level, write_model
from tokenbus_services.model_files import ChatTemplate, ChatTemplateError, ModelFilesError, ModelTokenizer

CHAT = [{"role": "user", "content": "a < b"}]


def rendered(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(CHAT)


def test_chat_as_the_model_was_trained(tmp_path: Path) -> None:
    template = ModelTokenizer(write_model(tmp_path / "model", byte_level())).chat_template
    assert template is not None
    assert template.render(CHAT) == f"<user>a < b{END}<assistant>"
    assert template.render(CHAT, variables={"add_generation_prompt": False}) == f"<user>a < b{END}"


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


def test_template_that_shows_the_time() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, lambda: datetime(2026, 1, 5))  # noqa: DTZ001
    assert template.render(CHAT) == "05 Jan 2026"


def test_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, [{"name": "search"}]) == "search"


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
