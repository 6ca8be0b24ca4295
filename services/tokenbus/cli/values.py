"""Formats batches, rows and tokens for `tap`, `check` and `inspect`, as JSON values and as text."""

from collections.abc import Callable, Iterable
from typing import Any

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.plugins import PluginError, Tokenizer, load_tokenizer
from tokenbus_contracts import LogprobBatch, Row, RowStatus, Scoring

Values = dict[str, Any]
"""Values of a JSON object."""
Texts = Callable[[int], str]
"""A function that maps a token id to the token's text."""
_LIKELY, _UNLIKELY = -0.7, -2.3
"""A token is green if its logprob is at least -0.7 (probability 1/2), and red below -2.3 (probability 1/10)."""


def batch_values(batch: LogprobBatch) -> Values:
    header = batch.header
    return {
        "step": str(header.step),
        "kind": header.kind.name,
        "part": f"{header.part_index + 1}/{header.part_count}",
        "tokens": batch.token_ids.size,
        "alternatives": batch.alternative_token_ids.size,
        "statuses": {status.name: count for status in RowStatus if (count := int((batch.statuses == status).sum()))},
    }


def row_values(row: Row) -> Values:
    """Return the values of a row. In unscored rows, logprobs and ranks are None."""
    is_scored = row.scoring is not Scoring.NONE
    return {
        "request_id": f"{row.request_id:016x}",
        "batch_index": row.batch_index,
        "position": row.position,
        "status": row.status.name,
        "token_ids": row.token_ids.tolist(),
        "logprobs": row.logprobs.tolist() if is_scored else None,
        "ranks": row.ranks.tolist() if is_scored else None,
        **({} if row.extras is None else row.extras.as_lists()),
    }


def rows_text(rows: int, values: Values) -> str:
    statuses = ", ".join(f"{count} {name}" for name, count in values["statuses"].items()) or "none"
    return f"{rows} rows ({statuses}), {values['tokens']} tokens"


def tokens_text(row: Values) -> str:
    logprobs: Iterable[float | None] = row["logprobs"] or [None] * len(row["token_ids"])
    return " ".join(map(token_text, map(str, row["token_ids"]), logprobs)) or "no token"


def token_text(token: str, logprob: float | None) -> str:
    """Return a token and its logprob, coloured by probability."""
    if logprob is None:
        return f"{token}(-)"
    return coloured(f"{token}({logprob:.3f})", logprob)


def coloured(text: str, logprob: float | None) -> str:
    if logprob is None or _UNLIKELY <= logprob < _LIKELY:
        return text
    return styled(text, "green" if logprob >= _LIKELY else "red")


def tokenizer_of(name: str) -> Tokenizer | None:
    """Load the tokenizer named in the settings, or return None for the name `numbers`, which shows tokens as ids."""
    try:
        return None if name == "numbers" else load_tokenizer(name)
    except PluginError as error:
        raise CommandError(str(error), WRONG_USE) from None


def text_of(tokenizer: Tokenizer | None) -> Texts:
    """Return a function that maps token ids to texts. The text of an unknown id is the id."""
    size = 0 if tokenizer is None else tokenizer.vocabulary_size

    def text(token_id: int) -> str:
        if tokenizer is None or token_id >= size:
            return str(token_id)
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    return text
