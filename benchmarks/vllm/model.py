"""The model that both systems serve: `python -m benchmarks.vllm.model FOLDER` makes it, and nothing is downloaded.

Two layers with random weights, so that the engine costs little and what is around it shows; a byte-level tokenizer of
2,048 tokens, trained on this repository's own prose; and a chat template.
"""

import sys
from pathlib import Path

from tests.engines.vllm.tiny_model import make

_TEXT = Path(__file__).resolve().parents[2] / "tests" / "engines" / "ngram" / "training" / "text"
_VOCABULARY = 2048
_CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "16384"]
"""vLLM's options for it, given to both: vLLM on a CPU cannot do seeded requests whose prompts are in chunks."""


def main(folder: Path) -> None:
    make(folder, vocabulary=_VOCABULARY, texts=[path.read_text() for path in sorted(_TEXT.glob("*.txt"))])
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
