"""Vocabulary: the text of each token id, and the JSON that is written for it."""

from collections.abc import Callable
from typing import TypeVar

import orjson

from tokenbus_services.plugins import TOKENIZERS, PluginError, Tokenizer, load_tokenizer, names
from tokenbus_services.settings import SettingsError

T = TypeVar("T")
_CONTINUATION = 0x80
"""The two highest bits of a UTF-8 continuation byte."""


class Numbers:
    """The tokenizer of engines without text: a token's text is its id, and a text's tokens are its bytes."""

    vocabulary_size = 0
    """None has a text of its own."""

    def encode(self, text: str) -> list[int]:
        """Return a text's bytes."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the id as text."""
        return _number(token_id)

    def least_tokens(self, size: int) -> int:
        """Return the fewest tokens of a text of `size` bytes: each byte is one."""
        return size


class Vocabulary:
    """Tables by token id, made once, from which answers are written. Unknown ids are shown as numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Make the tables of a tokenizer's whole vocabulary."""
        self._tokenizer = tokenizer
        self.least_tokens = tokenizer.least_tokens
        self.pieces = _Table(_number)
        """Bytes."""
        self.names = _Table(lambda token_id: _name(token_id, _number(token_id)))
        """The token's unique name, as a JSON string."""
        self.texts = _Table(lambda token_id: orjson.dumps(_number(token_id).decode()))
        """The token in an answer's list of tokens: its name, or the empty string for one without text."""
        self.keys = _Table(lambda token_id: _key(_name(token_id, _number(token_id))))
        """The name as the key of an object's next member, with the comma and the colon."""
        self.entries = _Table(lambda token_id: _entry(token_id, _number(token_id)))
        """The beginning of a token's object in chats, after the end of another, up to its logprob."""
        self.characters = _Table(lambda token_id: len(_number(token_id)))
        """How many characters begin in the token."""
        for token_id in range(tokenizer.vocabulary_size):
            piece = tokenizer.token_bytes(token_id)
            self.pieces[token_id] = piece
            self.names[token_id] = _name(token_id, piece)
            self.texts[token_id] = self.names[token_id] if piece else b'""'
            self.keys[token_id] = _key(self.names[token_id])
            self.entries[token_id] = _entry(token_id, piece)
            self.characters[token_id] = sum(byte & 0xC0 != _CONTINUATION for byte in piece)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return self._tokenizer.encode(text)


class _Table(dict[int, T]):
    """Values by token id; a missing one is made each time and not kept, so that the table does not grow."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        return self._make(token_id)


def vocabulary_of(tokenizer: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer by its name in the settings; a SettingsError says why there is none."""
    if tokenizer == "numbers":
        return Vocabulary(Numbers())
    installed = names(TOKENIZERS)
    if tokenizer not in installed:
        raise SettingsError("gateway.tokenizer", f"one of {', '.join((*installed, 'numbers'))}", tokenizer)
    try:
        return Vocabulary(load_tokenizer(tokenizer))
    except PluginError as error:
        raise SettingsError("gateway.tokenizer", f"a tokenizer that can be loaded ({error})", tokenizer) from None


def _name(token_id: int, piece: bytes) -> bytes:
    """Return a token's name: its text, its bytes where they are no UTF-8, its id where it has no text."""
    if not piece:
        return orjson.dumps(f"<|{token_id}|>")
    try:
        return orjson.dumps(piece.decode())
    except UnicodeDecodeError:
        return orjson.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in piece))


def _key(name: bytes) -> bytes:
    return b",%b:" % name


def _entry(token_id: int, piece: bytes) -> bytes:
    return b'},{"token":%b,"bytes":%b,"logprob":' % (_name(token_id, piece), orjson.dumps(list(piece)))


def _number(token_id: int) -> bytes:
    return b" %d" % token_id
