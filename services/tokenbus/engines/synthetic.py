"""SyntheticEngine: an engine without a model, whose tokens can all be recomputed.

A token and its scores depend only on the id of the request's first turn, the position and the weight version. Tests and
benchmarks compare received tokens with recomputed tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.step import TokenExtras, extras_by_token
from tokenbus.engines.admission import OFFERED, check_offered
from tokenbus.engines.sampling import Words, mixed
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, PromptScores, RowStatus, SpeculativeMethod, ValueKind
from tokenbus_contracts.extras import Extra, Extras
from tokenbus_contracts.generated.control_pb2 import WeightTransferStage
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring, TokenScoring

VOCABULARY_SIZE = 50_000
_RANKS = 4
_MOST_CHOICES = 8
"""Maximum number of tokens in a synthetic sampling mask."""
_MOST_SCORES = 2**18
"""If a step has at least this number of prompt alternatives, further prompts wait."""
_UNLIMITED = 2**31 - 1
_OF_PROMPTS = 0x9E3779B97F4A7C15
"""Number that is mixed into a request's id, so that prompt scores differ from output scores."""


class TrueTokens(NamedTuple):
    """Expected tokens with their scores, and extra scores as in `Token`."""

    ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    extras: Sequence[TokenExtras | None] = ()


def draws(keys: Words, positions: npt.NDArray[np.integer]) -> Words:
    """Return, for each request and position, the number that determines the token."""
    return mixed(keys ^ mixed(positions.astype(np.uint64)))


def sampled(numbers: Words) -> TrueTokens:
    """Return the token that each random number selects among the most probable tokens."""
    places = (numbers >> np.uint64(40)) % np.uint64(_RANKS)
    return TrueTokens(_ids(numbers, places), _logprobs(numbers, places), (places + np.uint64(1)).astype(np.uint32))


