"""Vocabularies: which tokenizer a setting names, and why there is none."""

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.support.model_folder import END, byte_level, word_piece, write_model
from tokenbus.gateway.vocabulary import Vocabulary, vocabulary_of
from tokenbus.settings import SettingsError


def test_names_of_a_models_tokens(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(str(write_model(tmp_path / "model", byte_level())))
    (special,) = vocabulary.encode(END)
    unknown = 1_000_000
    assert [vocabulary.pieces[each] for each in (special, unknown)] == [b"", b""]
    assert [vocabulary.texts[each] for each in (special, unknown)] == [b'"<|end|>"', b'""']
    assert [vocabulary.names[each] for each in (special, unknown)] == [b'"<|end|>"', b'"<|1000000|>"']
    assert vocabulary.keys[special] == b',"<|end|>":'


def test_numbers() -> None:
    """Without texts, tokens are decoded as their ids, also where an engine has a vocabulary but no such id."""
    assert vocabulary_of("numbers").decode([7, 12]) == " 7 12"
    assert vocabulary_of("ngram").pieces[1_000_000] == b" 1000000"


@pytest.mark.parametrize("name", ["qwen", "./nowhere"])
def test_name_of_no_tokenizer(name: str) -> None:
    with pytest.raises(SettingsError, match=r"gateway\.tokenizer") as raised:
        vocabulary_of(name)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_folder_whose_tokenizer_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="got WordPiece"):
        vocabulary_of(str(write_model(tmp_path / "model", word_piece())))


def test_extra_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for once the folder is there: without one it would not help."""
    for name in [name for name in sys.modules if name.startswith("tokenbus.model_files")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingsError, match="needs the extra models"):
        vocabulary_of(str(write_model(tmp_path / "model", byte_level())))
    with pytest.raises(SettingsError, match="nowhere: no such folder"):
        vocabulary_of(str(tmp_path / "nowhere"))


class Large:
    """A tokenizer with as many tokens as Qwen's; some are parts of characters."""

    vocabulary_size = 151_936

    def encode(self, text: str) -> list[int]:
        """Return nothing: no test encodes a text."""
        del text
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Return a text that no other token has."""
        return b" tok%x" % token_id if token_id % 50 else b"\xe4%x" % token_id


def test_names_of_a_large_vocabulary_take_little_memory() -> None:
    """What is kept of a token is its own bytes alone, and tables keep only some thousand tokens."""
    vocabulary, count = Vocabulary(Large()), 12_000
    tracemalloc.start()
    try:
        for token_id in range(count):
            assert vocabulary.texts[token_id] in vocabulary.keys[token_id]
            assert vocabulary.names[token_id] in vocabulary.entries[token_id]
        vocabulary.entry_fragments.add(np.arange(count, dtype=np.uint32))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * 2**20
    assert len(vocabulary.names) < count
    assert vocabulary.names[5] == b'" tok5"'
