"""PrefixEngine: a token follows from its turn's id and all tokens before it, so that a mixture of turns looks wrong."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tokenbus.worker import EngineStepError, StepArrays
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate

VOCABULARY_SIZE = 50_000
_TOKENS_PER_STEP = 3


def next_token(turn_id: int, prefix: Sequence[int]) -> int:
    told = turn_id.to_bytes(8, "big") + np.array(prefix, np.uint32).tobytes()
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "big") % VOCABULARY_SIZE


def _state(turn_id: int, tokens: Sequence[int]) -> bytes:
    return next_token(turn_id, tokens).to_bytes(4, "big")


class PrefixEngine:
    """Emits up to three tokens a step for each request, and can be told to fail.

    With the role prefill it hands each request off in its first step, with a state that tells its turn and its tokens.
    """

    vocabulary_size = VOCABULARY_SIZE
    continues_requests = True

    def __init__(self, role: str = "mixed") -> None:
        self._role = role
        self._rows: dict[int, tuple[list[int], int]] = {}
        self._aborted: set[int] = set()
        self.fails_next = False

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def admit(self, generate: Generate) -> int:
        assert generate.request_id not in self._rows
        key, tokens, state = (
            generate.request_id,
            list(generate.continuation.token_ids),
            generate.continuation.transfer_state,
        )
        assert not state or state == _state(key, tokens), "a state is of its own turn and tokens"
        assert bool(state) == (self._role == "decode")
        self._rows[key] = tokens, generate.sampling.max_tokens
        return len(generate.tokens.token_ids)

    def abort(self, key: int) -> None:
        if key in self._rows:
            self._aborted.add(key)

    def step(self) -> Sequence[StepArrays]:
        if self.fails_next:
            self.fails_next = False
            raise EngineStepError("as the test wants", list(self._rows)[:1])
        keys, made, statuses, begins, states = list(self._rows), [], [], [], {}
        for key in keys:
            tokens, end = self._rows[key]
            begins.append(len(tokens))
            for _ in range(0 if key in self._aborted else min(_TOKENS_PER_STEP, end - len(tokens))):
                tokens.append(next_token(key, tokens))
            made.append(tokens[begins[-1] :])
            is_whole = len(tokens) >= end
            goes_on = RowStatus.HANDED_OFF if self._role == "prefill" else RowStatus.ACTIVE
            status = RowStatus.FINISHED_LENGTH if is_whole else goes_on
            statuses.append(RowStatus.ABORTED if key in self._aborted else status)
            if statuses[-1] is RowStatus.HANDED_OFF:
                states[key] = _state(key, tokens)
            if statuses[-1] is not RowStatus.ACTIVE:
                del self._rows[key]
        self._aborted.clear()
        ids = [token for tokens in made for token in tokens]
        return [
            StepArrays(
                request_ids=np.array(keys, np.uint64),
                positions=np.array(begins, np.uint32),
                token_counts=np.array(list(map(len, made)), np.uint8),
                token_ids=np.array(ids, np.uint32),
                statuses=np.array(statuses, np.uint8),
                transfer_states=states,
            )
        ]

    def close(self) -> None:
        self._rows.clear()
