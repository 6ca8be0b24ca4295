"""Compares tokenizers by a digest of their tokens and by their encodings of fixed texts, the probes.

A gateway and an engine may load the same tokenizer files in different ways. Then the tokens are the same, but texts are
split differently. A worker therefore sends its encodings of the probes in the handshake, and an error can name a text
that is encoded differently.
"""

import hashlib
from collections.abc import Callable, Sequence

from tokenbus.plugins import Tokenizer

_WRITTEN = (
    "5 55 555 5555 12345678 3.14 1,000 0x1F 2026-11-27 50% $5 x5 5x"
    " word Word WORD camelCase snake_case don't I'LL it\u2019s e.g. a-b a_b a.b"
    " ! ?! ... (x) [1] {y} <z> \"q\" 'q' # @me a/b \\n &amp; http://a.bc/d?e=1"
    " \u00e9 e\u0301 na\u00efve stra\u00dfe \u0130 \u01c5 \ufb01 \u00bd \u2163 \uff15 \u0665"
    " \u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac \u05e9\u05dc\u05d5\u05dd"
    " \u0645\u0631\u062d\u0628\u0627"
    " \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    " \u4f60\u597d \u3053\u3093\u306b\u3061\u306f"
    " \uc548\ub155 \u1112\u1161\u11ab \u1e69 s\u0323\u0307 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    " \u200b \u00a0 \u3000 \ufeff \ufffd \ue000 \x00 \x7f \u2028 \u202e \u0085"
)
_NAMES = "<s> </s> <pad> <unk> <|endoftext|> <|eot_id|> [INST]a[/INST] <|im_start|>user<|im_end|>"
_WORDS = tuple(_WRITTEN.split(" "))
_SPACES = (*(" " * count for count in (1, 2, 3, 8)), *("\n" * count for count in (1, 2, 3)), "\t", "\t\t")
_SPACES += (" \n", "\n ", "\r\n", "\r", " \t\n", "\x0b", "\x0c")
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "  Two spaces before,  between  and behind.  ",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # comment\n",
    *_NAMES.split(" "),
    *("a" * 40, "ab " * 20, "1" * 30, "!" * 20, "\n" * 10, " " * 30 + "x"),
)
PROBES: tuple[str, ...] = (
    *_WORDS,
    *(f" {word}" for word in _WORDS),
    *(f"a {word} b" for word in _WORDS),
    *_SPACES,
    *(f"a{space}b" for space in _SPACES),
    *(f"{space}5{space}" for space in _SPACES),
    *_SENTENCES,
)
"""The probes, which must never change, because the digest covers them."""

Encode = Callable[[str, bool], Sequence[int]]
"""Encodes a text. The second argument says whether to add special tokens."""


def probed(encode: Encode) -> tuple[int, ...]:
    """Return a 32-bit hash of each probe's token ids, with and without special tokens."""
    return tuple(_hash(encode(text, True), encode(text, False)) for text in PROBES)  # noqa: FBT003 - positional


def encoder_of(tokenizer: Tokenizer) -> Encode:
    of_chats = getattr(tokenizer, "encode_chat", tokenizer.encode)
    return lambda text, adds_special: tokenizer.encode(text) if adds_special else of_chats(text)


def digest_of(tokenizer: Tokenizer, probes: Sequence[int]) -> int:
    """Return a 64-bit digest of the tokens and the probes, or 0 for a tokenizer without tokens."""
    size = tokenizer.vocabulary_size
    digest = hashlib.blake2b(digest_size=8)
    for piece in map(tokenizer.token_bytes, range(size)):
        digest.update(len(piece).to_bytes(4, "little") + piece)
    for probe in probes:
        digest.update(probe.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little") if size else 0


def first_difference(probes: Sequence[int], others: Sequence[int]) -> str | None:
    """Return the first probe that two tokenizers encode differently, or None if all encodings are equal."""
    return next((text for text, one, other in zip(PROBES, probes, others, strict=False) if one != other), None)


def _hash(*ids: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr([list(map(int, each)) for each in ids]).encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")
