"""Model folders with small tokenizers, each of a kind that real models have, trained on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END, TOOL = "<|end|>", "<tool>"
"""A special token, and one that is added but not special."""
_TEXTS = ["hello world, the quick brown fox jumps over the lazy dog", "你好 🙂 é ü — 12345\n\n\tindent"] * 20
_UNKNOWN = "<unk>"
_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level() -> Tokenizer:
    """Return a byte-level BPE, as Qwen and Llama 3 have one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=_ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _with_added(tokenizer)


def with_byte_fallback() -> Tokenizer:
    """Return SentencePiece's BPE with byte fallback, as Llama 2 has it: it begins each text with a token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(_TEXTS[:1], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    tokens = [_UNKNOWN, "<s>", *bytes_, *sorted(model["vocab"], key=model["vocab"].get)]
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip
    ])  # fmt: skip
    tokenizer.add_special_tokens([_UNKNOWN, "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[_UNKNOWN], unk_token=_UNKNOWN, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _with_added(tokenizer)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({_UNKNOWN: 0, "a": 1, "##b": 2}, unk_token=_UNKNOWN))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(TOOL, special=False, normalized=False)])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, template: object = TEMPLATE) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": {"content": END}, "bos_token": None, "model_max_length": 10**30}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
