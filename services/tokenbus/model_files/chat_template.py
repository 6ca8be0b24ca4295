"""ChatTemplate: renders the messages of a chat as text in the format of the model's training."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SYSTEM = ("system", "developer")
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_NO_VARIABLES: Mapping[str, Any] = {}
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which UTF-8 cannot encode."""
_MARK = "(the answer goes on here)"
"""A mark that is added to the end of a continued message, to find the end in the rendered text."""


class ModelFilesError(ValueError):
    """A file of a model's folder is missing or unusable. The message is one line with the path and the reason."""


class ChatTemplateError(ValueError):
    """A template refuses a chat, for example because roles do not alternate. The message is one line."""


class MessageForm(NamedTuple):
    """The form of messages that a template expects."""

    has_parts: bool
    """Whether the template loops over the parts of a message. Otherwise a message's content must be one text."""
    knows_developer: bool
    """Whether the template has the role `developer`.

    Otherwise a developer's messages become system messages in front of all other messages.
    """

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in the template's form, without null members. The arguments of calls become objects."""
        fitted = [self._fit(message) for message in messages]
        if self.knows_developer or all(message["role"] != "developer" for message in fitted):
            return fitted
        system = [message for message in fitted if message["role"] in _SYSTEM]
        others = [message for message in fitted if message["role"] not in _SYSTEM]
        if system == fitted[:1]:
            return [{**fitted[0], "role": "system"}, *others]
        texts = (_joined(message["content"]) for message in system)
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]

    def _fit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if self.has_parts and role != "tool":
            given = [content] if isinstance(content, str) else content or ()
            parts = [{"type": "text", "text": each if isinstance(each, str) else each["text"]} for each in given]
            fitted = {"role": role, "content": parts}
        else:
            fitted = {"role": role, "content": _joined(content)}
        if role == "assistant":
            if message.get("tool_calls"):
                fitted["tool_calls"] = [_call(call) for call in message["tool_calls"]]
            thought = message.get("reasoning") or message.get("reasoning_content")
            if thought is not None:  # some templates read `reasoning`, others `reasoning_content`
                fitted["reasoning"] = fitted["reasoning_content"] = thought
        for name in ("tool_call_id", "name"):
            if message.get(name) is not None:
                fitted[name] = message[name]
        return fitted


class ChatTemplate:
    """The Jinja template of a model. A sandbox keeps the template from changing objects and accessing files.

    Some models have a second template for chats with tools.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template named `default` and, if present, `tool_use`. Raises a ModelFilesError.

        `special_tokens` are variables of the template, such as `bos_token`. `now` returns the time for templates.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self._names = frozenset({"messages", "tools", *environment.globals, *special_tokens})
        try:
            self._templates = {}
            for name, source in templates.items():
                knows_developer = "'developer'" in source or '"developer"' in source
                form = MessageForm(_goes_through_parts(environment.parse(source)), knows_developer)
                self._templates[name] = environment.from_string(source), form
        except TemplateError as error:
            raise ModelFilesError(f"its chat template cannot be compiled: {_line(error)}") from None
        if _DEFAULT not in self._templates:
            raise ModelFilesError(f"its chat templates: one must be {_DEFAULT!r}, got {', '.join(templates)}")

    def reserves(self, name: str) -> bool:
        """Return whether a template relies on a variable, which clients therefore must not set.

        This includes special tokens that the model does not have, because templates test for their absence.
        """
        return name in self._names or name.endswith(("_token", "_tokens"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        *,
        continues_last: bool = False,
        most: int = sys.maxsize,
    ) -> str:
        """Return the text of a chat up to the beginning of the assistant's next message.

        Args:
            messages: The messages in OpenAI's format, each with a `role` and a `content`, which is a text or parts.
            tools: The functions that the model may call, in OpenAI's format. variables: Further variables, such as
            `enable_thinking`, which replace other variables of the same name. continues_last: Whether the text ends
            with the content of the last message. most: Maximum number of characters of the text.

        Raises:
            ChatTemplateError: The template refuses the chat, fails, or renders a text that is too long.
        """
        template, form = self._templates.get(_WITH_TOOLS if tools else _DEFAULT) or self._templates[_DEFAULT]
        fitted = form.fit(messages)
        if continues_last:
            _mark_end(fitted[-1])
        usual = {"messages": fitted, "tools": list(tools) or None, "documents": None, "add_generation_prompt": True}
        try:
            text = _bounded(template.generate({**self._special_tokens, **usual, **variables}), most)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the template is a program, which may raise anything
            raise ChatTemplateError(_line(error)) from None
        text = _until_mark(text) if continues_last else text
        return _HALF_OF_A_PAIR.sub("\ufffd", text)  # a model's calls may contain lone surrogates


def templates_in(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates in a model's folder and its tokenizer_config.json, by name."""
    found = config.get("chat_template")
    try:
        if (path := folder / "chat_template.jinja").exists():
            return {_DEFAULT: path.read_text(encoding="utf-8")}
        if (path := folder / "chat_template.json").exists():
            found = json.loads(path.read_bytes())["chat_template"]
        if isinstance(found, list):
            found = {each["name"]: each["template"] for each in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFilesError(f"{folder}: its chat template cannot be read: {_line(error)}") from None
    if not found:
        return {}
    templates = {_DEFAULT: found} if isinstance(found, str) else found
    if not isinstance(templates, dict) or not all(isinstance(each, str) for each in templates.values()):
        raise ModelFilesError(f"{folder}: chat_template: a text, or texts by name, got {type(found).__name__}")
    return templates


def _bounded(pieces: Iterable[str], most: int) -> str:
    """Join pieces of text. Rendering stops when the text is longer than `most` characters."""
    taken, left = [], most
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TemplateError(f"its text: at most {most} characters, got more")
        taken.append(piece)
    return "".join(taken)


def _mark_end(message: dict[str, Any]) -> None:
    # The space before the mark shows whether the template keeps spaces at the end of a content.
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{_MARK} "
    elif content:
        content[-1]["text"] += f"{_MARK} "
    else:
        raise ChatTemplateError("the last message has no content that could be continued")


def _until_mark(text: str) -> str:
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise ChatTemplateError("the last message cannot be continued: the template does not show it")
    return before if behind.startswith(" ") else before.rstrip()


class _Generation(Extension):
    """Ignores the tag `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}"


def _joined(content: Any) -> str:  # noqa: ANN401 - a text, parts or nothing
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # the model wrote invalid JSON
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _goes_through_parts(tree: nodes.Template) -> bool:
    """Return whether a template loops over the content of a message."""
    names = {"content"}
    while True:
        assigned = {
            each.target.name
            for each in tree.find_all(nodes.Assign)
            if isinstance(each.target, nodes.Name) and _is_content(each.node, names)
        }
        if assigned | _parameters(tree, names) <= names:
            return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
        names |= assigned | _parameters(tree, names)


def _parameters(tree: nodes.Template, names: set[str]) -> set[str]:
    """Return the names of macro parameters that receive the content of a message."""
    macros = {macro.name: [each.name for each in macro.args] for macro in tree.find_all(nodes.Macro)}
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            given = dict(zip(macros[call.node.name], call.args, strict=False))
            given |= {each.key: each.value for each in call.kwargs}
            found |= {name for name, value in given.items() if _is_content(value, names)}
    return found


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is a message's content, a part of the content, or a variable in `names`."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
