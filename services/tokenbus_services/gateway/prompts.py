"""PromptEncoder: the token ids of texts and chats, within the gateway's bounds."""

from collections.abc import Sequence
from typing import Any

from tokenbus_services.gateway.request_body import invalid
from tokenbus_services.gateway.vocabulary import Vocabulary
from tokenbus_services.settings import GatewaySettings

_MAX_PROMPTS_SHARE = 4
"""The prompts of an answer have at most this many times gateway.max_prompt_tokens together, each counted `n` times."""
_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class PromptEncoder:
    """Encodes prompts; every method raises an ApiError that names the field."""

    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary) -> None:
        """Take the bounds, and the vocabulary that encodes texts."""
        self._most = settings.max_prompt_tokens
        self._template = settings.chat_template
        self._vocabulary = vocabulary

    def prompts(self, prompts: Sequence[str | list[int]], n: int, name: str) -> list[list[int]]:
        """Return the ids of an answer's prompts, of which each has `n` choices."""
        most, tokens, encoded = _MAX_PROMPTS_SHARE * self._most, 0, []
        for prompt in prompts:
            encoded.append(self.prompt(prompt, name))
            tokens += n * len(encoded[-1])
            if tokens > most:
                raise invalid(name, f"at most {most} tokens together, each prompt n times, got {tokens} or more")
        return encoded

    def prompt(self, prompt: str | list[int], name: str, *, adds_special: bool = True) -> list[int]:
        """Return the ids of a text, with what the model wants around every text if `adds_special`; ids stay."""
        if not isinstance(prompt, str):
            return prompt
        least = self._vocabulary.least_tokens(len(prompt))
        if least > self._most:  # no need to encode it
            raise invalid(name, f"at most {self._most} tokens, got at least {least}")
        ids = self._vocabulary.encode(prompt) if adds_special else self._vocabulary.encode_chat(prompt)
        if not 1 <= len(ids) <= self._most:
            raise invalid(name, f"1 to {self._most} tokens, got {len(ids)}")
        return ids

    def chat(self, messages: Sequence[Any], *, begins_answer: bool = True) -> list[int]:
        """Return the ids of a chat, up to where the assistant's next message begins if `begins_answer`.

        `auto` is the model's own template, and `text` for tokenizers that are no model's. `text`: the messages' texts,
        one a line, for models that continue any text and know no roles. `roles`: a line for each message,
        `User: ...`, and `Assistant:` at the end.
        """
        texts = [_text_of(message.content) for message in messages]
        if self._template == "auto" and self._vocabulary.is_of_model:
            pairs = zip(messages, texts, strict=True)
            chat = [{"role": message.role, "content": text} for message, text in pairs]
            text = self._vocabulary.render_chat(chat, begins_answer=begins_answer)
            return self.prompt(text, "messages", adds_special=False)
        if self._template == "roles":
            texts = [f"{_ROLES[message.role]}: {text}" for message, text in zip(messages, texts, strict=True)]
            texts += ["Assistant:"] if begins_answer else []
        return self.prompt("\n".join(texts), "messages")


def _text_of(content: Any) -> str:  # noqa: ANN401 - a text, or a list of parts
    return content if isinstance(content, str) else "".join(part.text for part in content)
