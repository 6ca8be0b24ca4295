"""The engines that `tokenbus worker` can run, by name."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.settings import Settings
from tokenbus_services.worker.engine import Engine

_MOST_PARTS = 64
_TOKENS_PER_STEP = 3
_OF_BOTH = ("speculate", "max_running", "context", "prefill_chunk")
_OF_PADDLE = ("weights", "slice_steps", "device")
_OF_SYNTHETIC = ("tokens_per_step", "drafts", "parts")
_MOST_TOP_LOGPROBS = 20
"""As APIs of this kind have it."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine: what it is, its own options, and how it is made of them; heavy imports belong into `make`."""

    summary: str
    options: tuple[str, ...]
    """Those that it takes; absent, each has its own default."""
    declare: Callable[[argparse.ArgumentParser], None]
    make: Callable[[argparse.Namespace, Settings], Engine]


def _declare_ngram(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines ngram and paddle")
    group.add_argument("--speculate", type=int, metavar="N", help="how many tokens are drafted in a step; 0: none (3)")
    group.add_argument("--max-running", type=int, metavar="N", help="the most requests in a step (256, paddle 32)")
    group.add_argument(
        "--context", type=int, metavar="N", help="the most tokens of a prompt and its output (2048, paddle 1024)"
    )
    group.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="the most tokens of prompts in a step (512, paddle 256)"
    )


def _make_ngram(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.ngram import NgramEngine, NgramOptions  # noqa: PLC0415 - who wants it waits for it

    given = _given(options, settings, context="max_context")
    with _told():
        return NgramEngine(NgramOptions(role=settings.worker.role, max_top_logprobs=_most(settings), **given))


def _declare_paddle(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine paddle")
    group.add_argument("--weights", type=Path, metavar="FILE", help="a safetensors file (the one in the package)")
    group.add_argument(
        "--slice-steps",
        type=int,
        metavar="N",
        help="after how many steps a request gives its slot to one that waits; 0: never (256)",
    )
    group.add_argument("--device", help="as paddle names it: cpu, gpu, gpu:1 (cpu)")


def _make_paddle(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.paddle import PaddleEngine, PaddleOptions  # noqa: PLC0415 - as above

    given = _given(options, settings, context="context")
    given |= {name: value for name in _OF_PADDLE if (value := getattr(options, name)) is not None}
    with _told():
        return PaddleEngine(PaddleOptions(role=settings.worker.role, max_top_logprobs=_most(settings), **given))


def _declare_synthetic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine synthetic")
    group.add_argument("--tokens-per-step", type=int, metavar="N", help="how many tokens a request gets in a step (3)")
    group.add_argument("--drafts", action="store_true", help="let every step have a draft batch too")
    group.add_argument("--parts", type=int, metavar="N", help="in how many messages a step comes (1)")


def _make_synthetic(options: argparse.Namespace, settings: Settings) -> Engine:
    tokens = _TOKENS_PER_STEP if options.tokens_per_step is None else options.tokens_per_step
    parts = 1 if options.parts is None else options.parts
    _hold("--tokens-per-step", tokens, settings.limits.max_tokens_per_row)
    _hold("--parts", parts, _MOST_PARTS)
    return SyntheticEngine(
        tokens_per_step=tokens,
        drafts=options.drafts,
        parts=parts,
        max_rows=settings.limits.max_rows,
        role=settings.worker.role,
    )


def made(options: argparse.Namespace, settings: Settings) -> Engine:
    """Make the engine that was asked for; an option that it does not take is an error, and not silence."""
    kind = ENGINES[options.engine]
    for name in (*_OF_BOTH, *_OF_PADDLE, *_OF_SYNTHETIC):
        if name not in kind.options and getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise CommandError(f"{option}: the engine {options.engine} takes no such option", WRONG_USE)
    return kind.make(options, settings)


def _most(settings: Settings) -> int:
    return min(_MOST_TOP_LOGPROBS, settings.limits.max_top_k)


def _given(options: argparse.Namespace, settings: Settings, *, context: str) -> dict[str, Any]:
    """Return the options that both engines have and that were given; the engine knows its own defaults."""
    limits = settings.limits
    most = min(limits.max_tokens_per_row - 1, limits.max_draft_tokens_per_row)
    if options.speculate is not None and not 0 <= options.speculate <= most:
        bound = f"(limits.max_tokens_per_row is {limits.max_tokens_per_row})"
        raise CommandError(f"--speculate: 0 to {most} {bound}, got {options.speculate}", WRONG_USE)
    names = {
        "speculate": "speculate",
        "max_running": "max_running",
        "context": context,
        "prefill_chunk": "prefill_chunk",
    }
    return {name: value for option, name in names.items() if (value := getattr(options, option)) is not None}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """End with one line where an engine cannot be made as it was asked for."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error), WRONG_USE) from None
    except RuntimeError as error:  # weights that are missing or damaged, a device that is not there
        raise CommandError(str(error)) from None


def _hold(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise CommandError(f"{option}: 1 to {most}, got {value}", WRONG_USE)


ENGINES: dict[str, EngineKind] = {
    "ngram": EngineKind(
        "a language model of n-grams in numpy alone, with speculative decoding: readable text on any machine",
        _OF_BOTH,
        _declare_ngram,
        _make_ngram,
    ),
    "paddle": EngineKind(
        "a small transformer over bytes with multi-token prediction, on a CPU or a GPU; needs the extra paddle or gpu",
        _OF_BOTH + _OF_PADDLE,
        _declare_paddle,
        _make_paddle,
    ),
    "synthetic": EngineKind(
        "no model: tokens that follow from the request's key and can be computed again",
        _OF_SYNTHETIC,
        _declare_synthetic,
        _make_synthetic,
    ),
}
DEFAULT_ENGINE = "ngram"
