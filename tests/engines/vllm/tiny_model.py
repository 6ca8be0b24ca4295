"""A tiny model with random weights and a byte-level tokenizer, made on the spot: nothing is downloaded."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

WORDS = "the cat sat on a mat and saw one more token pass by the bus stop while words went round and round "
END = "<end>"
CONTEXT = 256
VOCABULARY = 512
LAYERS = 1
"""Most of a step's time on a CPU is the layers'."""
TEMPLATE = """\
{%- if tools %}tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or () %} {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}{{ eos_token }}
{% endfor %}
{%- for document in documents or () %}{{ document.title }}: {{ document.text }}
{% endfor %}
{%- if mood is defined %}{{ mood }} {% endif %}
{%- if reasoning_effort %}{{ reasoning_effort }} {{ enable_thinking }} {% endif %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
"""A chat template that shows all that it may be given."""


def make(
    folder: Path,
    *,
    vocabulary: int = VOCABULARY,
    texts: Iterable[str] = (WORDS,) * 20,
    context: int = CONTEXT,
    template: str | None = None,
) -> Path:
    """Write the model into a folder, with a chat template if there is one; its tokenizer learns from the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - only where vLLM is
    from transformers import (  # noqa: PLC0415 - as above
        AutoTokenizer,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        # Weights as they are drawn would give every token nearly the same probability.
        model.lm_head.weight.mul_(40)
        # And with this much of attention the text soon repeats itself, as what is drafted from it must.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
        # Parts of characters, and ids that the tokenizer does not have, would leave hardly any text.
        for token in range(vocabulary):
            if not trained.decode([token]).isascii() or not trained.decode([token]):
                model.lm_head.weight[token] = 0
    model.to(torch.bfloat16).save_pretrained(folder)
    # A qwen2 model's tokenizer is loaded with another pre-tokenizer; saved, it is what the folder has.
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the model, with random weights that change its answers, and return the folder."""
    import torch
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    rank, sizes = 4, {"q_proj": 64, "v_proj": 32}
    folder.mkdir()
    kind = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(kind))
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, 64)
            weights[f"{name}.lora_B.weight"] = torch.randn(size, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
