"""SyntheticEngine: no model at all, but steps like an engine's, whose every token can be computed again.

Which token a request has at a position, its logprob, rank and alternatives follow from the request's first key, the
position and the version of the weights alone, wherever and however often they are computed: the ground truth that tests
and benchmarks compare with.
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
"""From so many tokens one is sampled at most, where a request wants to know it."""
_MOST_SCORES = 2**18
"""The number of scored alternatives after which a step scores no other prompt."""
_UNLIMITED = 2**31 - 1
_OF_PROMPTS = 0x9E3779B97F4A7C15
"""Keeps what is true of prompts apart from what is true of tokens."""


class TrueTokens(NamedTuple):
    """Some tokens, and what is true of each; `extras` are as a Token has them."""

    ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    extras: Sequence[TokenExtras | None] = ()


def draws(keys: Words, positions: npt.NDArray[np.integer]) -> Words:
    """Return the number that everything about the token of each key and position follows from."""
    return mixed(keys ^ mixed(positions.astype(np.uint64)))


def sampled(numbers: Words) -> TrueTokens:
    """Return each number's token: one of the first few of its alternatives."""
    places = (numbers >> np.uint64(40)) % np.uint64(_RANKS)
    return TrueTokens(_ids(numbers, places), _logprobs(numbers, places), (places + np.uint64(1)).astype(np.uint32))


