"""TransformersEngine: any causal language model of transformers, by its continuous batching, stepped on our thread.

transformers has the paged cache and the scheduler: prompts in chunks, shared prefixes, preemption where the cache is
full. Tokens are chosen here, from each step's logits: every request has its own sampling parameters and seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import check_range, request_of
from tokenbus_engines.requests import Request
from tokenbus_engines.sampling import uniforms
from tokenbus_gpu_ops import token_logprobs
from tokenbus_services.model_files import ModelTokenizer
from tokenbus_services.tokenizer_probes import digest_of, encoder_of, probed
from tokenbus_services.worker import StepArrays

SUPPORTED = ("5.19",)
"""The versions of transformers that were tried, by their first two numbers: what is used here is not public there."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """How the engine runs. An option out of range is a ValueError with the option, the limit and the value."""

    model: Path
    """The model's folder."""
    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:1."""
    dtype: str = "auto"
    """What it computes in; auto: as the weights were saved."""
    role: str = "mixed"
    max_running: int = 64
    """The most requests in a step; others wait."""
    context: int = 0
    """The most tokens of a request's prompt and output together; 0: as much as the model has."""
    prefill_chunk: int = 512
    """The most tokens of prompts in a step."""
    max_top_logprobs: int = 20
    """The most alternatives that a request may ask for."""
    cache_tokens: int = 65_536
    """How many tokens the cache holds, of all requests together."""
    block_tokens: int = 256
    """How many tokens a block of the cache holds."""

    def __post_init__(self) -> None:
        """Refuse an option out of range."""
        if self.role != "mixed":
            raise ValueError(f"worker.role: mixed for the engine transformers, got {self.role}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: one of {', '.join(DTYPES)}, got {self.dtype}")
        check_range("--max-running", self.max_running, 1, 1024)
        check_range("--prefill-chunk", self.prefill_chunk, 1, 65_536)
        check_range("--cache-tokens", self.cache_tokens, 2 * self.block_tokens, 2**30)
        check_range("max_top_logprobs", self.max_top_logprobs, 0, 127)


@dataclass(slots=True, kw_only=True)
class _Request(Request):
    """A request, as far as it got."""

    position: int = 0
    runs: bool = False
    """Whether transformers computes it, and it does not wait."""

    def status_after(self, token: int, ends: frozenset[int]) -> RowStatus:
        """Return what becomes of it with its next token."""
        is_stopped = self.stops is not None and self.stops.take([token])
        if is_stopped or (token in ends and not self.ignores_end):
            return RowStatus.FINISHED_STOP
        return RowStatus.ACTIVE if self.position + 1 < self.most else RowStatus.FINISHED_LENGTH


class _Row(NamedTuple):
    """A request's row of a step."""

    request: _Request
    position: int
    status: RowStatus
    token: int | None


class _Chosen(NamedTuple):
    """The tokens of a step, each with the line of logits that it was chosen from."""

    names: Sequence[str] = ()
    tokens: Sequence[int] = ()
    logits: Any = None


