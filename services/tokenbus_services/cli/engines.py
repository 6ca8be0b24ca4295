"""The engines that `tokenbus worker` can run, by name."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.settings import Settings
from tokenbus_services.worker.engine import Engine
from tokenbus_services.worker.synthetic import SyntheticEngine

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine: what it is, its own options, and how it is made of them; heavy imports belong into `make`."""

    summary: str
    declare: Callable[[argparse.ArgumentParser], None]
    make: Callable[[argparse.Namespace, Settings], Engine]


def _declare_synthetic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine synthetic")
    group.add_argument(
        "--tokens-per-step", type=int, default=3, metavar="N", help="how many tokens a request gets in a step (3)"
    )
    group.add_argument("--drafts", action="store_true", help="let every step have a draft batch too")
    group.add_argument("--parts", type=int, default=1, metavar="N", help="in how many messages a step comes (1)")


def _make_synthetic(options: argparse.Namespace, settings: Settings) -> Engine:
    _hold("--tokens-per-step", options.tokens_per_step, settings.limits.max_tokens_per_row)
    _hold("--parts", options.parts, _MOST_PARTS)
    return SyntheticEngine(
        tokens_per_step=options.tokens_per_step,
        drafts=options.drafts,
        parts=options.parts,
        max_rows=settings.limits.max_rows,
        role=settings.worker.role,
    )


def _hold(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise CommandError(f"{option}: 1 to {most}, got {value}", WRONG_USE)


ENGINES: dict[str, EngineKind] = {
    "synthetic": EngineKind(
        "no model: tokens that follow from the request's key and can be computed again",
        _declare_synthetic,
        _make_synthetic,
    ),
}
