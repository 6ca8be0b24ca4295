"""What the demo prints: one answer with its probabilities, the summary and the rates, for people and as JSON."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, SupportsInt

from tokenbus_services.cli.demo_checks import Answer, Answers, HttpAnswer, Rate
from tokenbus_services.plugins import Tokenizer, load_tokenizer
from tokenbus_services.printable import printable
from tokenbus_services.terminal import columns, styled, wants_colour

_IDS_ONLY = "ids only"
_QUIET = 0.25
"""How far the rounds of one way to ask lie apart, as a share of their median, on a machine that does nothing else."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was counted, checked and measured."""

    results: Answers
    differing: int
    """How many answers are not what the same request gives without a bus."""
    rates: Mapping[str, Rate]
    tokens_by_worker: Mapping[str, int]
    front: HttpAnswer | None = None
    """What the gateway answered, if there was one."""

    @property
    def lost(self) -> int:
        """Tokens that did not come."""
        return sum(answer.lost for answer in self.results.answers)

    @property
    def repeated(self) -> int:
        """Tokens that came twice."""
        return sum(answer.repeated for answer in self.results.answers)

    @property
    def errors(self) -> list[str]:
        """What the requests that failed ended with."""
        return [answer.error for answer in self.results.answers if answer.error]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """How many tokens of each head that drafted were verified, and how many of those accepted."""
        answers = self.results.answers
        rows = [row for answer in answers for row in answer.rows if row.draft_token_count and row.token_ids.size]
        most = max((row.draft_token_count for row in rows), default=0)
        return [
            (
                sum(head <= row.draft_token_count for row in rows),
                # The last token of a row is the target's own.
                sum(head <= min(row.token_ids.size - 1, row.draft_token_count) for row in rows),
            )
            for head in range(1, most + 1)
        ]

    @property
    def is_good(self) -> bool:
        """Whether every request had exactly its tokens, the one by HTTP too."""
        is_front_right = self.front is None or self.front.is_right
        return is_front_right and not (self.lost or self.repeated or self.errors or self.differing)

    @property
    def values(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        verified, accepted = self._drafts
        without = self.rates[_IDS_ONLY].median
        return {
            "ok": self.is_good,
            "requests": len(self.results.answers),
            "tokens": self.results.tokens,
            "seconds": round(self.results.seconds, 3),
            "tokens_by_worker": dict(self.tokens_by_worker),
            "acceptance": {
                "verified": verified,
                "accepted": accepted,
                "share": round(accepted / verified, 4) if verified else None,
                "by_head": [round(taken / seen, 4) for seen, taken in self.heads],
            },
            "check": {
                "truth": "the same requests and seeds in an engine without a bus, compared bit by bit",
                "lost": self.lost,
                "repeated": self.repeated,
                "differing_requests": self.differing,
                "errors": self.errors,
                "http": None if self.front is None else self.front.is_right,
            },
            "tokens_per_second": {
                name: {"median": round(rate.median), "lowest": round(rate.lowest), "highest": round(rate.highest)}
                for name, rate in self.rates.items()
            },
            "share_of_rate_without_logprobs": {
                name: round(rate.median / without, 4) for name, rate in self.rates.items()
            },
        }

    @property
    def _drafts(self) -> tuple[int, int]:
        return sum(seen for seen, _ in self.heads), sum(taken for _, taken in self.heads)

    def summary_lines(self) -> Iterator[str]:
        """Yield the summary's lines, without the rates."""
        answers = len(self.results.answers)
        by_worker = ", ".join(f"{name} {count:,}" for name, count in self.tokens_by_worker.items())
        yield f"   tokens      {self.results.tokens:,} for {answers} requests; by worker: {by_worker}"
        yield f"   acceptance  {self._acceptance()}"
        yield f"   order       {self._order()}"
        yield f"   truth       {self._truth()}"
        yield from (styled(f"   error       {error}", "red") for error in self.errors[:3])

    def rate_lines(self) -> Iterator[str]:
        """Yield a line for each way to ask."""
        without = self.rates[_IDS_ONLY].median
        meanings = {_IDS_ONLY: "no logprobs", "k = 0": "each token's own", "k = 20": "and 20 alternatives"}
        for name, rate in self.rates.items():
            share, spread = f"{rate.median / without:.0%}", f"({rate.lowest:,.0f} to {rate.highest:,.0f})"
            yield f"   {name:8} {meanings[name]:19} {rate.median:>9,.0f} tokens/s  {share:>5}  {spread}"
        if max((rate.highest - rate.lowest) / rate.median for rate in self.rates.values()) > _QUIET:
            yield "   the rounds differ more than the ways to ask: this machine is busy with other things"

    def _acceptance(self) -> str:
        verified, accepted = self._drafts
        if not verified:  # no draft, no rate
            return "no draft was made"
        by_head = ", ".join(f"{taken / seen:.0%}" for seen, taken in self.heads)
        return f"{accepted:,} of {verified:,} draft tokens, {accepted / verified:.0%}; by head: {by_head}"

    def _order(self) -> str:
        if not (self.lost or self.repeated or self.errors):
            return styled("no token lost, none repeated, all in order", "green")
        return styled(f"{self.lost} LOST, {self.repeated} REPEATED, {len(self.errors)} requests FAILED", "red")

    def _truth(self) -> str:
        count = len(self.results.answers)
        if not self.differing:
            same = "ids, logprobs, ranks and alternatives are, bit by bit, those of an engine without a bus"
            return styled(f"{count} of {count} answers: {same}", "green")
        return styled(f"{self.differing} of {count} answers DIFFER from those of an engine without a bus", "red")


_SCALE = ((0.05, 209), (0.2, 216), (0.5, 230), (0.8, 153), (1.0, 111))
"""Probabilities and their backgrounds: orange to blue, which colour-blind readers tell apart, under black letters."""
_BLACK = 16
_SHOWN = 6
_ALTERNATIVES = 3
_WIDTH = 14
_MOST_COLUMNS = 96
_END = "(end)"
"""The token that ends a text has no letters."""


def sample(answer: Answer) -> Iterator[str]:
    """Yield its lines."""
    tokens = [
        (_text(token_id), math.exp(logprob))
        for row in answer.rows
        for token_id, logprob in zip(row.token_ids, row.logprobs.tolist(), strict=True)
    ]
    if wants_colour():
        yield "   " + " ".join(_painted(f" up to {limit:.0%} ", limit) for limit, _ in _SCALE)
    yield from _wrapped(answer.generate.text.text, tokens)
    yield ""
    yield f"   {'token':{_WIDTH}} probability  rank  instead"
    yield from _table(answer)


def _table(answer: Answer) -> Iterator[str]:
    places = ((row, place) for row in answer.rows for place in range(row.token_ids.size))
    for row, place in islice(places, _SHOWN):
        token_id = row.token_ids[place]
        others = zip(row.alternative_token_ids[place], row.alternative_logprobs[place].tolist(), strict=True)
        instead = [f"{_text(other)!r} {math.exp(value):.1%}" for other, value in others if other != token_id]
        probability = f"{math.exp(float(row.logprobs[place])):.1%}"
        yield (
            f"   {_text(token_id)!r:{_WIDTH}} {probability:>11} {row.ranks[place]:>5}  "
            f"{', '.join(instead[:_ALTERNATIVES])}"
        )


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


def _text(token_id: SupportsInt) -> str:
    return printable(_tokenizer().token_bytes(int(token_id)).decode(errors="replace")) or _END


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer("ngram")
