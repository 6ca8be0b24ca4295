"""ModelTokenizer: the tokenizers of real models, token by token."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.model_folder import END, TOOL, byte_level, metaspace, with_byte_fallback, word_piece, write_model
from tokenbus.model_files import ModelFilesError, ModelTokenizer

Make = Callable[[], Tokenizer]
EVERY_TEXT = [byte_level, with_byte_fallback]
"""Those that can encode every text."""


@pytest.fixture(params=EVERY_TEXT, ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Make = request.param
    return write_model(tmp_path / "model", make())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=40))
def test_bytes_of_the_tokens_are_the_text(folder: Path, text: str) -> None:
    tokenizer = loaded(folder)
    ids = tokenizer.encode(f"a{text}")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == f"a{text}"


_LOADED: dict[Path, ModelTokenizer] = {}


def loaded(folder: Path) -> ModelTokenizer:
    if folder not in _LOADED:
        _LOADED.clear()
        _LOADED[folder] = ModelTokenizer(folder)
    return _LOADED[folder]


@pytest.mark.parametrize("make", [*EVERY_TEXT, metaspace])
def test_tokens_are_decoded_as_by_the_library(make: Make, tmp_path: Path) -> None:
    library = make()
    tokenizer = ModelTokenizer(write_model(tmp_path / "model", library))
    text = "hello the fox, hello"
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == library.decode(ids).lstrip()
    assert tokenizer.vocabulary_size == max(library.get_vocab().values()) + 1


def test_special_tokens_have_no_text(folder: Path) -> None:
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode(f"a{END}{TOOL}")
    pieces = [tokenizer.token_bytes(each) for each in ids]
    assert pieces[-2:] == [b"", TOOL.encode()]


def test_chat_is_encoded_without_what_texts_begin_with(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(write_model(tmp_path / "model", with_byte_fallback()))
    plain, chat = tokenizer.encode("hello"), tokenizer.encode_chat("hello")
    assert plain == [1, *chat]


def test_folder_without_a_template(tmp_path: Path) -> None:
    assert ModelTokenizer(write_model(tmp_path / "model", byte_level(), None)).chat_template is None
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    assert ModelTokenizer(tmp_path / "model").chat_template is None


def test_tokenizer_whose_tokens_have_no_bytes_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: decoder: .*, got WordPiece$"):
        ModelTokenizer(write_model(tmp_path / "model", word_piece()))


def test_decoder_that_gives_other_texts_than_expected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", with_byte_fallback())
    described = json.loads((folder / "tokenizer.json").read_text())
    described["decoder"]["decoders"][0]["content"] = "_"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelFilesError, match=r"token \d+: its text is '.*', but it is decoded to '.*_.*'$"):
        ModelTokenizer(folder)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "no such file"),
        ("{", "Expecting property name"),
        ("[]", "a JSON object, got list"),
        ("{}", "Model missing"),
    ],
)
def test_tokenizer_that_cannot_be_read(content: str | None, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFilesError, match=line) as raised:
        ModelTokenizer(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/tokenizer.json: ")
    assert "\n" not in str(raised.value)


def test_folder_with_sentencepieces_file_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    line = "no such file; transformers can make it from tokenizer.model: AutoTokenizer.from_pretrained"
    with pytest.raises(ModelFilesError, match=line) as raised:
        ModelTokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"nowhere: no such folder$"):
        ModelTokenizer(tmp_path / "nowhere")
