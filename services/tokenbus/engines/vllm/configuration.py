"""Configuration: builds vLLM's VllmConfig from vLLM's options, the model's folder and our limits."""

import os
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tokenbus.engines.kinds import MOST_RANKS
from tokenbus.engines.vllm.adapters import Adapter, adapters_of
from tokenbus.engines.vllm.routed_experts import refuse_routed_experts
from tokenbus.logs import logger
from tokenbus.settings import Settings
from tokenbus.tokenizer_probes import digest_of, encoder_of, first_difference, probed

_log = logger("worker")
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_RANK_OPTIONS = ("data_parallel_size", "data_parallel_rank")
_LOGPROBS = ("raw_logprobs", "processed_logprobs")


def check_model(model: Path | None) -> Path:
    """Return the model's folder, or raise ValueError, without importing vLLM."""
    if model is None:
        raise ValueError("--model: the folder of the model, got none")
    if not (model / "config.json").is_file():
        got = "a folder without config.json" if model.is_dir() else "no folder"
        raise ValueError(f"--model: the folder of a model, got {got}: {model}")
    return model


def configured(
    vllm: SimpleNamespace, model: Path, given: Sequence[str], settings: Settings
) -> tuple[Any, list[Adapter], bool]:
    """Return the VllmConfig, the adapters, and whether Tokenbus scores tokens in vLLM's sampler."""
    parsed = _parsed(vllm, given)
    parsed.model = str(model.resolve())
    arguments = vllm.EngineArgs.from_cli_args(parsed)
    adapters = adapters_of(parsed.lora_modules, settings.worker.model or model.name)
    if adapters and not arguments.enable_lora:
        raise ValueError(f"--lora-modules: only with --enable-lora, got {len(adapters)} without")
    most = min(settings.limits.max_rows, settings.worker.max_requests or settings.limits.max_rows)
    if arguments.max_num_seqs is not None and arguments.max_num_seqs > most:
        raise ValueError(
            f"--max-num-seqs: at most {most} (limits.max_rows is {settings.limits.max_rows}, worker.max_requests is "
            f"{settings.worker.max_requests}), got {arguments.max_num_seqs}"
        )
    rank = take_rank(arguments)
    if parsed.token_scores:
        os.environ.setdefault(_RUNNER, "0")
    config = _created(vllm, arguments)
    if config.scheduler_config.max_num_seqs > most:  # vLLM's default depends on the device
        arguments.max_num_seqs = most
        config = _created(vllm, arguments)
    keep_eager(config)
    if settings.worker.role != "mixed" and config.kv_transfer_config is None:
        raise ValueError(f"worker.role: mixed without vLLM's --kv-transfer-config, got {settings.worker.role}")
    if rank is not None:
        set_rank(config, rank)
    check_limits(config, settings)
    check_top_k("limits.max_top_k", settings.limits.max_top_k, config)
    refuse_routed_experts(config)
    if parsed.token_scores:
        check_token_scores(config)
    return config, adapters, parsed.token_scores


def _parsed(vllm: SimpleNamespace, given: Sequence[str]) -> Any:  # noqa: ANN401 - a namespace of its EngineArgs

    class Parser(vllm.FlexibleArgumentParser):  # type: ignore[misc,name-defined]  # known only at run time
        """vLLM's parser, which raises errors here instead of ending the process."""

        def error(self, message: str) -> NoReturn:
            raise ValueError(f"vLLM's options: {message}")

    parser = vllm.EngineArgs.add_cli_args(Parser(prog="tokenbus worker --engine vllm --"))
    # The engine also needs these options of vLLM's API server.
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH")
    scores = "score tokens with token_logprobs in vLLM's sampler, which offers more scores"
    parser.add_argument("--token-scores", action=BooleanOptionalAction, default=False, help=scores)
    return parser.parse_args(list(given))


def _created(vllm: SimpleNamespace, arguments: Any) -> Any:  # noqa: ANN401 - as above
    # Some defaults depend on the usage context, which is the same as in vLLM's own server.
    return arguments.create_engine_config(vllm.UsageContext.OPENAI_API_SERVER)


