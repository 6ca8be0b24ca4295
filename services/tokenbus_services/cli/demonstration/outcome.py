"""What the demo found, as values for machines and as lines for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenbus_services.cli.demonstration.asking import Asked
from tokenbus_services.cli.demonstration.front import Front
from tokenbus_services.cli.demonstration.rates import Rate
from tokenbus_services.cli.terminal import columns, styled

_IDS_ONLY = "ids only"
_BAR, _BESIDE_THE_BAR = 20, 82
_QUIET = 0.25
"""How far the rounds of one way to ask lie apart, as a share of their median, on a machine that does nothing else."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was counted, checked and measured."""

    asked: Asked
    differing: int
    """How many answers are not what the same request gives without a bus."""
    rates: Mapping[str, Rate]
    tokens_by_worker: Mapping[str, int]
    heads: list[tuple[int, int]] = field(default_factory=list)
    """By head: how many of its draft tokens were verified, and how many of those were accepted."""
    front: Front | None = None
    """What the gateway answered, if there was one."""

    @property
    def lost(self) -> int:
        """Tokens that did not come."""
        return sum(answer.lost for answer in self.asked.answers)

    @property
    def repeated(self) -> int:
        """Tokens that came twice."""
        return sum(answer.repeated for answer in self.asked.answers)

    @property
    def errors(self) -> list[str]:
        """What the requests that failed ended with."""
        return [answer.error for answer in self.asked.answers if answer.error]

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
            "requests": len(self.asked.answers),
            "tokens": self.asked.tokens,
            "seconds": round(self.asked.seconds, 3),
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

    def told(self) -> Iterator[str]:
        """Yield the summary's lines, without the rates."""
        answers = len(self.asked.answers)
        by_worker = ", ".join(f"{name} {count:,}" for name, count in self.tokens_by_worker.items())
        yield f"   tokens      {self.asked.tokens:,} for {answers} requests; by worker: {by_worker}"
        yield f"   acceptance  {self._acceptance()}"
        yield f"   order       {self._order()}"
        yield f"   truth       {self._truth()}"
        yield from (styled(f"   error       {error}", "red") for error in self.errors[:3])

    def told_rates(self) -> Iterator[str]:
        """Yield a line for each way to ask."""
        without = self.rates[_IDS_ONLY].median
        widest = max(rate.median for rate in self.rates.values())
        bars = max(0, min(_BAR, columns() - _BESIDE_THE_BAR))
        meanings = {_IDS_ONLY: "no logprobs", "k = 0": "each token's own", "k = 20": "and 20 alternatives"}
        for name, rate in self.rates.items():
            bar = ("#" * round(bars * rate.median / widest)).ljust(bars)
            share, spread = f"{rate.median / without:.0%}", f"({rate.lowest:,.0f} to {rate.highest:,.0f})"
            yield f"   {name:8} {meanings[name]:19} {rate.median:>9,.0f} tokens/s  {share:>5}  {bar}  {spread}"
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
        count = len(self.asked.answers)
        if not self.differing:
            same = "ids, logprobs, ranks and alternatives are, bit by bit, those of an engine without a bus"
            return styled(f"{count} of {count} answers: {same}", "green")
        return styled(f"{self.differing} of {count} answers DIFFER from those of an engine without a bus", "red")


def heads_of(asked: Asked) -> list[tuple[int, int]]:
    """Return, for each head that drafted, how many of its tokens were verified and how many accepted."""
    rows = [row for answer in asked.answers for row in answer.rows if row.draft_token_count and row.token_ids.size]
    most = max((row.draft_token_count for row in rows), default=0)
    return [
        (
            sum(head <= row.draft_token_count for row in rows),
            # The last token of a row is the target's own.
            sum(head <= min(row.token_ids.size - 1, row.draft_token_count) for row in rows),
        )
        for head in range(1, most + 1)
    ]
