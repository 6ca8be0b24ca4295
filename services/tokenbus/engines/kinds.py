"""The engines of `tokenbus worker --engine` and their options. An engine is imported only when it is created."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenbus.settings import Settings
from tokenbus.worker import Engine, EngineKind

MOST_RANKS = 65_536
"""Maximum number of data-parallel ranks, because the contract's largest rank is 65,535."""
_MOST_PARTS = 64
_MOST_TOP_LOGPROBS = 20
_OPTIONS: dict[str, tuple[Callable[[str], object], str | None, str]] = {
    "speculate": (int, "N", "draft tokens per step; 0: no speculation"),
    "max_running": (int, "N", "limit of requests in a step"),
    "context": (int, "N", "limit of a prompt and its output together, in tokens"),
    "prefill_chunk": (int, "N", "limit of prompt tokens in a step"),
    "slice_steps": (int, "N", "steps after which a request is preempted for a waiting one; 0: never"),
    "weights": (Path, "FILE", "a safetensors file"),
    "device": (str, None, "paddle's name of the device, such as cpu or gpu:1"),
}
_NGRAM = {"speculate": 3, "max_running": 256, "context": 2048, "prefill_chunk": 512}
_PADDLE = {
    "speculate": 3,
    "max_running": 32,
    "context": 1024,
    "prefill_chunk": 256,
    "slice_steps": 256,
    "weights": "the file in the package",
    "device": "cpu",
}
"""Defaults that `--help` shows for the paddle engine's options. The engine itself sets the actual defaults."""


def _declare(engine: str, defaults: Mapping[str, object], parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"engine {engine}")
    for name, default in defaults.items():
        kind, metavar, meaning = _OPTIONS[name]
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=kind, metavar=metavar, help=f"{meaning} ({default})")


def _given(options: argparse.Namespace, settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of the command line and the options derived from the settings."""
    limits = settings.limits
    most = min(limits.max_tokens_per_row - 1, limits.max_draft_tokens_per_row)
    if options.speculate is not None and not 0 <= options.speculate <= most:
        bound = f"(limits.max_tokens_per_row is {limits.max_tokens_per_row})"
        raise ValueError(f"--speculate: 0 to {most} {bound}, got {options.speculate}")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {"role": settings.worker.role, "max_top_logprobs": min(_MOST_TOP_LOGPROBS, limits.max_top_k), **given}


def _make_ngram(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.ngram import NgramEngine, NgramOptions  # noqa: PLC0415 - imported when created

    return NgramEngine(NgramOptions(**_given(options, settings, _NGRAM)))


def _make_paddle(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.paddle import PaddleEngine, PaddleOptions  # noqa: PLC0415 - as above

    return PaddleEngine(PaddleOptions(**_given(options, settings, _PADDLE)))


def _declare_synthetic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine synthetic").add_argument
    add("--tokens-per-step", type=int, default=3, metavar="N", help="tokens of a request per step (3)")
    add("--drafts", action="store_true", help="send a draft batch with every step")
    add("--parts", type=int, default=1, metavar="N", help="messages per step (1)")


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
        "--model is the model's folder. Its name in requests is the folder's name, unless worker.model is set.\n"
        "Arguments after -- are passed to vLLM, as to `vllm serve`.",
    )


def _make_vllm(options: argparse.Namespace, settings: Settings) -> Engine:
    from tokenbus.engines.vllm import VllmEngine  # noqa: PLC0415 - as above

    return VllmEngine(options.model, options.rest, settings)


def _vllm_options(given: Sequence[str]) -> argparse.Namespace | None:
    """Return the vLLM options that are needed before vLLM is imported, or None if an option is invalid."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-dp", "--data-parallel-size", "--data_parallel_size", type=int, dest="size", default=1)
    parser.add_argument("-dpn", "--data-parallel-rank", "--data_parallel_rank", dest="rank")
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+", dest="names", default=[])
    try:
        return parser.parse_known_args(given)[0]
    except argparse.ArgumentError:
        return None


def _vllm_ranks(given: Sequence[str]) -> list[list[str]]:
    """Return vLLM's options for each data-parallel rank, or a single list if the options already name a rank."""
    found = _vllm_options(given)
    if found is None or found.rank is not None or not 1 < found.size <= MOST_RANKS:
        return [list(given)]
    return [[*given, "--data-parallel-rank", str(rank)] for rank in range(found.size)]


def _vllm_name(given: Sequence[str]) -> str:
    """Return the model's name in vLLM's options, or an empty string. Raise ValueError for several names."""
    found = _vllm_options(given)
    names: list[str] = [] if found is None else found.names
    if len(names) > 1:
        raise ValueError(f"--served-model-name: one name, got {len(names)}")
    return names[0] if names else ""


NGRAM = EngineKind(
    "an n-gram language model in numpy, with speculative decoding: readable text on any machine",
    partial(_declare, "ngram", _NGRAM),
    _make_ngram,
    tokenizer="ngram",
)
PADDLE = EngineKind(
    "a small transformer over bytes with multi-token prediction, on CPU or GPU; needs the extra paddle or gpu",
    partial(_declare, "paddle", _PADDLE),
    _make_paddle,
    tokenizer="bytes",
)
SYNTHETIC = EngineKind(
    "no model: reproducible tokens that depend only on the request's id",
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
