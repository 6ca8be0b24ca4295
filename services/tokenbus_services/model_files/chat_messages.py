"""OpenAI's messages in the form that a chat template reads, which is found from its source."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import nodes

_SYSTEM = ("system", "developer")


class MessageForm(NamedTuple):
    """What a template reads of messages."""

    has_parts: bool
    """Whether it goes through a message's parts; else a message's content is one text."""
    knows_developer: bool
    """Whether it has the role `developer`; else a developer's messages are the system's, before all others."""

    @classmethod
    def of(cls, source: str, tree: nodes.Template) -> "MessageForm":
        """Return the form that a template reads, from its source and the tree that this is parsed to."""
        return cls(_goes_through_parts(tree), "'developer'" in source or '"developer"' in source)

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in this form; what is null is left out, and arguments of calls are objects."""
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
            if thought is not None:  # both names are in use
                fitted["reasoning"] = fitted["reasoning_content"] = thought
        for name in ("tool_call_id", "name"):
            if message.get(name) is not None:
                fitted[name] = message[name]
        return fitted


def _joined(content: Any) -> str:  # noqa: ANN401 - a text, parts or nothing
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):  # a model wrote them: a chat with such a call would never go on
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _goes_through_parts(tree: nodes.Template) -> bool:
    """Return whether a template has a loop over a message's content."""
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
    """Return the parameters of macros that are called with a message's content."""
    macros = {macro.name: [each.name for each in macro.args] for macro in tree.find_all(nodes.Macro)}
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            given = [
                *zip(macros[call.node.name], call.args, strict=False),
                *((each.key, each.value) for each in call.kwargs),
            ]
            found |= {name for name, value in given if _is_content(value, names)}
    return found


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is a message's content, or part of it; `names` are variables that have it."""
    while isinstance(node, nodes.Filter | nodes.Test) or _is_slice(node):
        node = node.node  # type: ignore[union-attr]
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _is_slice(node: nodes.Node | None) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
