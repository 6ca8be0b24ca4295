"""Bridge: builds the prompt of a session's next turn from the exact token ids of the last turn.

Only the new messages are encoded, by a renderer of the package `renderers`, which knows the model family's chat format.
The result is used only if the model's own chat template writes the same text for the new messages.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson

from tokenbus.gateway.bodies import Chat
from tokenbus.gateway.prompts import PromptEncoder, messages_of, variables_of
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.settings import GatewaySettings
from tokenbus.settings.errors import SettingsError

if TYPE_CHECKING:  # the extra `bridge` may be missing
    from renderers import Renderer

IDS = "I"
ID_BYTES = array(IDS).itemsize
_DIGEST_BYTES = 16
_MOST_RENDERERS = 16
"""Maximum number of renderers, one for each set of template variables."""
_NOT_OF_A_FAMILY = frozenset({"auto", "custom", "default"})
"""Renderers that guess the model family, load other code, or cannot continue a turn."""


class Turn(NamedTuple):
    """A finished turn: the ids of the prompt and of the output, as arrays of `IDS`."""

    prompt: bytes
    output: bytes

    @property
    def tokens(self) -> int:
        """Number of token ids in the turn."""
        return (len(self.prompt) + len(self.output)) // ID_BYTES


FindTurn = Callable[[str, bytes], Turn | None]
"""Finds the last turn of a session by the digest of the conversation. Returns None if no turn is found."""


class BridgedPrompt(NamedTuple):
    """A conversation, with the prompt that continues its last turn."""

    digest: bytes
    """The digest of the conversation before its next turn."""
    result: Literal["", "bridged", "unknown", "refused"]
    """Whether the prompt continues the last turn. Empty before the first answer, and `unknown` after an edit."""
    ids: list[int] | None = None
    """The prompt, if the result is `bridged`."""


class Bridge:
    """Builds the prompts of next turns. Raises a SettingsError if the settings do not fit the model."""

    def __init__(self, settings: GatewaySettings, encoder: PromptEncoder, vocabulary: Vocabulary) -> None:
        self.find: FindTurn = lambda _session, _digest: None
        self._name = settings.bridge_turns
        self._encoder = encoder
        self._vocabulary = vocabulary
        if not vocabulary.is_of_model or settings.chat_template != "auto":
            raise self._refused("empty unless gateway.tokenizer is a model's folder and gateway.chat_template is auto")
        try:
            import renderers  # noqa: PLC0415 - the extra bridge
            from pydantic import TypeAdapter  # noqa: PLC0415 - as above
        except ImportError as error:
            raise self._refused(f"empty unless the extra bridge is installed ({error})") from None
        self._library = renderers
        configs: TypeAdapter[Any] = TypeAdapter(renderers.RendererConfig)
        families = sorted(configs.json_schema()["discriminator"]["mapping"].keys() - _NOT_OF_A_FAMILY)
        if self._name not in families:
            raise self._refused(f"empty or one of {', '.join(families)}")
        # Keep all thoughts in prompts. Templates that drop earlier thoughts would split the session into branches.
        self._config = configs.validate_python({"name": self._name, "thinking_retention": "all"})
        self._variables = renderers.template_field_names(self._config)
        self._renderers: OrderedDict[bytes, Renderer | None] = OrderedDict()
        try:
            self._renderers[_key({})] = self._made({})
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise self._refused(f"the family of the model in gateway.tokenizer ({reason})") from None

    def prompt(
        self, body: Chat, tools: Sequence[Mapping[str, Any]], session: str, model: str, most: int
    ) -> BridgedPrompt:
        """Return the prompt that continues the session's last turn, if the client did not edit the history.

        The prompt has at most `most` tokens.
        """
        messages, variables = messages_of(body), variables_of(body, self._vocabulary.chat_template)
        digest = _digest([model, tools, variables])
        before, answered = b"", 0
        for number, message in enumerate(messages, 1):
            digest = digest_with(digest, message)
            if message["role"] == "assistant":
                before, answered = digest, number
        if not answered:
            return BridgedPrompt(digest, "")
        turn = self.find(session, before)
        if turn is None:
            return BridgedPrompt(digest, "unknown")
        renderer = self._renderer({name: value for name, value in variables.items() if name in self._variables})
        ids = renderer and self._continued(renderer, turn, messages[answered:], tools)
        if not ids or len(ids) > most or not self._agrees(ids[turn.tokens - 1 :], body, tools):
            return BridgedPrompt(digest, "refused")
        return BridgedPrompt(digest, "bridged", ids)

    def _continued(
        self, renderer: "Renderer", turn: Turn, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the ids of the turn and of new messages, or an empty list if the renderer cannot continue the turn."""
        prompt, output = array(IDS, turn.prompt).tolist(), array(IDS, turn.output).tolist()
        functions = [tool["function"] for tool in tools] or None
        try:
            rendered = renderer.bridge_to_next_turn(prompt, output, messages, tools=functions)
        except MemoryError:  # encoders of the slow lane have more memory
            raise
        except Exception:  # noqa: BLE001 - clients write the messages, and the library raises nothing narrower
            return []
        if rendered is None or rendered.token_ids[: turn.tokens] != prompt + output:
            return []
        # A renderer may omit a message whose role it does not know.
        shown = set(rendered.message_indices[turn.tokens :])
        return list(rendered.token_ids) if shown.issuperset(range(len(messages))) else []

    def _agrees(self, ids: list[int], body: Chat, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the chat template and the tokenizer give the same ids for the turn's end and new messages."""
        whole, _ = self._encoder.chat_text(body, tools)
        text = self._vocabulary.decode(ids)
        return whole.endswith(text) and self._vocabulary.encode_chat(text) == ids

    def _renderer(self, variables: Mapping[str, Any]) -> "Renderer | None":
        """Return the renderer for a template's variables, or None if the library refuses their values."""
        key = _key(variables)
        if key not in self._renderers:
            try:
                self._renderers[key] = self._made(variables)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - as in `_continued`
                self._renderers[key] = None
            if len(self._renderers) > _MOST_RENDERERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]

    def _made(self, variables: Mapping[str, Any]) -> "Renderer":
        tokenizer = _Tokenizer(self._vocabulary)
        return self._library.create_renderer(tokenizer, self._config, chat_template_kwargs=variables)

    def _refused(self, expected: str) -> SettingsError:
        return SettingsError("gateway.bridge_turns", expected, self._name)


