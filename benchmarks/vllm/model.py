"""The model that both systems serve where none is given: made on the spot, and nothing is downloaded.

Two layers with random weights, so that the engine costs little and what is around it shows; a byte-level tokenizer of
2,048 tokens, trained on this repository's own prose; and a chat template.
"""

from multiprocessing.connection import Connection
from pathlib import Path

_TEXT = Path(__file__).resolve().parents[2] / "tests" / "engines" / "ngram" / "training" / "text"
_VOCABULARY = 2048
_CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "16384"]
"""vLLM's options for it, given to both: vLLM on a CPU cannot do seeded requests whose prompts are in chunks."""


def make_model(_connection: Connection, folder: Path) -> None:
    """Make it, as a task of a `Child`: what it needs is imported there alone."""
    from tests.engines.vllm.tiny_model import make  # noqa: PLC0415 - as the docstring says

    make(folder, vocabulary=_VOCABULARY, texts=[path.read_text() for path in sorted(_TEXT.glob("*.txt"))])
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
