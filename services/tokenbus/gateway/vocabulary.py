"""Vocabulary: the text of each token id, and its JSON."""

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
"""The maximum number of values in a table: a whole large vocabulary would take hundreds of MB in each process."""
_CONTINUATION = 0x80
"""The two highest bits of a UTF-8 continuation byte."""


class Numbers:
    """The tokenizer of engines without text: a token's text is its id, and a text's tokens are its bytes."""

    vocabulary_size = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return _number(token_id)


class Tables(NamedTuple):
    """The JSON of each token id in an answer."""

    texts: Mapping[int, bytes]
    keys: Mapping[int, bytes]
    entries: Mapping[int, bytes]


class Vocabulary:
    """Tables, by token id, from which answers are written.

    Unknown ids of a model have no text; for other tokenizers their text is the number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of_model = cast("ModelTokenizer", tokenizer) if hasattr(tokenizer, "chat_template") else None
        self.probes = probed(encoder_of(tokenizer))
        self.digest = digest_of(tokenizer, self.probes)
        """Digest that must equal a worker's tokenizer digest; 0: equals any."""
        self.size = size = tokenizer.vocabulary_size
        unknown = _number if self._of_model is None else lambda _: b""
        self.pieces = _Table(
            lambda token_id: tokenizer.token_bytes(token_id) if token_id < size else unknown(token_id), size
        )
        """The token's bytes; none for special tokens."""
        self.special_pieces = _Table(lambda token_id: self.pieces[token_id] or self.decode([token_id]).encode(), size)
        """The token's bytes, or a special token's name."""
        end, end_name = getattr(tokenizer, "end_token", None), END_NAME if self._of_model is None else ""
        self.names = _Table(
            lambda token_id: _name(
                token_id, self.pieces[token_id], end_name if token_id == end else self._special(token_id)
            ),
            size,
        )
        """The token's unique name, as a JSON string."""
        self.texts = _Table(
            lambda token_id: self.names[token_id] if self.pieces[token_id] or self._special(token_id) else b'""', size
        )
        """The token in an answer's list of tokens: its name, or the empty string if it has neither text nor name."""
        self.keys = _Table(lambda token_id: b",%b:" % self.names[token_id], size)
        """The name as the key of an object's next member, with a comma before it and a colon after it."""
        self.entries = _Table(lambda token_id: _entry(self.names[token_id], self.pieces[token_id]), size)
        """The end of a chat's object for one token, and the beginning of the next object, up to its logprob."""
        self.numbers = _Table(lambda token_id: b"%d" % token_id, 0)
        self.tables = Tables(self.texts, self.keys, self.entries)
        self.id_tables = Tables(
            _Table(_id_name, 0),
            _Table(lambda token_id: b",%b:" % _id_name(token_id), 0),
            _Table(lambda token_id: _entry(_id_name(token_id), self.pieces[token_id]), 0),
        )
        """Tables that name each token by its id, as vLLM writes it."""
        self.key_fragments = Fragments(
            size, lambda token_id: (self.keys.made(token_id), self.texts[token_id] == b'""'), Form.LISTS
        )
        self.entry_fragments = Fragments(size, lambda token_id: (self.entries.made(token_id), False), Form.CONTENT)
        self.text_fragments = Fragments(size, lambda token_id: _text(self.pieces[token_id]), Form.NONE)
        self.text_characters = np.zeros(size, np.int32)
        """Number of characters that begin in each token with a text fragment."""
        self.characters = _Table(lambda token_id: _characters(self.pieces[token_id]), size)
        self.special_characters = _Table(lambda token_id: _characters(self.special_pieces[token_id]), size)
        """The same if special tokens are shown by their names."""

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
        """The tokenizer_config.json of the model's folder, with the chat template; empty for other tokenizers."""
        return {} if self._of_model is None else self._of_model.config

    @property
    def chat_template(self) -> "ChatTemplate":
        template = None if self._of_model is None else self._of_model.chat_template
        if template is None:
            message = "the model has no chat template: use /v1/completions, or set gateway.chat_template"
            raise ApiError(400, f"messages: {message}", param="messages", code="no_chat_template")
        return template

    def encode_chat(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat, without the special tokens that `encode` adds."""
        return self.encode(text) if self._of_model is None else self._of_model.encode_chat(text)

    def spans(self, text: str, *, adds_special: bool) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return a text's tokens and their character ranges, or None if the tokenizer is not a model's."""
        return None if self._of_model is None else self._of_model.spans(text, adds_special=adds_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special ones if the tokenizer has names."""
        if self._of_model is not None:
            return self._of_model.decode(token_ids)
        return b"".join(map(self.pieces.__getitem__, token_ids)).decode(errors="replace")

    def token_id(self, name: str) -> int | None:
        """Return the id of a token by its name in the model's vocabulary."""
        return None if self._of_model is None else self._of_model.token_id(name)

    def token_name(self, token_id: int) -> str | None:
        """Return the token's name in the model's vocabulary; for other tokenizers, its text."""
        return self.decode([token_id]) if self._of_model is None else self._of_model.token_name(token_id)


class _Table(dict[int, T]):
    """Values by token id, made on first use. The values of the vocabulary's ids are kept until there are too many."""

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
    """Return the vocabulary of the setting `gateway.tokenizer`; raises a SettingsError."""
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
    """Return a token's name: its text, its bytes if they are not UTF-8, or `special` or its id if it has no text."""
    try:
        name = piece.decode() or special or f"<|{token_id}|>"
    except UnicodeDecodeError:
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return b'"%b"' % orjson.dumps(name)[1:-1]  # a copy: a result of orjson takes at least 4 KiB


def _id_name(token_id: int) -> bytes:
    return b'"token_id:%d"' % token_id


def _text(piece: bytes) -> tuple[bytes, bool]:
    """Return the token's part of a text as JSON, and whether it depends on the tokens around it."""
    text = piece.decode(errors="replace")
    return orjson.dumps(text)[1:-1], text.endswith(REPLACEMENT) or text.encode() != piece


def _entry(name: bytes, piece: bytes) -> bytes:
    return b'},{"token":%b,"bytes":%b,"logprob":' % (name, orjson.dumps(list(piece)))


def _characters(piece: bytes) -> int:
    return sum(byte & 0xC0 != _CONTINUATION for byte in piece)


def _number(token_id: int) -> bytes:
    return b" %d" % token_id