class _Tokenizer:
    """The model's tokenizer, with the methods that renderers call."""

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._vocabulary.encode(text) if add_special_tokens else self._vocabulary.encode_chat(text)

    def decode(self, token_ids: Sequence[int], **_options: object) -> str:
        return self._vocabulary.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._vocabulary.token_id(tokens)
        return [self._vocabulary.token_id(token) for token in tokens]


def digest_with(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a conversation with one more message.

    A text and a single part with this text give the same digest. The ids of calls do not change the digest.
    """
    content, given = message.get("content") or "", message.get("tool_calls") or ()
    if isinstance(content, list) and len(content) == 1:
        content = content[0]["text"]
    calls = [[call["function"]["name"], _arguments(call["function"].get("arguments"))] for call in given]
    if calls and isinstance(content, str) and not content.strip():
        content = ""
    others = [message.get(name) for name in ("name", "tool_call_id", "reasoning", "reasoning_content")]
    return _digest([digest.hex(), message["role"], content, calls, others])


def _arguments(given: object) -> object:
    """Return the arguments of a call as normalized JSON, or unchanged if they are not JSON."""
    try:
        value = json.loads(given) if isinstance(given, str) else given or {}
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return given


def _digest(value: object) -> bytes:
    return hashlib.blake2b(_key(value), digest_size=_DIGEST_BYTES).digest()


def _key(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
