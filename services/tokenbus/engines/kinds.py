"""The engines of this package as `tokenbus worker --engine` runs them, and their options, each imported when made."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenbus.settings import Settings
from tokenbus.worker import Engine, EngineKind

MOST_RANKS = 65_536
"""As many data-parallel ranks as `dp_rank` in a header tells apart."""
_MOST_PARTS = 64
_MOST_TOP_LOGPROBS = 20
_OPTIONS: dict[str, tuple[Callable[[str], object], str | None, str]] = {
    "speculate": (int, "N", "how many tokens are drafted in a step; 0: none"),
    "max_running": (int, "N", "the most requests in a step"),
    "context": (int, "N", "the most tokens of a prompt and its output"),
    "prefill_chunk": (int, "N", "the most tokens of prompts in a step"),
    "slice_steps": (int, "N", "after how many steps a request gives its slot to one that waits; 0: never"),
    "weights": (Path, "FILE", "a safetensors file"),
    "device": (str, None, "as paddle names it: cpu, gpu:1"),
}
_NGRAM = {"speculate": 3, "max_running": 256, "context": 2048, "prefill_chunk": 512}
_PADDLE = {
    "speculate": 3,
    "max_running": 32,
    "context": 1024,
    "prefill_chunk": 256,
    "slice_steps": 256,
    "weights": "the one in the package",
    "device": "cpu",
}
"""The options that each engine has, and their defaults, which the engine itself sets."""


def _declaring(engine: str, defaults: Mapping[str, object]) -> Callable[[argparse.ArgumentParser], None]:
    def declare(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(f"engine {engine}")
        for name, default in defaults.items():
            kind, metavar, meaning = _OPTIONS[name]
            option = "--" + name.replace("_", "-")
            group.add_argument(option, type=kind, metavar=metavar, help=f"{meaning} ({default})")

    return declare


def _given(options: argparse.Namespace, settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Return the engine's options: those that were given, and what follows from the settings."""
    limits = settings.limits
    most = min(limits.max_tokens_per_row - 1, limits.max_draft_tokens_per_row)
    if options.speculate is not None and not 0 <= options.speculate <= most:
        bound = f"(limits.max_tokens_per_row is {limits.max_tokens_per_row})"
        raise ValueError(f"--speculate: 0 to {most} {bound}, got {options.speculate}")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {"role": settings.worker.role, "max_top_logprobs": min(_MOST_TOP_LOGPROBS, limits.max_top_k), **given}


def _make_ngram(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.ngram import NgramEngine, NgramOptions  # noqa: PLC0415 - other engines need not wait for it

    return NgramEngine(NgramOptions(**_given(options, settings, _NGRAM)))


def _make_paddle(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.paddle import PaddleEngine, PaddleOptions  # noqa: PLC0415 - as above

    return PaddleEngine(PaddleOptions(**_given(options, settings, _PADDLE)))


def _declare_synthetic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine synthetic").add_argument
    add("--tokens-per-step", type=int, default=3, metavar="N", help="how many tokens a request gets in a step (3)")
    add("--drafts", action="store_true", help="let every step have a draft batch too")
    add("--parts", type=int, default=1, metavar="N", help="in how many messages a step comes (1)")


def _make_synthetic(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.synthetic import SyntheticEngine  # noqa: PLC0415 - as above

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


def _declare_vllm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group(
        "engine vllm",
        "--model is the model's folder. Clients ask for it by the folder's name, unless worker.model is set.\n"
        "Arguments after -- are vLLM's own, as `vllm serve` takes them.",
    )


def _make_vllm(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.vllm import VllmEngine  # noqa: PLC0415 - as above

    return VllmEngine(options.model, options.rest, settings)


def _vllm_options(given: Sequence[str]) -> argparse.Namespace | None:
    """Return vLLM's options that are read without vLLM; None: the worker says which one is wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-dp", "--data-parallel-size", "--data_parallel_size", type=int, dest="size", default=1)
    parser.add_argument("-dpn", "--data-parallel-rank", "--data_parallel_rank", dest="rank")
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+", dest="names", default=[])
    try:
        return parser.parse_known_args(given)[0]
    except argparse.ArgumentError:
        return None


def _vllm_ranks(given: Sequence[str]) -> list[list[str]]:
    """Return vLLM's options for each rank, where they say how many ranks there are and not which one it is."""
    found = _vllm_options(given)
    if found is None or found.rank is not None or not 1 < found.size <= MOST_RANKS:
        return [list(given)]
    return [[*given, "--data-parallel-rank", str(rank)] for rank in range(found.size)]


def _vllm_name(given: Sequence[str]) -> str:
    """Return the name that vLLM's options have; empty: none. A ValueError says that they have several."""
    found = _vllm_options(given)
    names: list[str] = [] if found is None else found.names
    if len(names) > 1:
        raise ValueError(f"--served-model-name: one name, as a worker's model has one, got {len(names)}")
    return names[0] if names else ""


NGRAM = EngineKind(
    "a language model of n-grams in numpy alone, with speculative decoding: readable text on any machine",
    _declaring("ngram", _NGRAM),
    _make_ngram,
    tokenizer="ngram",
)
PADDLE = EngineKind(
    "a small transformer over bytes with multi-token prediction, on a CPU or a GPU; needs the extra paddle or gpu",
    _declaring("paddle", _PADDLE),
    _make_paddle,
    tokenizer="bytes",
)
SYNTHETIC = EngineKind(
    "no model: tokens that follow from the request's id and can be computed again",
    _declare_synthetic,
    _make_synthetic,
)
VLLM = EngineKind(
    "any model that vLLM runs, from a folder; needs the extra vllm",
    _declare_vllm,
    _make_vllm,
    reads_model=True,
    publishes_apart=True,
    takes_rest=True,
    ranks=_vllm_ranks,
    model_name=_vllm_name,
)
