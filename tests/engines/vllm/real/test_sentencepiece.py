"""A model's folder with SentencePiece's own file alone, made usable as the refusal says."""

import json
from pathlib import Path

import pytest

from tests.engines.vllm.real.hosts import Host
from tokenbus.model_files import ModelFilesError, ModelTokenizer

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
