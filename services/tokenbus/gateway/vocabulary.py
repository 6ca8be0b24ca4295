"""Vocabulary: the text of each token id, and the text's JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import orjson

from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.native import Form, Fragments
from tokenbus.gateway.stop_strings import REPLACEMENT
from tokenbus.plugins import END_NAME, TOKENIZERS, PluginError, Tokenizer, load_tokenizer, names
from tokenbus.settings import SettingsError
from tokenbus.tokenizer_probes import digest_of, encoder_of, probed

if TYPE_CHECKING:  # the extra models may be missing
    from tokenbus.model_files import ChatTemplate, ModelTokenizer

T = TypeVar("T")
_MOST_KEPT = 8192
"""Maximum number of values in a table. A whole large vocabulary would take hundreds of MB in each process."""
_CONTINUATION = 0x80
"""A UTF-8 continuation byte has these two highest bits."""


class Numbers:
    """The tokenizer for engines that need no text. A token's text is its id, and a text's tokens are its bytes."""

    vocabulary_size = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return _number(token_id)


class Tables(NamedTuple):
    """Tables with the JSON of each token for the different parts of an answer, by token id."""

    texts: Mapping[int, bytes]
    keys: Mapping[int, bytes]
    entries: Mapping[int, bytes]


class Vocabulary:
    """Tables of the text and the JSON of tokens, by token id.

    With a model's tokenizer, unknown ids have no text. With other tokenizers, the text of an unknown id is the number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of_model = cast("ModelTokenizer", tokenizer) if hasattr(tokenizer, "chat_template") else None
        self.probes = probed(encoder_of(tokenizer))
        self.digest = digest_of(tokenizer, self.probes)
        """Digest that workers compare with the digest of their tokenizer. Zero matches every digest."""
        self.size = size = tokenizer.vocabulary_size
        unknown = _number if self._of_model is None else lambda _: b""
        self.pieces = _Table(
            lambda token_id: tokenizer.token_bytes(token_id) if token_id < size else unknown(token_id), size
        )
        """The bytes of each token. Special tokens have no bytes."""
        self.special_pieces = _Table(lambda token_id: self.pieces[token_id] or self.decode([token_id]).encode(), size)
        """The bytes of each token. Special tokens have the bytes of their names."""
        end, end_name = getattr(tokenizer, "end_token", None), END_NAME if self._of_model is None else ""
        self.names = _Table(
            lambda token_id: _name(
                token_id, self.pieces[token_id], end_name if token_id == end else self._special(token_id)
            ),
            size,
        )
        """The unique name of each token, as a JSON string."""
        self.texts = _Table(
            lambda token_id: self.names[token_id] if self.pieces[token_id] or self._special(token_id) else b'""', size
        )
        """JSON of each token in the list of tokens: the name, or an empty string for a token without text and name."""
        self.keys = _Table(lambda token_id: b",%b:" % self.names[token_id], size)
        """The name of each token as a key within an object, between a comma and a colon."""
        self.entries = _Table(lambda token_id: _entry(self.names[token_id], self.pieces[token_id]), size)
        """JSON before each token's logprob in a chat: the end of the previous object, and the beginning of the next."""
        self.numbers = _Table(lambda token_id: b"%d" % token_id, 0)
        self.tables = Tables(self.texts, self.keys, self.entries)
        self.id_tables = Tables(
            _Table(_id_name, 0),
            _Table(lambda token_id: b",%b:" % _id_name(token_id), 0),
            _Table(lambda token_id: _entry(_id_name(token_id), self.pieces[token_id]), 0),
        )
        """Tables in which the name of a token is its id in vLLM's form."""
        self.key_fragments = Fragments(
            size, lambda token_id: (self.keys.made(token_id), self.texts[token_id] == b'""'), Form.LISTS
        )
        self.entry_fragments = Fragments(size, lambda token_id: (self.entries.made(token_id), False), Form.CONTENT)
        self.text_fragments = Fragments(size, lambda token_id: _text(self.pieces[token_id]), Form.NONE)
        self.text_characters = np.zeros(size, np.int32)
        """Number of characters that begin in each token. Only tokens with a text fragment have a number."""
        self.characters = _Table(lambda token_id: _characters(self.pieces[token_id]), size)
        self.special_characters = _Table(lambda token_id: _characters(self.special_pieces[token_id]), size)
        """Number of characters that begin in each token if special tokens are shown by name."""

    def learn(self, ids: npt.NDArray[np.uint32]) -> None:
        for token_id in self.text_fragments.add(ids):
            self.text_characters[token_id] = self.characters.made(token_id)

    def _special(self, token_id: int) -> str:
        if self._of_model is None or self.pieces[token_id]:
            return ""
        return self._of_model.token_name(token_id) or ""

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    @property
    def is_of_model(self) -> bool:
        return self._of_model is not None

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's tokenizer_config.json with the chat template, or an empty mapping for other tokenizers."""
        return {} if self._of_model is None else self._of_model.config

    @property
    def chat_template(self) -> "ChatTemplate":
        template = None if self._of_model is None else self._of_model.chat_template
        if template is None:
            message = "the model has no chat template: use /v1/completions, or set gateway.chat_template"
            raise ApiError(400, f"messages: {message}", param="messages", code="no_chat_template")
        return template

    def encode_chat(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat without adding special tokens."""
        return self.encode(text) if self._of_model is None else self._of_model.encode_chat(text)

    def spans(self, text: str, *, adds_special: bool) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return the tokens of a text and their character ranges, or None if the tokenizer belongs to no model."""
        return None if self._of_model is None else self._of_model.spans(text, adds_special=adds_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens by name if the tokenizer has names."""
        if self._of_model is not None:
            return self._of_model.decode(token_ids)
        return b"".join(map(self.pieces.__getitem__, token_ids)).decode(errors="replace")

    def token_id(self, name: str) -> int | None:
        """Return the id of a token by its name in the model's vocabulary."""
        return None if self._of_model is None else self._of_model.token_id(name)

    def token_name(self, token_id: int) -> str | None:
        """Return a token's name in the vocabulary of a model; for a tokenizer without a model, the token's text."""
        return self.decode([token_id]) if self._of_model is None else self._of_model.token_name(token_id)


class _Table(dict[int, T]):
    """Values by token id, computed on first use and kept. Unknown ids and values beyond the maximum are not kept."""

    def __init__(self, make: Callable[[int], T], size: int) -> None:
        super().__init__()
        self.made = make
        self._size = size

    def __missing__(self, token_id: int) -> T:
        value = self.made(token_id)
        if token_id < self._size:
            if len(self) >= _MOST_KEPT:
                self.clear()
            self[token_id] = value
        return value


def is_folder(tokenizer: str) -> bool:
    return "/" in tokenizer


def vocabulary_of(tokenizer: str) -> Vocabulary:
    """Return the vocabulary for the setting `gateway.tokenizer`. Raises a SettingsError."""
    if tokenizer == "numbers":
        return Vocabulary(Numbers())
    installed = names(TOKENIZERS)
    if not is_folder(tokenizer) and tokenizer not in installed:
        expected = f"one of {', '.join((*installed, 'numbers'))}, or the path of a model's folder, with a slash"
        raise SettingsError("gateway.tokenizer", expected, tokenizer)
    try:
        return Vocabulary(load_tokenizer(tokenizer))
    except PluginError as error:
        raise SettingsError("gateway.tokenizer", f"a tokenizer that can be loaded ({error})", tokenizer) from None


def _name(token_id: int, piece: bytes, special: str) -> bytes:
    """Return a token's name as JSON: the text or the bytes of `piece`, or if `piece` is empty, `special` or the id."""
    try:
        name = piece.decode() or special or f"<|{token_id}|>"
    except UnicodeDecodeError:
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return b'"%b"' % orjson.dumps(name)[1:-1]  # copy, because results of orjson take at least 4 KiB


def _id_name(token_id: int) -> bytes:
    return b'"token_id:%d"' % token_id


def _text(piece: bytes) -> tuple[bytes, bool]:
    """Return a token's text as JSON, and whether the text depends on the tokens around it."""
    text = piece.decode(errors="replace")
    return orjson.dumps(text)[1:-1], text.endswith(REPLACEMENT) or text.encode() != piece


def _entry(name: bytes, piece: bytes) -> bytes:
    return b'},{"token":%b,"bytes":%b,"logprob":' % (name, orjson.dumps(list(piece)))


def _characters(piece: bytes) -> int:
    return sum(byte & 0xC0 != _CONTINUATION for byte in piece)


def _number(token_id: int) -> bytes:
    return b" %d" % token_id
