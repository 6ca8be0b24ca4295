"""The models that are made where none is given: with random weights, and nothing is downloaded.

The tiny one has two layers, so that the engine costs little and what is around it shows; its byte-level tokenizer of
2,048 tokens is trained on this repository's own prose. The other has the shape of Qwen2 0.5B, for a card: vLLM draws
its weights, and its tokens are words that do not exist.
"""

import json
import random
import string
from multiprocessing.connection import Connection
from pathlib import Path

_TEXT = Path(__file__).resolve().parents[2] / "tests" / "engines" / "ngram" / "training" / "text"
_VOCABULARY = 2048
_CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
_END = "<end>"
_WORDS = 151_936
_HALF_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "vocab_size": _WORDS,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LETTERS_OF_A_WORD = (2, 7)


def make_tiny(_connection: Connection, folder: Path) -> None:
    """Make it, as a task of a `Child`: what it needs is imported there alone."""
    from tests.engines.vllm.tiny_model import make  # noqa: PLC0415 - as the docstring says

    make(folder, vocabulary=_VOCABULARY, texts=[path.read_text() for path in sorted(_TEXT.glob("*.txt"))])
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def make_half_billion(_connection: Connection, folder: Path) -> None:
    """Make its description and its tokenizer, as a task of a `Child`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    drawn, space = random.Random(7), "\u0120"  # noqa: S311 - the same each time, and no secret
    tokens = dict.fromkeys([_END, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(tokens) < _WORDS:
        word = "".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(*_LETTERS_OF_A_WORD)))
        tokens[drawn.choice(["", space]) + word] = None
    # Without merges a prompt is its bytes; only what the model chooses has the words.
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_HALF_BILLION, indent=1))
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)  # as it is loaded of a qwen2 model


SHAPES = {
    # vLLM on a CPU cannot do seeded requests whose prompts are in chunks.
    "tiny": (
        make_tiny,
        ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "16384"],
    ),
    "0.5B": (
        make_half_billion,
        ["--load-format", "dummy", "--max-model-len", "512", "--max-num-batched-tokens", "8192"],
    ),
}
"""How each is made, and vLLM's options for it."""
