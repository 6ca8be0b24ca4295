"""PromptEncoder: the token ids of texts and chats, within the gateway's bounds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from tokenbus.gateway.bodies import Chat, Tokenization
from tokenbus.gateway.validation import invalid, json_text
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import GatewaySettings
from tokenbus.settings.errors import shown

if TYPE_CHECKING:  # the extra models may be missing
    from tokenbus.model_files import ChatTemplate

T = TypeVar("T")
Prompt = str | list[int]
"""A text or token ids."""
_MAX_PROMPTS_SHARE = 4
"""Ratio of the maximum number of tokens of all prompts, each counted `n` times, to gateway.max_prompt_tokens."""
_MAX_VARIABLES_BYTES = 65_536
_RESERVED = frozenset({
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "tokenize"),
})  # fmt: skip
"""Names that `chat_template_kwargs` must not contain. Other fields of the body determine the values of these names."""
_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


class Cut(NamedTuple):
    """How to cut prompts that are too long, with the same rules as in vLLM."""

    most: int
    side: str | None
    """The side that loses tokens, `left` or `right`. None is like `left`, but keeps special tokens before the text."""

    def of(self, ids: list[T], text_begins: int = 0) -> list[T]:
        """Cut a list with one value for each token of a prompt. The prompt's text begins at the index `text_begins`."""
        excess = len(ids) - self.most
        if excess <= 0:
            return ids
        if self.side == "right":
            return ids[: self.most]
        kept = 0 if self.side else text_begins
        return ids[:kept] + ids[kept + excess :]


class PromptEncoder:
    """Encodes prompts. Every method raises an ApiError that names the wrong field."""

    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary) -> None:
        self._most = settings.max_prompt_tokens
        self._most_bytes = settings.max_text_bytes
        self._template = settings.chat_template
        self._vocabulary = vocabulary

    def prompts(
        self,
        prompts: Sequence[Prompt],
        n: int,
        name: str,
        *,
        adds_special: bool = True,
        cut: Cut | None = None,
    ) -> list[list[int]]:
        most, tokens, encoded = _MAX_PROMPTS_SHARE * self._most, 0, []
        for prompt in prompts:
            encoded.append(self.prompt(prompt, name, adds_special=adds_special, cut=cut))
            tokens += n * len(encoded[-1])
            if tokens > most:
                raise invalid(name, f"at most {most} tokens together, each prompt n times, got {tokens} or more")
        return encoded

    def prompt(self, prompt: Prompt, name: str, *, adds_special: bool = True, cut: Cut | None = None) -> list[int]:
        """Return the token ids of a text, with the model's special tokens around the text if `adds_special`.

        A prompt of token ids is returned unchanged, unless `cut` shortens it.
        """
        if not isinstance(prompt, str):
            return prompt if cut is None else cut.of(prompt)
        self._check_size(len(prompt.encode()), name)
        ids = self._vocabulary.encode(prompt) if adds_special else self._vocabulary.encode_chat(prompt)
        ids = self._cut(ids, prompt, ids, cut, adds_special=adds_special)
        if not 1 <= len(ids) <= self._most:
            raise invalid(name, f"1 to {self._most} tokens, got {len(ids)}")
        return ids

    def spans(self, prompt: Prompt, *, adds_special: bool, cut: Cut | None = None) -> list[tuple[int, int]] | None:
        """Return the character ranges of a prompt's tokens, or None if the tokenizer does not report them."""
        found = self._vocabulary.spans(prompt, adds_special=adds_special) if isinstance(prompt, str) else None
        return None if found is None else self._cut(found[1], str(prompt), found[0], cut, adds_special=adds_special)

    def _cut(self, values: list[T], text: str, ids: list[int], cut: Cut | None, *, adds_special: bool) -> list[T]:
        """Cut a list that has one value for each token of a text."""
        if cut is None or len(ids) <= cut.most:
            return values
        return cut.of(values, _begin_of(self._vocabulary.encode_chat(text), ids) if adds_special else 0)

    def text(self, token_ids: Sequence[int], name: str) -> str:
        text = self._vocabulary.decode(token_ids)
        self._check_size(len(text.encode()), name)
        return text

    def chat(self, body: Chat | Tokenization, tools: Sequence[Any], cut: Cut | None = None) -> list[int]:
        """Return the token ids of the chat in a body."""
        text, adds_special = self.chat_text(body, tools)
        return self.prompt(text, "messages", adds_special=adds_special, cut=cut)

    def chat_text(self, body: Chat | Tokenization, tools: Sequence[Any]) -> tuple[str, bool]:
        """Return the text of the chat in a body, and whether to add the model's special tokens around the text.

        By default, the text ends where the assistant's next message begins.

        The template `auto` is the model's own, or `text` if the tokenizer belongs to no model. The template `text`
        writes the messages' texts, one per line, for models that know no roles. The template `roles` writes a line such
        as `User: ...` for each message, and `Assistant:` at the end. Only a model's own template shows tools.
        """
        messages = messages_of(body)
        if self._template == "auto" and self._vocabulary.is_of_model:
            template = self._vocabulary.chat_template
            variables, most = variables_of(body, template), self._most_bytes
            try:
                continues = bool(body.continue_final_message)
                text = template.render(messages, tools, variables, continues_last=continues, most=most)
            except ValueError as error:  # ValueError includes ChatTemplateError
                raise invalid("messages", f"the model's chat template refuses them: {error}") from None
            return text, bool(body.add_special_tokens)
        variables_of(body)
        texts = [_text_of(message["content"]) for message in messages]
        if self._template == "roles":
            names = [_ROLES.get(message["role"], message["role"]) for message in messages]
            texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
            texts += ["Assistant:"] if body.add_generation_prompt else []
        return "\n".join(texts), True

    def _check_size(self, size: int, name: str) -> None:
        if size > self._most_bytes:
            raise invalid(name, f"at most {self._most_bytes} bytes of text, got {size}")


