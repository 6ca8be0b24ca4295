"""Vocabulary: what each token id is in text, and in the JSON that stands for it."""

from collections.abc import Callable
from typing import TypeVar

import orjson

from tokenbus_services.plugins import TOKENIZERS, PluginError, Tokenizer, load_tokenizer, names
from tokenbus_services.settings import SettingsError

T = TypeVar("T")
_CONTINUES = 0x80
"""What the two highest bits of a byte are that goes on with a character of UTF-8."""


class Numbers:
    """The tokenizer of engines whose tokens are no text: a token's text is its id, a text's tokens are its bytes."""

    vocabulary_size = 0
    """None has a text of its own."""

    def encode(self, text: str) -> list[int]:
        """Return a text's bytes."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the id, as for any token that has no text."""
        return _number(token_id)

    def least_tokens(self, size: int) -> int:
        """Return the fewest tokens of a text of `size` bytes: each byte is one."""
        return size


class Vocabulary:
    """Tables by token id, made once: what is written of a token is looked up. Unknown ids are shown as numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Make the tables of a tokenizer's whole vocabulary."""
        self._tokenizer = tokenizer
        self.least_tokens = tokenizer.least_tokens
        self.pieces = _Table(_number)
        """Bytes."""
        self.names = _Table(lambda token_id: _name(token_id, _number(token_id)))
        """The token as a JSON text, which no other token has."""
        self.texts = _Table(lambda token_id: orjson.dumps(_number(token_id).decode()))
        """The same for the list of an answer's tokens: one without text brings none, as in the answer's text."""
        self.keys = _Table(lambda token_id: _key(_name(token_id, _number(token_id))))
        """The same as the key of an object's next member, after a comma, with its colon."""
        self.entries = _Table(lambda token_id: _entry(token_id, _number(token_id)))
        """The next object that stands for a token in chats, after the end of another, up to its logprob."""
        self.characters = _Table(lambda token_id: len(_number(token_id)))
        """How many characters begin in the token."""
        for token_id in range(tokenizer.vocabulary_size):
            piece = tokenizer.token_bytes(token_id)
            self.pieces[token_id] = piece
            self.names[token_id] = _name(token_id, piece)
            self.texts[token_id] = self.names[token_id] if piece else b'""'
            self.keys[token_id] = _key(self.names[token_id])
            self.entries[token_id] = _entry(token_id, piece)
            self.characters[token_id] = sum(byte & 0xC0 != _CONTINUES for byte in piece)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return self._tokenizer.encode(text)


class _Table(dict[int, T]):
    """By token id; what is not in it is made anew each time, so that it does not grow."""

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
    """Return what a token is called: its text; its bytes where they are no text; its id where it has none."""
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
