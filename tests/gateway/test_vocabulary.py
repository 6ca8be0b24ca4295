"""Vocabularies: which tokenizer a setting names, and why there is none."""

import sys
from pathlib import Path

import pytest

from tests.support.model_folder import END, byte_level, word_piece, write_model
from tokenbus.gateway.vocabulary import vocabulary_of
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
    for name in [name for name in sys.modules if name.startswith("tokenbus.model_files")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingsError, match="needs the extra models"):
        vocabulary_of(str(write_model(tmp_path / "model", byte_level())))