def alternatives(
    numbers: Words, top_ks: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the first alternatives of each number, as many as each wants, the most probable first."""
    wanted = top_ks.astype(np.intp)
    begins = np.cumsum(wanted) - wanted
    places = (np.arange(wanted.sum(), dtype=np.intp) - np.repeat(begins, wanted)).astype(np.uint64)
    owners = np.repeat(numbers, wanted)
    return _ids(owners, places), _logprobs(owners, places)


def true_tokens(  # noqa: PLR0913 - each has a name and a default
    key: int,
    begin: int,
    end: int,
    weight_version: int = 0,
    *,
    other_logprobs: bool = False,
    entropies: bool = False,
    logprob_token_ids: Sequence[int] = (),
    mask_bound: int = 0,
) -> TrueTokens:
    """Return the tokens that a request has from one position to before another, with the extras that it asked for."""
    asked = TokenScoring(
        other_logprobs=other_logprobs, entropies=entropies, token_ids=logprob_token_ids, mask_bound=mask_bound
    )
    extras = true_extras(key, begin, end, asked, weight_version) if asked.ListFields() else None
    return sampled(_numbers(key, begin, end, weight_version))._replace(extras=extras_by_token(extras, end - begin))


def _numbers(key: int, begin: int, end: int, weight_version: int) -> Words:
    positions = np.arange(begin, end, dtype=np.uint64)
    return draws(_weighed(np.full(positions.size, key, np.uint64), weight_version), positions)


def _weighed(keys: Words, weight_version: int) -> Words:
    """Return what tokens follow from with the weights of a version."""
    return keys ^ mixed(np.full(1, weight_version, np.uint64)) if weight_version else keys


def true_extras(key: int, begin: int, end: int, asked: TokenScoring, weight_version: int = 0) -> Extras:
    """Return what a request that asked for more has beside its tokens from one position to before another."""
    numbers = _numbers(key, begin, end, weight_version)
    places, of_none = np.zeros(numbers.size, np.uint64), slice(0)
    given = np.array(asked.token_ids, np.uint64)
    of_given = mixed(numbers[:, None] ^ given)
    sizes = _sizes(numbers)
    choices = [
        _choices(number, size) for number, size in zip(numbers, sizes.tolist(), strict=True) if size <= asked.mask_bound
    ]
    return Extras(
        _logprobs(mixed(numbers), places)[slice(None) if asked.other_logprobs else of_none],
        _entropies(numbers)[slice(None) if asked.entropies else of_none],
        given.astype(np.uint32),
        _logprobs(of_given, np.zeros(of_given.shape, np.uint64)),
        sizes[slice(None) if asked.mask_bound else of_none],
        np.concatenate([np.zeros(0, np.uint32), *choices]),
        asked.mask_bound,
    )


def _sizes(numbers: Words) -> npt.NDArray[np.uint32]:
    return (numbers >> np.uint64(33)).astype(np.uint32) % _MOST_CHOICES + 1


def _choices(number: np.uint64, size: int) -> npt.NDArray[np.uint32]:
    """Return the token ids that one is sampled from."""
    return np.sort(_ids(np.full(size, number, np.uint64), np.arange(size, dtype=np.uint64)))


def _entropies(numbers: Words) -> npt.NDArray[np.float32]:
    return ((numbers >> np.uint64(44)) % np.uint64(512)).astype(np.float32) / np.float32(64)


def true_prompt_scores(key: int, prompt: Sequence[int], asked: PromptScoring, request_id: int = 0) -> PromptScores:
    """Return what is true of a prompt's tokens, which follows from the request's first key."""
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
    key: int
    first_key: int
    """What its tokens follow from."""
    position: int
    end: int
    top_k: int
    is_scored: bool
    is_aborted: bool = False
    has_begun: bool = False
    unscored: tuple[Sequence[int], PromptScoring] | None = None
    """Its prompt, which is still to be scored, and how."""
    prompt_scores: PromptScores | None = None
    """What is still to be said of its prompt."""
    token_scoring: TokenScoring | None = None
    """What it wants to know beside logprobs."""


class SyntheticEngine:
    """Emits a few tokens a step for each request, in an order of rows that is not the batch's."""

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
        """Requests beyond `max_rows` wait; in the role `prefill` each leaves after one token."""
        self._role = role
        self._tokens_per_step = 1 if role == "prefill" else tokens_per_step
        self._drafts = drafts
        self._parts = parts
        self._max_rows = max_rows
        self._requests: dict[int, _Running] = {}
        self._step = 0
        self.weight_version = 0
        """What its tokens follow from, too."""
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
        """Whether a step would do anything."""
        return bool(self._runnable())

    def _runnable(self) -> list[_Running]:
        """Return what a step computes: while it is paused, those that end, and of the others those that run."""
        rows = self._requests.values()
        if not self._pauses_new:
            return list(rows)
        return [row for row in rows if row.is_aborted or (row.has_begun and not self._pauses_running)]

    def admit(self, generate: Generate) -> int:
        """Take a request, and return how long its prompt is."""
        sampling = generate.sampling
        offered = OFFERED | {"lora_adapter"} if sampling.lora_adapter in self.lora_adapters else OFFERED
        check_offered(sampling, offered)  # its tokens follow from the key, whatever is said of how they are chosen
        end = sampling.max_tokens if sampling.HasField("max_tokens") else _UNLIMITED
        scored = generate.HasField("top_logprobs")
        key = generate.request_id
        if key in self._requests:
            raise ValueError(f"request_id: one that is not in use, got {key}")
        begin = len(generate.continuation.token_ids)
        first_key = generate.first_request_id or key
        prompt = list(generate.tokens.token_ids) or list(generate.text.text.encode())
        row = _Running(key, first_key, begin, end, generate.top_logprobs if scored else 0, scored)
        if generate.HasField("token_scoring"):
            row.token_scoring = generate.token_scoring
        if generate.HasField("prompt_scoring"):
            asked = generate.prompt_scoring
            row.unscored = prompt, asked
            row.end = 0 if asked.without_generation else end
        self._requests[key] = row
        return len(prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step."""
        request = self._requests.get(key)
        if request is not None:
            request.is_aborted = True

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: the target, then the draft."""
        self._step += 1
        rows = self._scored(self._runnable()[: self._max_rows])
        # Engines sort rows by what they compute for them; here by the step's number.
        order = np.random.default_rng(self._step).permutation(len(rows))
        rows = [rows[place] for place in order]
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
                del self._requests[row.key]
        return made

    @staticmethod
    def _scored(rows: Sequence[_Running]) -> list[_Running]:
        """Return the rows whose prompts need no more scores; of long prompts a step scores one, as engines do."""
        scored, values = [], 0
        for row in rows:
            if row.unscored is not None and not row.is_aborted and values < _MOST_SCORES:
                prompt, asked = row.unscored
                row.prompt_scores = true_prompt_scores(row.first_key, prompt, asked, row.key)
                row.unscored = None
                values += row.prompt_scores.alternative_logprobs.size
            if row.unscored is None or row.is_aborted:
                scored.append(row)
        return scored

    def pause(self, *, running: bool) -> None:
        """Begin no new request, and go on with none if `running`."""
        self._pauses_new, self._pauses_running = True, running

    def resume(self) -> None:
        """Compute all of them."""
        self._pauses_new = self._pauses_running = False

    def load_weights(self, folder: Path) -> None:
        """Look whether there are weights; those of this engine are their version alone."""
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"load_weights.folder: a folder with *.safetensors, got {str(folder)!r} without")

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        """Take nothing: as above. `{"fails": true}` fails, for who wants to see what then happens."""
        if isinstance(arguments, Mapping) and arguments.get("fails"):
            raise RuntimeError(f"the transfer broke at {WeightTransferStage.Name(stage)}")

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        """Keep none."""

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        """Have an adapter of that name, which changes no token."""
        if name in self.lora_adapters and not replace:
            raise ValueError(f"load_adapter.name: one that is not loaded, got {name!r}")
        if not folder.is_dir():
            raise ValueError(f"load_adapter.folder: a folder, got {str(folder)!r}")
        self.lora_adapters = (*(each for each in self.lora_adapters if each != name), name)

    def unload_adapter(self, name: str) -> None:
        """Have it no more."""
        if name not in self.lora_adapters:
            raise ValueError(f"unload_adapter.name: one that is loaded, got {name!r}")
        self.lora_adapters = tuple(each for each in self.lora_adapters if each != name)

    def close(self) -> None:
        """Forget every request."""
        self._requests.clear()

    def _arrays(self, rows: Sequence[_Running]) -> StepArrays:
        counts = np.array([self._count(row) for row in rows], np.uint8)
        first_keys = _weighed(np.array([row.first_key for row in rows], np.uint64), self.weight_version)
        positions = np.array([row.position for row in rows], np.uint32)
        top_ks = np.array([row.top_k for row in rows], np.uint8)
        starts = np.cumsum(counts, dtype=np.intp) - counts
        places = np.arange(counts.sum(dtype=np.intp)) - np.repeat(starts, counts)
        numbers = draws(np.repeat(first_keys, counts), np.repeat(positions, counts) + places)
        tokens = sampled(numbers)
        other_ids, other_logprobs = alternatives(numbers, np.repeat(top_ks, counts))
        statuses = [self._status(row) for row in rows]
        arrays = StepArrays(
            request_ids=np.array([row.key for row in rows], np.uint64),
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
        return (
            replace(arrays, **self._extras(rows, counts, numbers)) if any(row.token_scoring for row in rows) else arrays
        )

    @staticmethod
    def _extras(rows: Sequence[_Running], counts: npt.NDArray[np.uint8], numbers: Words) -> dict[str, Any]:
        """Return the arrays of what some rows want to know beside logprobs; `numbers` are those of their tokens."""
        asked = [row.token_scoring or TokenScoring() for row in rows]
        given_counts = np.array([len(each.token_ids) for each in asked], np.uint32)
        mask_bounds = np.array([each.mask_bound for each in asked], np.uint32)
        owners = np.repeat(np.arange(len(rows)), counts)
        given_ids = np.concatenate([np.array(each.token_ids, np.uint64) for each in asked])
        # Each token has a logprob of each id that its row names.
        widths = given_counts[owners].astype(np.intp)
        begins = (np.cumsum(given_counts) - given_counts)[owners].astype(np.intp)
        places = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths - begins, widths)
        of_given = mixed(np.repeat(numbers, widths) ^ given_ids[places])
        sizes = _sizes(numbers)
        masks = [_choices(numbers[place], sizes[place]) for place in np.flatnonzero(sizes <= mask_bounds[owners])]

        def of_tokens(values: npt.NDArray[Any], wanted: Sequence[bool]) -> npt.NDArray[Any]:
            return np.where(np.array(wanted)[owners], values, np.zeros(1, values.dtype))

        nothing = np.zeros(numbers.size, np.uint64)
        return {
            "extras": np.array(
                [each.other_logprobs * Extra.OTHER_LOGPROB + each.entropies * Extra.ENTROPY for each in asked], np.uint8
            ),
            "given_counts": given_counts,
            "mask_bounds": mask_bounds,
            "other_logprobs": of_tokens(_logprobs(mixed(numbers), nothing), [each.other_logprobs for each in asked]),
            "entropies": of_tokens(_entropies(numbers), [each.entropies for each in asked]),
            "mask_sizes": of_tokens(sizes, [each.mask_bound > 0 for each in asked]),
            "given_token_ids": given_ids.astype(np.uint32),
            "given_logprobs": _logprobs(of_given, np.zeros(of_given.size, np.uint64)),
            "mask_token_ids": np.concatenate([np.zeros(0, np.uint32), *masks]),
        }

    def _count(self, row: _Running) -> int:
        return 0 if row.is_aborted else min(self._tokens_per_step, row.end - row.position)

    def _status(self, row: _Running) -> RowStatus:
        if row.is_aborted:
            return RowStatus.ABORTED
        if row.position + self._count(row) >= row.end:
            return RowStatus.FINISHED_LENGTH
        return RowStatus.HANDED_OFF if self._role == "prefill" else RowStatus.ACTIVE
