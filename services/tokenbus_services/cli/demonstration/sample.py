"""An answer to look at: its tokens coloured by their probability, and the first of them with their alternatives."""

import math
from collections.abc import Iterator

from tokenbus_services.cli.demonstration.asking import Answer
from tokenbus_services.cli.terminal import columns, styled, wants_colour
from tokenbus_services.plugins import load_tokenizer
from tokenbus_services.printable import printable

_SCALE = ((0.05, 209), (0.2, 216), (0.5, 230), (0.8, 153), (1.0, 111))
"""Up to which probability, and the background: orange to blue, which nobody confuses, with black letters on it."""
_BLACK = 16
_SHOWN = 6
_ALTERNATIVES = 3
_WIDTH = 14
_MOST_COLUMNS = 96
_END = "(end)"
"""The token that ends a text has no letters."""


def sample(answer: Answer) -> Iterator[str]:
    """Yield its lines."""
    tokenizer = load_tokenizer("ngram")
    tokens = [
        (_visible(tokenizer.token_bytes(int(token_id))), math.exp(logprob))
        for row in answer.rows
        for token_id, logprob in zip(row.token_ids, row.logprobs.tolist(), strict=True)
    ]
    prompt = answer.generate.text.text
    if wants_colour():
        yield "   " + " ".join(_painted(f" {text} ", limit) for limit, text in _legend())
    yield from _wrapped(prompt, tokens)
    yield ""
    yield f"   {'token':{_WIDTH}} probability  rank  instead"
    yield from _table(answer)


def _table(answer: Answer) -> Iterator[str]:
    tokenizer = load_tokenizer("ngram")
    shown = 0
    for row in answer.rows:
        for place, token_id in enumerate(row.token_ids.tolist()):
            if shown == _SHOWN:
                return
            shown += 1
            others = zip(row.alternative_token_ids[place], row.alternative_logprobs[place].tolist(), strict=True)
            instead = [
                f"{_visible(tokenizer.token_bytes(int(other)))!r} {math.exp(value):.1%}"
                for other, value in others
                if other != token_id
            ]
            text = repr(_visible(tokenizer.token_bytes(token_id)))
            probability = f"{math.exp(float(row.logprobs[place])):.1%}"
            yield f"   {text:{_WIDTH}} {probability:>11} {row.ranks[place]:>5}  {', '.join(instead[:_ALTERNATIVES])}"


def _wrapped(prompt: str, tokens: list[tuple[str, float]]) -> Iterator[str]:
    line, width, most = "   " + styled(prompt, "bold"), 3 + len(prompt), min(_MOST_COLUMNS, columns())
    for text, probability in tokens:
        shown = len(text) + (0 if wants_colour() else len(f"({probability:.0%})"))
        if width + shown > most:
            yield line
            line, width = "   ", 3
        line += _painted(text, probability)
        width += shown
    yield line


def _painted(text: str, probability: float) -> str:
    if not wants_colour():
        return f"{text}({probability:.0%})"
    colour = next((colour for limit, colour in _SCALE if probability <= limit), _SCALE[-1][1])
    return f"\x1b[38;5;{_BLACK};48;5;{colour}m{text}\x1b[0m"


def _legend() -> Iterator[tuple[float, str]]:
    for limit, _ in _SCALE:
        yield limit, f"up to {limit:.0%}"


def _visible(data: bytes) -> str:
    return printable(data.decode(errors="replace")) or _END