def take_rank(arguments: Any) -> int | None:  # noqa: ANN401 - vLLM's
    """Return this worker's data-parallel rank or None, and change `arguments` to the options of a single engine."""
    size, rank = arguments.data_parallel_size, arguments.data_parallel_rank
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"--data-parallel-rank: at least 0 and below --data-parallel-size {size}, got {rank}")
    if size <= 1:
        return None
    if size > MOST_RANKS:
        raise ValueError(f"--data-parallel-size: at most {MOST_RANKS}, got {size}")
    if rank is None:
        limit = f"a worker for each --data-parallel-rank from 0 to {size - 1} (`tokenbus up` starts them all)"
        raise ValueError(f"--data-parallel-size: {limit}, got {size} without a rank")
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if field.name.startswith("data_parallel_") and field.name not in _RANK_OPTIONS and value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{option}: unsupported with --data-parallel-rank, got {value}")
    arguments.data_parallel_size, arguments.data_parallel_rank = 1, None
    return int(rank)


def set_rank(config: Any, rank: int) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Select a rank's random numbers and GPUs in the configuration, as vLLM's server does."""
    if config.model_config.is_moe:
        limit = "unsupported for a mixture of experts; use --tensor-parallel-size and --enable-expert-parallel"
        raise ValueError(f"--data-parallel-rank: {limit}, got {rank}")
    parallel = config.parallel_config
    parallel.data_parallel_index = rank
    # If a worker sees the GPUs of several ranks, it uses only its rank's GPUs.
    shares = import_module("torch").cuda.device_count() // parallel.world_size
    parallel.data_parallel_rank_local = rank % shares if shares else rank


def keep_eager(config: Any) -> None:  # noqa: ANN401 - as above
    """Turn compilation off if `--enforce-eager` is used on a CPU."""
    if config.model_config.enforce_eager and config.device_config.device_type == "cpu":
        # Otherwise vLLM compiles two functions of its sampler at the first token, which takes 20 s or more.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def check_limits(config: Any, settings: Settings) -> None:  # noqa: ANN401 - as above
    """Raise ValueError if vLLM may emit more tokens per row than the limits allow."""
    limits, speculative = settings.limits, config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    most = min(limits.max_tokens_per_row - 1, limits.max_draft_tokens_per_row)
    if drafts > most:
        bound = f"limits.max_tokens_per_row is {limits.max_tokens_per_row}"
        raise ValueError(f"--speculative-config: num_speculative_tokens: at most {most} ({bound}), got {drafts}")


def check_top_k(key: str, top_k: int, config: Any) -> None:  # noqa: ANN401 - as above
    """Raise ValueError if a setting asks for more alternatives than vLLM computes."""
    most = config.model_config.max_logprobs
    if 0 <= most < top_k:
        raise ValueError(f"{key}: at most {most}, as --max-logprobs, got {top_k}")


def check_token_scores(config: Any) -> None:  # noqa: ANN401 - as above
    """Raise ValueError if vLLM's sampler cannot be replaced."""
    mode = str(config.model_config.logprobs_mode)
    if mode not in _LOGPROBS:
        raise ValueError(f"--token-scores: --logprobs-mode {' or '.join(_LOGPROBS)}, got {mode}")
    if config.use_v2_model_runner:
        raise ValueError(f"--token-scores: vLLM's V1 model runner, got V2, because of {_RUNNER} or the model")


def tokenizer_of(folder: Path, tokenizer: Any) -> tuple[int, Sequence[int]]:  # noqa: ANN401 - vLLM's tokenizer
    """Return the digest and probes of the tokenizer, or (0, ()) if unknown. Warn if the folder's tokenizer differs."""
    try:
        from tokenbus.model_files import ModelTokenizer  # noqa: PLC0415 - it may not be installed

        of_files = ModelTokenizer(folder)
    except (ImportError, ValueError):
        return 0, ()
    probes = probed(encoder_of(of_files))
    if tokenizer is not None:
        used = probed(lambda text, adds_special: tokenizer.encode(text, add_special_tokens=adds_special))
        text, probes = first_difference(probes, used), used
        if text is not None:
            _log.warning(
                "vLLM does not use the tokenizer of the model's folder",
                text=text,
                remedy="AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                folder=str(folder),
            )
    return digest_of(of_files, probes), probes
