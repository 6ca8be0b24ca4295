"""Models' folders whose tokenizer.json is loaded as another tokenizer, or which have SentencePiece's own file alone."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.engines.vllm.real.hosts import Host
from tests.engines.vllm.real.runs import SHARED, arguments
from tests.engines.vllm.tiny_model import WORDS, make
from tokenbus.engines.vllm import VllmEngine, configuration
from tokenbus.engines.vllm.configuration import tokenizer_of
from tokenbus.model_files import ModelFilesError, ModelTokenizer
from tokenbus.tokenizer_probes import digest_of, encoder_of, first_difference, probed

NUMBERS = "1 5 5 12 12 a 5 b 12 "
"""Teaches tokens of digits with a space before, which the other tokenizer does not make."""


@pytest.fixture(scope="module")
def folder(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = host(partial(make, texts=[WORDS, NUMBERS] * 20), tmp_path_factory.mktemp("models") / "two-ways")
    path = model / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    path.write_text(json.dumps(described))
    return model


def test_worker_names_the_text_that_differs(folder: Path, host: Host) -> None:
    """It warns, and says so to the gateway, which refuses requests (tests/system/test_gateway_models.py)."""
    digest, probes, warned = host(described, folder)
    assert warned["text"] == "12345678"
    of_files = ModelTokenizer(folder)
    probes_of_files = probed(encoder_of(of_files))
    assert digest != digest_of(of_files, probes_of_files)
    assert first_difference(probes_of_files, probes) == "12345678"


def described(folder: Path) -> tuple[int, Sequence[int], Mapping[str, object]]:
    with mock.patch.object(configuration, "_log") as log:
        engine = VllmEngine(folder, arguments(SHARED))
    log.warning.assert_called_once()
    return engine.tokenizer_digest, engine.tokenizer_probes, log.warning.call_args.kwargs


def test_what_the_line_says_mends_it(folder: Path, host: Host, tmp_path: Path) -> None:
    host(mends, folder, tmp_path)


def mends(folder: Path, saved: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - only where vLLM is

    theirs = AutoTokenizer.from_pretrained(folder)
    differing = tokenizer_of(folder, theirs)
    theirs.save_pretrained(saved)
    mended = tokenizer_of(saved, None)
    assert mended == tokenizer_of(saved, AutoTokenizer.from_pretrained(saved))
    assert mended[1] == differing[1] != tokenizer_of(folder, None)[1]


TEXTS = ["hello world, the quick brown fox jumps over the lazy dog", "你好 🙂 é ü 12345  two spaces"] * 20


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_saved_tokenizer_is_the_workers(kind: str, host: Host, tmp_path: Path) -> None:
    host(compare, kind, tmp_path)


def compare(kind: str, folder: Path) -> None:
    import sentencepiece  # noqa: PLC0415 - only where vLLM is
    from transformers import AutoTokenizer  # noqa: PLC0415 - as above

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match="save_pretrained"):
        ModelTokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    ours = ModelTokenizer(folder)
    for text in ("hello the fox", "  two  spaces 🦊 é", "你好 \n\t x", "<s>hi</s> yo", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_chat(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
