"""The chat template: what a chat's messages become as one prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


def prompt_of(messages: Sequence[Mapping[str, Any]], template: str) -> str:
    """Return the prompt.

    `text`: the messages' texts with a line's end between them, for models that go on with any text and know no roles.
    `roles`: a line for each message, `User: ...`, and at last `Assistant:`.
    """
    texts = [_text(message["content"]) for message in messages]
    if template == "text":
        return "\n".join(texts)
    lines = [f"{_NAMES[message['role']]}: {text}" for message, text in zip(messages, texts, strict=True)]
    return "\n".join([*lines, "Assistant:"])


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
