"""NgramEngine: a language model of n-grams with speculative decoding, in numpy alone."""

from collections.abc import Sequence

import numpy as np

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.ngram.admission import checked
from tokenbus_engines.ngram.block import Block, Outcome, computed, outcome
from tokenbus_engines.ngram.emission import Proposed, draft_arrays, target_arrays
from tokenbus_engines.ngram.handoff import RequestState
from tokenbus_engines.ngram.model import default_model
from tokenbus_engines.ngram.options import NgramOptions
from tokenbus_engines.ngram.rows import Rows
from tokenbus_engines.ngram.schedule import Schedule
from tokenbus_engines.ngram.speculation import propose
from tokenbus_engines.ngram.tokenizer import default_tokenizer
from tokenbus_services.worker.step import StepArrays


class NgramEngine:
    """Computes steps for all running requests at once, whatever each of them asks for."""

    def __init__(self, options: NgramOptions | None = None) -> None:
        """Learn the text that comes with the package, which takes less than a second; once in a process."""
        self._options = options or NgramOptions()
        self._model = default_model()
        self._tokenizer = default_tokenizer()
        self._rows = Rows(self._options.speculate)
        self._schedule = Schedule(self._rows, self._options)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return self._tokenizer.vocabulary_size

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._rows) > 0

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return self._tokenizer.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""
        if generate.request_key in self._rows:
            raise ValueError(f"request_key: one that is not in use, got {generate.request_key}")
        asked = checked(generate, state, self._model, self._tokenizer, self._options)
        self._schedule.add(self._rows.add(asked))
        return asked.prompt_tokens

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        slot = self._rows.slot(key)
        if slot is not None:
            self._schedule.abort(slot)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: the target's batch, then the draft's if anybody wants it."""
        if not len(self._rows):
            return []
        rows, speculate = self._rows, self._options.speculate
        plan = self._schedule.plan()
        block = computed(self._model, rows, plan.decode, plan.first, speculate)
        result = outcome(rows, block, self._tokenizer.end_token)
        proposed = self._handed_off(block, result) if self._options.role == "prefill" else None
        target = target_arrays(self._model, rows, plan, block, result, proposed, speculate)
        draft = draft_arrays(self._model, rows, target, block)
        rows.positions[block.slots] += result.kept
        rows.contexts[block.slots] = block.emitted.after
        self._forget(block, result)
        if plan.aborted.size:
            rows.remove(plan.aborted)
        return [target] if draft is None else [target, draft]

    def close(self) -> None:
        """Let go of the requests."""
        self._rows = Rows(0)

    def _handed_off(self, block: Block, result: Outcome) -> Proposed:
        """Hand off what goes on: propose what may follow, and write down what the next engine needs."""
        rows, model, speculate = self._rows, self._model, self._options.speculate
        places = (result.statuses == RowStatus.ACTIVE).nonzero()[0]
        result.statuses[places] = RowStatus.HANDED_OFF
        slots = block.slots[places]
        going = rows.going(slots)._replace(contexts=block.emitted.after[places], positions=rows.positions[slots] + 1)
        proposals = propose(model, going, speculate).tokens
        states = {}
        for place, slot, ids in zip(places.tolist(), slots.tolist(), proposals.tolist(), strict=True):
            tokens = block.emitted.tokens[place, : result.kept[place]].tolist()
            prompt, seed = int(rows.prompts[slot]), int(rows.seeds[slot])
            states[int(rows.keys[slot])] = RequestState(model.fingerprint, prompt, tokens, seed, ids).written()
        counts = np.zeros(block.slots.size, np.int64)
        counts[places] = speculate
        return Proposed(counts, proposals.ravel(), states)

    def _forget(self, block: Block, result: Outcome) -> None:
        ended = block.slots[result.statuses != RowStatus.ACTIVE]
        if ended.size:
            self._schedule.remove(ended)
            self._rows.remove(ended)
