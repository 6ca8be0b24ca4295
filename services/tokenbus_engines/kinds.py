"""The engines of this package as `tokenbus worker --engine` runs them. Each is imported when it is made."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenbus_services.settings import Settings
from tokenbus_services.worker import Engine, EngineKind

_SHARED = ("speculate", "max_running", "context", "prefill_chunk")
_MOST_PARTS = 64
_MOST_TOP_LOGPROBS = 20
"""As APIs of this kind have it."""


def _declare_ngram(parser: argparse.ArgumentParser) -> None:
    _declare_shared(parser, "ngram", running=256, context=2048, chunk=512)


def _declare_shared(
    parser: argparse.ArgumentParser, engine: str, *, running: int, context: int, chunk: int
) -> argparse._ArgumentGroup:
    """Declare what ngram and paddle both have."""
    group = parser.add_argument_group(f"engine {engine}")
    add = group.add_argument
    add("--speculate", type=int, metavar="N", help="how many tokens are drafted in a step; 0: none (3)")
    add("--max-running", type=int, metavar="N", help=f"the most requests in a step ({running})")
    add("--context", type=int, metavar="N", help=f"the most tokens of a prompt and its output ({context})")
    add("--prefill-chunk", type=int, metavar="N", help=f"the most tokens of prompts in a step ({chunk})")
    return group


def _make_ngram(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.ngram import NgramEngine, NgramOptions  # noqa: PLC0415 - other engines need not wait for it

    return NgramEngine(
        NgramOptions(**_given(options, settings, "speculate", "max_running", "context", "prefill_chunk"))
    )


def _declare_paddle(parser: argparse.ArgumentParser) -> None:
    add = _declare_shared(parser, "paddle", running=32, context=1024, chunk=256).add_argument
    add("--weights", type=Path, metavar="FILE", help="a safetensors file (the one in the package)")
    add(
        "--slice-steps",
        type=int,
        metavar="N",
        help="after how many steps a request gives its slot to one that waits; 0: never (256)",
    )
    add("--device", help="as paddle names it: cpu, gpu, gpu:1 (cpu)")


def _make_paddle(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.paddle import PaddleEngine, PaddleOptions  # noqa: PLC0415 - as above

    given = _given(options, settings, *_SHARED, "weights", "slice_steps", "device")
    return PaddleEngine(PaddleOptions(**given))


def _given(options: argparse.Namespace, settings: Settings, *names: str) -> dict[str, Any]:
    """Return the engine's options: those that were given, and what follows from the settings."""
    limits = settings.limits
    most = min(limits.max_tokens_per_row - 1, limits.max_draft_tokens_per_row)
    speculate = getattr(options, "speculate", None)
    if speculate is not None and not 0 <= speculate <= most:
        bound = f"(limits.max_tokens_per_row is {limits.max_tokens_per_row})"
        raise ValueError(f"--speculate: 0 to {most} {bound}, got {speculate}")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {"role": settings.worker.role, "max_top_logprobs": min(_MOST_TOP_LOGPROBS, limits.max_top_k), **given}


def _declare_synthetic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine synthetic").add_argument
    add("--tokens-per-step", type=int, default=3, metavar="N", help="how many tokens a request gets in a step (3)")
    add("--drafts", action="store_true", help="let every step have a draft batch too")
    add("--parts", type=int, default=1, metavar="N", help="in how many messages a step comes (1)")


def _make_synthetic(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.synthetic import SyntheticEngine  # noqa: PLC0415 - as above

    for option, value, most in (
        ("--tokens-per-step", options.tokens_per_step, settings.limits.max_tokens_per_row),
        ("--parts", options.parts, _MOST_PARTS),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"{option}: 1 to {most}, got {value}")
    return SyntheticEngine(
        tokens_per_step=options.tokens_per_step,
        drafts=options.drafts,
        parts=options.parts,
        max_rows=settings.limits.max_rows,
        role=settings.worker.role,
    )


def _declare_transformers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "engine transformers",
        "--model is the model's folder; clients ask for it by the folder's name, unless worker.model is set in another "
        "way.",
    ).add_argument
    add("--device", help="as torch names it: cpu, cuda, cuda:1 (cpu)")
    add("--dtype", help="auto, float32, bfloat16 or float16; auto: as the weights were saved (auto)")
    add("--max-running", type=int, metavar="N", help="the most requests in a step (64)")
    add("--context", type=int, metavar="N", help="the most tokens of a prompt and its output (as the model has)")
    add("--prefill-chunk", type=int, metavar="N", help="the most tokens of prompts in a step (512)")
    add("--cache-tokens", type=int, metavar="N", help="how many tokens the cache holds, of all requests (65536)")


def _make_transformers(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.transformers import TransformersEngine, TransformersOptions  # noqa: PLC0415 - as above

    if options.model is None:
        raise ValueError("--model: the folder of the model, got none")
    names = ("model", "device", "dtype", "max_running", "context", "prefill_chunk", "cache_tokens")
    return TransformersEngine(TransformersOptions(**_given(options, settings, *names)))


def _declare_vllm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group(
        "engine vllm",
        "--model is the model's folder; clients ask for it by the folder's name, unless worker.model is set in another "
        "way. What follows -- is vLLM's own, as `vllm serve` takes it.",
    )


def _make_vllm(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus_engines.vllm import VllmEngine  # noqa: PLC0415 - as above

    return VllmEngine(options.model, options.rest, settings)


def _vllm_ranks(given: Sequence[str]) -> list[list[str]]:
    from tokenbus_engines.vllm.ranks import options_of_ranks  # noqa: PLC0415 - as above

    return options_of_ranks(given)


NGRAM = EngineKind(
    "a language model of n-grams in numpy alone, with speculative decoding: readable text on any machine",
    _declare_ngram,
    _make_ngram,
    tokenizer="ngram",
)
PADDLE = EngineKind(
    "a small transformer over bytes with multi-token prediction, on a CPU or a GPU; needs the extra paddle or gpu",
    _declare_paddle,
    _make_paddle,
    tokenizer="bytes",
)
SYNTHETIC = EngineKind(
    "no model: tokens that follow from the request's id and can be computed again",
    _declare_synthetic,
    _make_synthetic,
)
TRANSFORMERS = EngineKind(
    "any causal language model of transformers, from a folder; needs the extra transformers",
    _declare_transformers,
    _make_transformers,
    reads_model=True,
)
VLLM = EngineKind(
    "any model that vLLM runs, from a folder; needs the extra vllm",
    _declare_vllm,
    _make_vllm,
    reads_model=True,
    takes_rest=True,
    ranks=_vllm_ranks,
)