class _Tokenizer:
    """The model's tokenizer, with the model's vocabulary, which may have ids that the tokenizer lacks."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        self.of_files = ModelTokenizer(folder)
        self.vocabulary_size = vocabulary_size
        self.encode = self.of_files.encode

    def token_bytes(self, token_id: int) -> bytes:
        return self.of_files.token_bytes(token_id) if token_id < self.of_files.vocabulary_size else b""


class TransformersEngine:
    """An engine of any causal language model that transformers runs. Make it on the thread that steps it."""

    def __init__(self, options: TransformersOptions) -> None:
        """Load the model and its cache.

        A ValueError says which option or version does not fit, a RuntimeError or ImportError what is missing.
        """
        folder = options.model
        if not (folder / "config.json").is_file():
            what = "a folder without config.json" if folder.is_dir() else "no folder"
            raise ValueError(f"--model: the folder of a model, got {what}: {folder}")
        transformers = _imported()
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=options.dtype, local_files_only=True
            ).to(options.device)
        except Exception as error:
            raise RuntimeError(f"the model cannot be loaded: {type(error).__name__}: {_line(error)}") from error
        config = self._model.config.get_text_config()
        self._tokenizer = _Tokenizer(folder, config.vocab_size)
        most = min(config.max_position_embeddings, options.cache_tokens - options.block_tokens)
        check_range("--context", options.context, 0, most)
        self._options = replace(options, context=options.context or most)
        ends = self._model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._batches = self._prepared(transformers)
        requests = import_module("transformers.generation.continuous_batching.requests")
        self._new_state = requests.RequestState
        self._requests: dict[str, _Request] = {}
        self._aborted: list[str] = []
        self._chosen = _Chosen()

    @property
    def vocabulary_size(self) -> int:
        """How many token ids the model has."""
        return self._tokenizer.vocabulary_size

    @property
    def max_model_tokens(self) -> int:
        """How many tokens a request's prompt and output may have together."""
        return self._options.context

    @property
    def tokenizer_probes(self) -> Sequence[int]:
        """What its tokenizer makes of certain texts."""
        return probed(encoder_of(self._tokenizer.of_files))

    @property
    def tokenizer_digest(self) -> int:
        """A digest that tells whether a gateway has the same tokenizer."""
        return digest_of(self._tokenizer.of_files, self.tokenizer_probes)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is; a ValueError says what is wrong with it."""
        if state is not None:
            raise ValueError("state: none for the engine transformers, got one")
        if generate.include_draft_logprobs:
            raise ValueError("include_draft_logprobs: the engine transformers drafts nothing, got true")
        name = f"{generate.request_key:016x}"
        if name in self._requests:
            raise ValueError(f"request_key: one that is not in use, got {generate.request_key}")
        options = self._options
        request = request_of(
            generate, self._tokenizer, _Request, context=options.context, max_top_logprobs=options.max_top_logprobs
        )
        # What ends a request is seen here, so transformers is told of no end.
        self._batches.scheduler.add_waiting_request(
            self._new_state(request_id=name, initial_tokens=request.prompt, max_new_tokens=None)
        )
        self._requests[name] = request
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        name = f"{key:016x}"
        if name in self._requests and name not in self._aborted:
            self._aborted.append(name)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step of what transformers schedules."""
        aborted, self._aborted = self._aborted, []
        rows = [self._row(name, RowStatus.ABORTED) for name in aborted]
        self._forget(aborted)
        self._chosen = _Chosen()
        batches = self._batches
        if batches.prepare_next_batch():
            batches._generation_step(self._model)  # noqa: SLF001 - it has no public name
            scheduled = [each.state.request_id for each in batches.inputs_and_outputs.requests_in_batch]
            batches.update_batch()
            waiting = [name for name in batches.scheduler.waiting_requests if self._requests[name].runs]
            rows += [self._row(name, RowStatus.PREEMPTED) for name in waiting]
            rows += [self._row(name, RowStatus.PREFILLING) for name in scheduled if name not in self._chosen.names]
        ended = []
        for name, token in zip(self._chosen.names, self._chosen.tokens, strict=True):
            rows.append(self._row(name, self._requests[name].status_after(token, self._ends), token))
            self._requests[name].position += 1
            if rows[-1].status is not RowStatus.ACTIVE:
                ended.append(name)
        self._forget(ended)
        return [_arrays(rows, self._chosen)] if rows else []

    def close(self) -> None:
        """Let go of the model, its cache and the requests."""
        del self._batches, self._model, self._requests

    def _prepared(self, transformers: ModuleType) -> Any:  # noqa: ANN401 - its ContinuousBatchProcessor
        """Return what schedules and computes batches, with this engine's choice of tokens in the place of its own."""
        options = self._options
        manager = self._model.init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            transformers.ContinuousBatchingConfig(
                page_size=options.block_tokens,
                num_blocks=options.cache_tokens // options.block_tokens,
                max_batch_tokens=options.max_running + options.prefill_chunk,
                max_requests_per_batch=options.max_running,
                # A captured graph would not call `_choose`, and a batch ahead would not know its tokens.
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        batches = manager._create_batch_processor()  # noqa: SLF001 - as in `step`
        batches.model_runner._sample = self._choose  # noqa: SLF001 - as above
        return batches

    def _choose(self, scores: Any, output_ids: Any) -> None:  # noqa: ANN401 - tensors
        """Choose a token from each line of logits; transformers calls this in the place of its own sampling."""
        scheduled = self._batches.inputs_and_outputs.requests_in_batch
        names = [each.state.request_id for each in scheduled if each.has_new_token]
        logits = scores[0, : len(names)]
        ids = _sampled(logits, [self._requests[name] for name in names])
        output_ids[0, : len(names)].copy_(ids)
        self._chosen = _Chosen(names, ids.tolist(), logits)

    def _row(self, name: str, status: RowStatus, token: int | None = None) -> _Row:
        request = self._requests[name]
        request.runs = status in {RowStatus.ACTIVE, RowStatus.PREFILLING}
        return _Row(request, request.position, status, token)

    def _forget(self, names: Iterable[str]) -> None:
        """Let go of requests that have ended, here and in transformers."""
        scheduler = self._batches.scheduler
        for name in names:
            del self._requests[name]
            scheduler.set_request_cancellation(name)
            # After a preemption it takes no waiting request until one has finished; a cancelled one it does not count.
            scheduler.block_new_requests = False
        scheduler.clear_cancelled_requests()


def _imported() -> ModuleType:
    """Return transformers, of a version that is supported."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        line = "transformers is not installed: pip install 'tokenbus[transformers]'"
        raise ImportError(line, name="transformers") from None
    if ".".join(transformers.__version__.split(".")[:2]) not in SUPPORTED:
        raise ValueError(f"transformers: version {' or '.join(SUPPORTED)}, got {transformers.__version__}")
    return transformers


def _sampled(logits: Any, requests: Sequence[_Request]) -> Any:  # noqa: ANN401 - tensors
    """Return each line's token: the most probable one, or one drawn as its request wants it."""
    import torch

    ids = logits.argmax(-1)
    lines = [line for line, request in enumerate(requests) if request.temperature]
    if not lines:
        return ids
    drawn = [requests[line] for line in lines]
    seeds = np.array([request.seed for request in drawn], np.uint64)
    numbers = uniforms(seeds, np.array([request.position for request in drawn], np.int64), 0)

    def column(values: Iterable[float]) -> Any:  # noqa: ANN401 - as above
        return torch.tensor(list(values), dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits[lines].double() / column(request.temperature for request in drawn)
    ranked, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    places = torch.arange(ranked.shape[1], device=logits.device)
    ranked[places >= column(request.top_k or ranked.shape[1] for request in drawn)] = 0
    before = ranked.cumsum(-1) - ranked
    ranked[before >= column(request.top_p for request in drawn) * ranked.sum(-1, keepdim=True)] = 0
    sums = ranked.cumsum(-1)
    found = (sums <= column(numbers) * sums[:, -1:]).sum(-1, keepdim=True)
    found = found.minimum((ranked > 0).sum(-1, keepdim=True) - 1)  # rounding may lead behind the last
    ids[lines] = order.gather(-1, found)[:, 0]
    return ids


def _arrays(rows: Sequence[_Row], chosen: _Chosen) -> StepArrays:
    """Return a step; the rows with tokens are the last."""
    requests = [row.request for row in rows]
    counts = np.array([row.token is not None for row in rows], np.uint8)
    wanted = np.array([request.is_scored for request in requests], np.bool_)
    scores: dict[str, Any] = {}
    if (wanted & (counts > 0)).any():
        found = token_logprobs(
            chosen.logits,
            np.array(chosen.tokens, np.int64),
            top_k=[request.top_logprobs for request in requests],
            token_counts=counts,
            scored=wanted,
        )
        scores = {
            "logprobs": found.logprobs,
            "ranks": found.ranks,
            "alternative_token_ids": found.alternative_token_ids,
            "alternative_logprobs": found.alternative_logprobs,
            "scored": wanted,
            "top_ks": found.top_ks,
        }
    return StepArrays(
        request_keys=np.array([request.key for request in requests], np.uint64),
        positions=[row.position for row in rows],
        token_counts=counts,
        token_ids=chosen.tokens,
        statuses=np.array([row.status for row in rows], np.uint8),
        **scores,
    )


def _line(error: BaseException) -> str:
    """Return what an error says in one line."""
    return " ".join(str(error).split()) or type(error).__name__
