"""Texts: the text of an output's tokens, by its engine's tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenbus_services.delivery.stop_strings import RunningText, Stopping
from tokenbus_services.plugins import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenbus_services.model_files import ModelTokenizer

_NO_TEXT = "numbers"


@dataclass(frozen=True, slots=True)
class Texts:
    """Makes texts of tokens."""

    tokenizer: str
    """The tokenizer's name, as an engine's kind has it, or a model's folder, with a slash."""
    stoppings: Sequence[Stopping]
    """What ends the text of each prompt's outputs; a single one is of all."""

    def text(
        self, prompt_index: int, token_ids: Sequence[int], stop_reason: int | str | None, *, is_stopped: bool
    ) -> str:
        """Return the text of an output; `is_stopped` says that it ended at a stop and not at its length."""
        stopping = self.stoppings[prompt_index if len(self.stoppings) > 1 else 0]
        tokenizer = tokenizer_named(self.tokenizer)
        if isinstance(stop_reason, int) and not stopping.is_included:
            token_ids = token_ids[:-1]
        size = tokenizer.vocabulary_size  # a model may have more ids than its tokenizer
        pieces = [tokenizer.token_bytes(token_id) if token_id < size else b"" for token_id in token_ids]
        running = RunningText(stopping if is_stopped else None)
        text = running.add_until_stop(pieces)[0] if stopping.texts else running.add(b"".join(pieces))
        return text + running.end()


@cache
def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer of an engine; a ValueError says why there is none."""
    if name == _NO_TEXT:
        raise ValueError("text: an engine with a tokenizer, got one whose tokens have no text")
    return model_tokenizer(name) if "/" in name else load_tokenizer(name)


@cache
def model_tokenizer(folder: str) -> "ModelTokenizer":
    """Return the tokenizer of a model's folder; a ValueError says why there is none."""
    try:
        from tokenbus_services.model_files import ModelTokenizer  # noqa: PLC0415 - the extra models may be missing
    except ImportError as error:
        raise ValueError(f"text: a model's own tokenizer needs the extra models: {error}") from None
    return ModelTokenizer(Path(folder))