def alternatives(
    numbers: Words, top_ks: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return `top_ks` alternatives for each random number, the most probable first."""
    wanted = top_ks.astype(np.intp)
    begins = np.cumsum(wanted) - wanted
    places = (np.arange(wanted.sum(), dtype=np.intp) - np.repeat(begins, wanted)).astype(np.uint64)
    owners = np.repeat(numbers, wanted)
    return _ids(owners, places), _logprobs(owners, places)


def true_tokens(  # noqa: PLR0913 - keyword-only with defaults
    request_id: int,
    begin: int,
    end: int,
    weight_version: int = 0,
    *,
    other_logprobs: bool = False,
    entropies: bool = False,
    logprob_token_ids: Sequence[int] = (),
    mask_bound: int = 0,
) -> TrueTokens:
    """Return the expected tokens of a request at positions [begin, end), with the requested extras."""
    asked = TokenScoring(
        other_logprobs=other_logprobs, entropies=entropies, token_ids=logprob_token_ids, mask_bound=mask_bound
    )
    extras = true_extras(request_id, begin, end, asked, weight_version) if asked.ListFields() else None
    numbers = _numbers(request_id, begin, end, weight_version)
    return sampled(numbers)._replace(extras=extras_by_token(extras, end - begin))


def _numbers(request_id: int, begin: int, end: int, weight_version: int) -> Words:
    positions = np.arange(begin, end, dtype=np.uint64)
    return draws(_weighed(np.full(positions.size, request_id, np.uint64), weight_version), positions)


def _weighed(request_ids: Words, weight_version: int) -> Words:
    """Mix the weight version into the request ids."""
    return request_ids ^ mixed(np.full(1, weight_version, np.uint64)) if weight_version else request_ids


def true_extras(request_id: int, begin: int, end: int, asked: TokenScoring, weight_version: int = 0) -> Extras:
    """Return the expected extras of a request at positions [begin, end)."""
    numbers = _numbers(request_id, begin, end, weight_version)
    places, of_none = np.zeros(numbers.size, np.uint64), slice(0)
    given = np.array(asked.token_ids, np.uint64)
    of_given = mixed(numbers[:, None] ^ given)
    entropies = ((numbers >> np.uint64(44)) % np.uint64(512)).astype(np.float32) / np.float32(64)
    sizes = (numbers >> np.uint64(33)).astype(np.uint32) % _MOST_CHOICES + 1
    choices = [
        np.sort(_ids(np.full(size, number, np.uint64), np.arange(size, dtype=np.uint64)))
        for number, size in zip(numbers, sizes.tolist(), strict=True)
        if size <= asked.mask_bound
    ]
    return Extras(
        _logprobs(mixed(numbers), places)[slice(None) if asked.other_logprobs else of_none],
        entropies[slice(None) if asked.entropies else of_none],
        given.astype(np.uint32),
        _logprobs(of_given, np.zeros(of_given.shape, np.uint64)),
        sizes[slice(None) if asked.mask_bound else of_none],
        np.concatenate([np.zeros(0, np.uint32), *choices]),
        asked.mask_bound,
    )


def true_prompt_scores(key: int, prompt: Sequence[int], asked: PromptScoring, request_id: int = 0) -> PromptScores:
    """Return the expected scores of a prompt, where `key` is the id of the request's first turn."""
    first = min(max(1, asked.first_position), len(prompt))
    positions = np.arange(first, len(prompt), dtype=np.uint64)
    numbers = draws(np.full(positions.size, key ^ _OF_PROMPTS, np.uint64), positions)
    true = sampled(numbers)
    named = np.array(asked.token_ids, np.uint64)
    ids, logprobs = alternatives(numbers, np.full(positions.size, asked.top_logprobs))
    if named.size:
        ids = np.broadcast_to(named.astype(np.uint32), (positions.size, named.size))
        logprobs = _logprobs(mixed(numbers[:, None] ^ named), np.zeros(ids.shape, np.uint64))
    return PromptScores(
        request_id or key,
        first,
        len(prompt),
        np.array(prompt[first:], np.uint32),
        true.logprobs,
        true.ranks,
        ids.reshape(positions.size, named.size or asked.top_logprobs),
        logprobs.reshape(positions.size, named.size or asked.top_logprobs),
        are_named=bool(named.size),
    )


def _ids(numbers: Words, places: Words) -> npt.NDArray[np.uint32]:
    return ((numbers % np.uint64(VOCABULARY_SIZE) + places) % np.uint64(VOCABULARY_SIZE)).astype(np.uint32)


def _logprobs(numbers: Words, places: Words) -> npt.NDArray[np.float32]:
    offset = ((numbers >> np.uint64(50)) % np.uint64(64)).astype(np.float32) / np.float32(64)
    return -(offset + places.astype(np.float32) / np.float32(4) + np.float32(0.125))


@dataclass(slots=True)
class _Running:
    request_id: int
    first_request_id: int
    """Id of the request's first turn, which determines the tokens."""
    position: int
    end: int
    top_k: int
    is_scored: bool
    is_aborted: bool = False
    has_begun: bool = False
    unscored: tuple[Sequence[int], PromptScoring] | None = None
    """Unscored prompt with the requested scoring, or None."""
    prompt_scores: PromptScores | None = None
    """Prompt scores that the next step sends."""
    token_scoring: TokenScoring | None = None
    """Extra scores that the request asks for."""


class SyntheticEngine:
    """Emits a few tokens per request and step, in shuffled rows."""

    vocabulary_size = VOCABULARY_SIZE
    continues_requests = True
    token_scores = frozenset(TokenScoring.DESCRIPTOR.fields_by_name)

    def __init__(
        self,
        *,
        tokens_per_step: int = 3,
        drafts: bool = False,
        parts: int = 1,
        max_rows: int = 512,
        role: str = "mixed",
    ) -> None:
        """Create an engine. Requests beyond `max_rows` wait. The role `prefill` ends each request after one token."""
        self._role = role
        self._tokens_per_step = 1 if role == "prefill" else tokens_per_step
        self._drafts = drafts
        self._parts = parts
        self._max_rows = max_rows
        self._requests: dict[int, _Running] = {}
        self._step = 0
        self.weight_version = 0
        """Version of the weights, which changes all tokens."""
        self.world_size = 1
        self.facts = {
            "dtype": "float32",
            "value_kind": ValueKind.RAW_LOGPROBS,
            "weight_transfer": "none",
            "max_adapters": 256,
            "max_adapter_rank": 512,
        }
        self.lora_adapters: tuple[str, ...] = ()
        self.max_model_tokens = 0
        self.tokenizer_digest, self.tokenizer_probes = 0, ()
        self._pauses_new = self._pauses_running = False

    @property
    def has_work(self) -> bool:
        return bool(self._runnable())

    def _runnable(self) -> list[_Running]:
        """Return the next step's requests. In a pause, only aborted requests and unpaused running requests remain."""
        rows = self._requests.values()
        if not self._pauses_new:
            return list(rows)
        return [row for row in rows if row.is_aborted or (row.has_begun and not self._pauses_running)]

    def admit(self, generate: Generate) -> int:
        sampling = generate.sampling
        offered = OFFERED | {"lora_adapter"} if sampling.lora_adapter in self.lora_adapters else OFFERED
        check_offered(sampling, offered)  # the offered parameters have no effect on the tokens
        end = sampling.max_tokens if sampling.HasField("max_tokens") else _UNLIMITED
        scored = generate.HasField("top_logprobs")
        request_id = generate.request_id
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id} is in use already")
        begin = len(generate.continuation.token_ids)
        first_id = generate.first_request_id or request_id
        prompt = list(generate.tokens.token_ids) or self.encode(generate.text.text)
        row = _Running(request_id, first_id, begin, end, generate.top_logprobs if scored else 0, scored)
        if generate.HasField("token_scoring"):
            row.token_scoring = generate.token_scoring
        if generate.HasField("prompt_scoring"):
            asked = generate.prompt_scoring
            row.unscored = prompt, asked
            row.end = 0 if asked.without_generation else end
        self._requests[request_id] = row
        return len(prompt)

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def abort(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.is_aborted = True

    def step(self) -> Sequence[StepArrays]:
        """Compute a step, and return its target batch and, if enabled, its draft batch."""
        self._step += 1
        rows = self._scored(self._runnable()[: self._max_rows])
        # Rows are shuffled by step number, because real engines also reorder rows.
        order = np.random.default_rng(self._step).permutation(len(rows))
        rows = [rows[index] for index in order]
        target = self._arrays(rows)
        target.index_to_batch_id = order.astype(np.uint32)
        target.prompt_scores = [row.prompt_scores for row in rows if row.prompt_scores is not None]
        made = [target]
        if self._drafts:
            made.append(replace(target, kind=BatchKind.DRAFT, statuses=None, draft_token_counts=None, prompt_scores=()))
            target.draft_follows = True
        for row, status in [(row, self._status(row)) for row in rows]:
            row.position += self._count(row)
            row.has_begun, row.prompt_scores = True, None
            if status is not RowStatus.ACTIVE:
                del self._requests[row.request_id]
        return made

    @staticmethod
    def _scored(rows: Sequence[_Running]) -> list[_Running]:
        """Score waiting prompts up to a limit, and return the rows whose prompts are completely scored."""
        scored, values = [], 0
        for row in rows:
            if row.unscored is not None and not row.is_aborted and values < _MOST_SCORES:
                prompt, asked = row.unscored
                row.prompt_scores = true_prompt_scores(row.first_request_id, prompt, asked, row.request_id)
                row.unscored = None
                values += row.prompt_scores.alternative_logprobs.size
            if row.unscored is None or row.is_aborted:
                scored.append(row)
        return scored

    def pause(self, *, running: bool) -> None:
        self._pauses_new, self._pauses_running = True, running

    def resume(self) -> None:
        self._pauses_new = self._pauses_running = False

    def load_weights(self, folder: Path) -> None:
        """Check that the folder has a file of weights, which this engine does not read."""
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"load_weights.folder: a folder with *.safetensors, got {str(folder)!r} without")

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        """Do nothing, or raise RuntimeError for the argument `{"fails": true}`, which tests use."""
        if isinstance(arguments, Mapping) and arguments.get("fails"):
            raise RuntimeError(f"the transfer broke at {WeightTransferStage.Name(stage)}")

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        """Do nothing, because this engine has no cache."""

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        """Register an adapter, which has no effect on tokens."""
        if name in self.lora_adapters and not replace:
            raise ValueError(f"load_adapter.name: {name!r} is loaded already")
        if not folder.is_dir():
            raise ValueError(f"load_adapter.folder: a folder, got {str(folder)!r}")
        self.lora_adapters = (*(each for each in self.lora_adapters if each != name), name)

    def unload_adapter(self, name: str) -> None:
        if name not in self.lora_adapters:
            raise ValueError(f"unload_adapter.name: {name!r} is not loaded")
        self.lora_adapters = tuple(each for each in self.lora_adapters if each != name)

    def close(self) -> None:
        self._requests.clear()

    def _arrays(self, rows: Sequence[_Running]) -> StepArrays:
        counts = np.array([self._count(row) for row in rows], np.uint8)
        first_ids = _weighed(np.array([row.first_request_id for row in rows], np.uint64), self.weight_version)
        positions = np.array([row.position for row in rows], np.uint32)
        top_ks = np.array([row.top_k for row in rows], np.uint8)
        starts = np.cumsum(counts, dtype=np.intp) - counts
        places = np.arange(counts.sum(dtype=np.intp)) - np.repeat(starts, counts)
        numbers = draws(np.repeat(first_ids, counts), np.repeat(positions, counts) + places)
        tokens = sampled(numbers)
        other_ids, other_logprobs = alternatives(numbers, np.repeat(top_ks, counts))
        statuses = [self._status(row) for row in rows]
        arrays = StepArrays(
            request_ids=np.array([row.request_id for row in rows], np.uint64),
            positions=positions,
            token_counts=counts,
            token_ids=tokens.ids,
            statuses=np.array(statuses, np.uint8),
            logprobs=tokens.logprobs,
            ranks=tokens.ranks,
            alternative_token_ids=other_ids,
            alternative_logprobs=other_logprobs,
            scored=np.array([row.is_scored for row in rows], np.bool_),
            top_ks=top_ks,
            draft_token_counts=np.maximum(counts, 1) - 1,
            method=SpeculativeMethod.MTP,
            weight_version=self.weight_version,
            parts=self._parts,
        )
        return replace(arrays, **self._extras(rows, counts)) if any(row.token_scoring for row in rows) else arrays

    def _extras(self, rows: Sequence[_Running], counts: npt.NDArray[np.uint8]) -> dict[str, Any]:
        asked = [row.token_scoring or TokenScoring() for row in rows]
        made = [
            true_extras(row.first_request_id, row.position, row.position + count, each, self.weight_version)
            for row, count, each in zip(rows, counts.tolist(), asked, strict=True)
        ]
        of_tokens = ("other_logprobs", "entropies", "given_token_ids", "given_logprobs", "mask_sizes", "mask_token_ids")
        kinds = [each.other_logprobs * Extra.OTHER_LOGPROB + each.entropies * Extra.ENTROPY for each in asked]
        return {
            "extras": np.array(kinds, np.uint8),
            "given_counts": np.array([len(each.token_ids) for each in asked], np.uint32),
            "mask_bounds": np.array([each.mask_bound for each in asked], np.uint32),
            **{name: np.concatenate([getattr(each, name).ravel() for each in made]) for name in of_tokens},
        }

    def _count(self, row: _Running) -> int:
        return 0 if row.is_aborted else min(self._tokens_per_step, row.end - row.position)

    def _status(self, row: _Running) -> RowStatus:
        if row.is_aborted:
            return RowStatus.ABORTED
        if row.position + self._count(row) >= row.end:
            return RowStatus.FINISHED_LENGTH
        return RowStatus.HANDED_OFF if self._role == "prefill" else RowStatus.ACTIVE
