"""NgramEngine: a language model of n-grams with speculative decoding, in numpy alone."""

from collections.abc import Sequence

import numpy as np

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.emission import raise_failed
from tokenbus_engines.ngram.handoff import RequestState
from tokenbus_engines.ngram.model import Ids, default_model
from tokenbus_engines.ngram.requests import Requests, admitted
from tokenbus_engines.ngram.schedule import NgramOptions, Plan, Schedule
from tokenbus_engines.ngram.speculation import propose
from tokenbus_engines.ngram.step import Block, Outcome, Proposed, computed, draft_arrays, outcome, target_arrays
from tokenbus_engines.ngram.tokenizer import default_tokenizer
from tokenbus_services.worker import EngineStepError
from tokenbus_services.worker.step import StepArrays


class NgramEngine:
    """Computes steps for all running requests at once, each with its own sampling parameters."""

    def __init__(self, options: NgramOptions | None = None) -> None:
        """Learn the text that comes with the package, once in a process; that takes less than a second."""
        self._options = options or NgramOptions()
        self._model = default_model()
        self._tokenizer = default_tokenizer()
        self._requests = Requests(self._options.speculate, self.vocabulary_size)
        self._schedule = Schedule(self._requests, self._options)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return self._tokenizer.vocabulary_size

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._requests) > 0

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return self._tokenizer.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""
        if generate.request_key in self._requests:
            raise ValueError(f"request_key: one that is not in use, got {generate.request_key}")
        request = admitted(generate, state, self._model, self._tokenizer, self._options)
        self._schedule.add(self._requests.add(request))
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        slot = self._requests.slot(key)
        if slot is not None:
            self._schedule.abort(slot)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: the target's batch, then the draft's if a request wants it.

        Requests change only once all is computed: an EngineStepError leaves them as they were.
        """
        if not len(self._requests):
            return []
        before = self._schedule.snapshot()
        try:
            plan = self._schedule.plan()
            block = computed(self._model, self._requests, plan, self._options.speculate)
            result = outcome(self._requests, block, self._tokenizer.end_token)
            made = self._arrays(plan, block, result)
        except EngineStepError:
            self._schedule.restore(before)
            raise
        except Exception as error:
            self._schedule.restore(before)
            raise EngineStepError(f"{type(error).__name__}: {error}") from error
        self._go_on(plan, block, result)
        return made

    def close(self) -> None:
        """Let go of the requests."""
        self._requests = Requests(0, self.vocabulary_size)

    def _arrays(self, plan: Plan, block: Block, result: Outcome) -> list[StepArrays]:
        proposed = self._handed_off(block, result) if self._options.role == "prefill" else None
        speculate = self._options.speculate
        target = target_arrays(self._model, self._requests, plan, block, result, proposed, speculate)
        draft = draft_arrays(self._model, self._requests, target, block)
        return [target] if draft is None else [target, draft]

    def _handed_off(self, block: Block, result: Outcome) -> Proposed:
        """Hand off the requests that have not ended, with what the draft proposes and a state for each."""
        requests, model, speculate = self._requests, self._model, self._options.speculate
        places = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        result.statuses[places] = RowStatus.HANDED_OFF
        slots = block.slots[places]
        after, positions = block.emitted.after[places], requests.positions[slots] + 1
        front = requests.front(slots)._replace(contexts=after, positions=positions)
        proposals = propose(model, front, speculate).tokens
        states: dict[int, bytes] = {}
        failed: dict[int, Exception] = {}
        for place, slot, ids in zip(places.tolist(), slots.tolist(), proposals.tolist(), strict=True):
            tokens = block.emitted.tokens[place, : result.kept[place]].tolist()
            prompt, seed, key = int(requests.prompts[slot]), int(requests.seeds[slot]), int(requests.keys[slot])
            try:
                states[key] = RequestState(model.fingerprint, prompt, tokens, seed, ids).written()
            except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                failed[key] = error
        raise_failed(failed)
        counts = np.zeros(block.slots.size, np.int64)
        counts[places] = speculate
        return Proposed(counts, proposals.ravel(), states)

    def _go_on(self, plan: Plan, block: Block, result: Outcome) -> None:
        """Bring the requests to where they are after a step, and forget those that ended."""
        requests = self._requests
        requests.positions[block.slots] += result.kept
        requests.contexts[block.slots] = block.emitted.after
        if block.drafted is not None:
            requests.has_proposals[plan.decode] = False
        for slot, tail in result.tails.items():
            requests.stops[slot].tail = tail
        self._forget(block.slots[result.statuses != RowStatus.ACTIVE])
        if plan.aborted.size:
            requests.remove(plan.aborted)

    def _forget(self, ended: Ids) -> None:
        if ended.size:
            self._schedule.remove(ended)
            self._requests.remove(ended)
