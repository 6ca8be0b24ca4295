"""ModelTokenizer: the tokenizer in a model's folder, with the bytes of each token."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tokenbus.model_files.chat_template import ChatTemplate, ModelFilesError, templates_in

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_SPACE_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_DECODED_AT_ONCE = 8192
_ALPHABET = sorted(map(ord, ByteLevel.alphabet()))
_OTHERS = sorted({*range(256)}.difference(_ALPHABET))
_BYTES_OF_CHARACTERS = dict.fromkeys(_OTHERS, sys.maxunicode) | dict(
    zip(_ALPHABET[-len(_OTHERS) :], _OTHERS, strict=True)
)
"""The alphabet of byte-level BPE. Printable bytes stand for themselves. Characters above U+00FF encode other bytes."""


class ModelTokenizer:
    """The tokenizer in tokenizer.json, if each token of the vocabulary stands for fixed bytes.

    Byte-level BPE (GPT, Llama 3, Qwen) and SentencePiece (Llama 2, Gemma) have such vocabularies. A text is the
    concatenation of its tokens' bytes, so tokens can be shown when they arrive. Special tokens have no text.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer and the chat template of a folder. Raises a ModelFilesError with one line."""
        self.folder = folder
        if not folder.is_dir():
            raise ModelFilesError(f"{folder}: no such folder")
        path = folder / "tokenizer.json"
        if not path.exists() and (folder / "tokenizer.model").exists():
            saving = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise ModelFilesError(f"{path}: no such file; transformers can make it from tokenizer.model: {saving}")
        described = _json_object(path)
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ModelFilesError(f"{path}: {' '.join(str(error).split())}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = folder / "tokenizer_config.json"
        config = _json_object(config_path) if config_path.exists() else {}
        try:
            self._pieces = _pieces(self._tokenizer, described)
        except ModelFilesError as error:
            raise ModelFilesError(f"{path}: {error}") from None
        self.vocabulary_size = len(self._pieces)
        """Number of token ids, including unused ids."""
        templates, tokens = templates_in(folder, config), _special_tokens(config)
        self.chat_template = ChatTemplate(templates, tokens) if templates else None
        shown = {"tokenizer_class": "PreTrainedTokenizerFast", **config, **tokens}
        self.config = shown | {"chat_template": templates.get("default")}
        """The contents of tokenizer_config.json, with the chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model expects around every text."""
        return self._ids(text, adds_special=True)

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat, which already contains special tokens."""
        return self._ids(text, adds_special=False)

    def _ids(self, text: str, *, adds_special: bool) -> list[int]:
        # Encoding without offsets takes half the time and two thirds of the memory.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        return list(encoding.ids)

    def spans(self, text: str, *, adds_special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text and their character ranges, which are (0, 0) for added special tokens."""
        encoding = self._tokenizer.encode(text, add_special_tokens=adds_special)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special tokens. Unknown ids have no text."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_name(self, token_id: int) -> str | None:
        """Return the name of a token in the vocabulary, such as `Ġcat`, or None for an unknown id."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def token_id(self, name: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may split a character. Special tokens have no bytes."""
        return self._pieces[token_id]


def _pieces(tokenizer: FastTokenizer, described: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each token by id. Raises a ModelFilesError if the library decodes a token differently."""
    names = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    if not names:
        raise ModelFilesError("it has no tokens")
    to_bytes = _decoding(described.get("decoder"))
    added = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * (max(names) + 1)
    for token_id in names.keys() - added.keys():
        pieces[token_id] = to_bytes(names[token_id])
    before = next((each for each, piece in enumerate(pieces) if piece.isalpha() and piece.isascii()), None)
    if before is None:
        raise ModelFilesError("its vocabulary has no token of letters")
    shown = [token_id for token_id in sorted(names) if token_id not in added or not added[token_id].special]
    for token_id, text in _decoded(tokenizer, before, shown):
        piece, expected = pieces[token_id], pieces[token_id].decode(errors="ignore")
        if token_id in added:  # an added token's text may differ from its name
            pieces[token_id] = text.encode()
        elif text != expected and piece == expected.encode():  # the token splits no character
            raise ModelFilesError(f"token {token_id}: its text is {expected!r}, but it is decoded to {text!r}")
    return pieces


def _decoded(tokenizer: FastTokenizer, before: int, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each token id with the text that the library decodes for it after the token `before`."""
    start = len(tokenizer.decode([before]))
    for begin in range(0, len(token_ids), _DECODED_AT_ONCE):
        some = token_ids[begin : begin + _DECODED_AT_ONCE]
        for token_id, text in zip(some, tokenizer.decode_batch([[before, each] for each in some]), strict=True):
            yield token_id, text[start:]


def _decoding(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function that converts a token's name to bytes. Raises a ModelFilesError for unknown decoders."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds and _SPACE_DECODERS.issuperset(kinds):
        return _with_byte_fallback if "ByteFallback" in kinds else _with_spaces
    expected = "ByteLevel, or SentencePiece's"
    raise ModelFilesError(
        f"decoder: {expected}, in which each token has certain bytes, got {' '.join(kinds) or 'none'}"
    )


def _byte_level(name: str) -> bytes:
    try:
        return name.translate(_BYTES_OF_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:  # not in the alphabet, for example an added token
        return name.encode()


def _with_spaces(name: str) -> bytes:
    return name.replace(_SPACE, " ").encode()


def _with_byte_fallback(name: str) -> bytes:
    found = _BYTE.fullmatch(name)
    return bytes.fromhex(found[1]) if found else _with_spaces(name)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by the name in templates, such as `eos_token`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFilesError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: a JSON object, got {type(value).__name__}")
    return value