def _begin_of(text: list[int], ids: list[int]) -> int:
    """Return the index at which the text's tokens begin in `ids`, which may have special tokens around them."""
    most = len(ids) - len(text)
    return next((begin for begin in range(most + 1) if ids[begin : begin + len(text)] == text), 0)


def echoed_text(body: Chat) -> str:
    """Return the echo of a chat: the text of the last message if the answer has the same role."""
    last = messages_of(body)[-1]
    return _text_of(last["content"]) if last["role"] == "assistant" or not body.add_generation_prompt else ""


def _text_of(content: Any) -> str:  # noqa: ANN401 - a text, parts or nothing
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def variables_of(body: Chat | Tokenization, template: "ChatTemplate | None" = None) -> dict[str, Any]:
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "only if add_generation_prompt is false, got both")
    variables: dict[str, Any] = {}
    if body.chat_template_kwargs is not None:
        variables = body.chat_template_kwargs
        for name in variables:
            if name in _RESERVED or (template is not None and template.reserves(name)):
                where = f"chat_template_kwargs.{shown(name)[1:-1]}"
                raise invalid(where, "must not be the name of a field, a special token or a function of the template")
        json_text("chat_template_kwargs", variables, _MAX_VARIABLES_BYTES)
    documents = {} if body.documents is None else {"documents": body.documents}
    effort = body.reasoning_effort if isinstance(body, Chat) else None
    if effort is not None:  # as in vLLM, also set the variable that enables thinking
        variables = {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}
    return {**variables, **documents, "add_generation_prompt": body.add_generation_prompt}


def messages_of(body: Chat | Tokenization) -> list[dict[str, Any]]:
    """Return the messages in the form of chat templates, with OpenAI's older functions as tools."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(body.messages)
    for index, message in enumerate(messages):
        parts = message["content"]
        if isinstance(parts, list):
            where = f"messages[{index}].content"
            message["content"] = [_part(each, f"{where}[{at}]") for at, each in enumerate(parts)]
        if message["role"] == "function":
            message["role"] = "tool"
        if message["function_call"] is not None and not message["tool_calls"]:
            message["tool_calls"] = [{"function": message["function_call"]}]
    return messages


def _part(part: Any, where: str) -> dict[str, str]:  # noqa: ANN401 - a text, or one in an object
    if isinstance(part, str):
        return {"type": "text", "text": part}
    name = part["type"] if part["type"] in {"refusal", "thinking"} else "text"
    if part[name] is None:
        raise invalid(f"{where}.{name}", "required, got nothing")
    return {"type": "text", "text": part[name]}
