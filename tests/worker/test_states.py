"""Handed-off states: whatever one contains ends its own request and no other, through the real loop."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import asked
from tests.in_process.builders import generate_of
from tests.worker.looped import Looped, batches, events
from tokenbus.engines.ngram import NgramEngine, NgramOptions
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.worker import Engine
from tokenbus.worker.publisher import ReceivedHandoff
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Abort, Generate

HUGE = [b"0", b"-1", b"65536", b"4294967296", b"18446744073709551615", b"9" * 30, b"1e308", b"null", b"[]"]
ENDS = {RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP}
Row = tuple[int, list[int], list[float]]


@dataclass(frozen=True)
class Kind:
    """A kind of engine: how one of each role is made, and requests that take long."""

    prefill: Callable[[], Engine]
    decode: Callable[[], Engine]
    asked: Callable[[int], Generate]
    rounds: int


KINDS = {
    "synthetic": Kind(lambda: SyntheticEngine(role="prefill"), lambda: SyntheticEngine(role="decode"), lambda key: generate_of(key, 2000, top_logprobs=0), 100),  # noqa: E501
    "ngram": Kind(
        lambda: NgramEngine(NgramOptions(role="prefill")),
        lambda: NgramEngine(NgramOptions(role="decode")),
        lambda key: asked(key, seed=key, max_tokens=400, ignore_end_token=True, top_logprobs=0),
        40,
    ),
    "paddle": Kind(
        lambda: PaddleEngine(PaddleOptions(role="prefill", context=256)),
        lambda: PaddleEngine(PaddleOptions(role="decode", context=256, max_running=8)),
        lambda key: asked(key, "One morning ", max_tokens=100, seed=key, ignore_end_token=True),
        30,
    ),
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize(
    "name",
    ["synthetic", "ngram", pytest.param("paddle", marks=[*NEEDS_PADDLE, pytest.mark.nightly])],
    ids=["synthetic", "ngram", "paddle"],
)


class Worker(Looped[Engine]):
    """A decode worker."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.answers: dict[int, str] = {}

    def take(self, *handed: tuple[Generate, bytes]) -> None:
        """Be handed requests, and compute a step."""

        def received(generate: Generate, state: bytes) -> ReceivedHandoff:
            def answer(refusal: str) -> None:
                assert generate.request_key not in self.answers
                self.answers[generate.request_key] = refusal

            return ReceivedHandoff(generate, state, answer)

        self.turn(*(received(*each) for each in handed))

    def rows(self, keys: Sequence[int]) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = {key: [] for key in keys}
        for made in batches(self.publisher):
            for row in made.rows():
                if row.key in found:
                    found[row.key].append((row.position, row.token_ids.tolist(), row.logprobs.tolist()))
        return found


def handed_off(kind: Kind, keys: Sequence[int]) -> dict[int, bytes]:
    engine, states = kind.prefill(), dict[int, bytes]()
    for key in keys:
        engine.admit(kind.asked(key))
    while engine.has_work:
        for arrays in engine.step():
            states |= arrays.states
    assert states.keys() == set(keys)
    return states


def mutated(state: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    data = bytearray(state)
    match draw.randrange(7):
        case 0:
            return bytes(data[: draw.randrange(len(data))])
        case 1:
            return bytes(data) + draw.randbytes(draw.randrange(1, 64))
        case 2:
            for _ in range(draw.randrange(1, 9)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 3:  # a number becomes another, as in JSON, or in the head of an array
            places = [found.span() for found in re.finditer(rb"\d+", bytes(data[:2000]))]
            if places:
                begin, end = draw.choice(places)
                data[begin:end] = draw.choice(HUGE)
        case 4:  # eight bytes are as large as can be
            begin = draw.randrange(len(data))
            data[begin : begin + 8] = draw.choice([b"\xff", b"\x00", b"\x7f"]) * len(data[begin : begin + 8])
        case 5:
            return draw.choice(others)
        case _:
            return draw.randbytes(draw.randrange(200))
    return bytes(data)


@EVERY_KIND
def test_mutated_states_end_their_own_requests_alone(name: str) -> None:
    kind, victims = KINDS[name], (1, 2)
    states = handed_off(kind, [*victims, 3])
    control = Worker(kind.decode())
    control.take(*[(kind.asked(key), states[key]) for key in victims])
    control.finish()
    others = [b"", bytes(8), (2**63).to_bytes(8, "little"), b"{}", states[1], *_states_of_other_kinds(name)]
    attacked, keys = Worker(kind.decode()), count(100)
    draw = random.Random(7)  # noqa: S311 - the same mutations each time
    attacked.take(*[(kind.asked(key), states[key]) for key in victims])
    taken = 0
    for key, _ in zip(keys, range(kind.rounds), strict=False):
        generate = kind.asked(3)
        generate.request_key = key
        attacked.take((generate, mutated(states[3], others, draw)))
        taken += not attacked.answers[key]
        if not attacked.answers[key]:
            attacked.publisher.take_request(Abort(request_key=key))  # or those that are taken keep the step busy
    attacked.finish()
    assert attacked.rows(victims) == control.rows(victims)
    assert attacked.publisher.counts.failed_steps == attacked.publisher.counts.engine_errors == 0
    assert len(attacked.answers) == kind.rounds + len(victims)
    assert taken < kind.rounds / 2
    assert all("\n" not in answer for answer in attacked.answers.values())
    assert not [event for event in events(attacked.publisher) if event.error.request_key in victims]


def _states_of_other_kinds(name: str) -> list[bytes]:
    return [
        state for other in ("synthetic", "ngram") if other != name for state in handed_off(KINDS[other], [3]).values()
    ]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda state: state[:8], "state: 20 bytes, got 8"),
        (lambda state: b"x" + state[1:], r"state.mark: b'tbsynth1', got b'xbsynth1'"),
        (lambda state: state[:8] + bytes(8) + state[16:], "state.request_key: 3, as the request has, got 0"),
        (lambda state: state[:16] + b"\xff" * 4, "state.position: below 2000, the most tokens of the request, got "),
        (lambda state: state[:16] + (2000).to_bytes(4, "little"), "state.position: below 2000, the most"),
    ],
)
def test_synthetic_state_is_checked_field_by_field(change: Callable[[bytes], bytes], refusal: str) -> None:
    """Length, mark, key and position of a state are compared with the request, and what is wrong is named."""
    kind = KINDS["synthetic"]
    state = handed_off(kind, [3])[3]
    engine = kind.decode()
    with pytest.raises(ValueError, match=re.escape(refusal)):
        engine.admit(kind.asked(3), change(state))
    assert not engine.has_work
    assert engine.admit(kind.asked(3), state) == 3


def test_request_that_an_engine_cannot_keep_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NgramEngine(NgramOptions())
    monkeypatch.setattr("tokenbus.engines.ngram.model.Model.context_of", lambda *_: "none")
    with pytest.raises(ValueError, match="invalid literal"):
        engine.admit(asked(7, seed=1, max_tokens=4))
    monkeypatch.undo()
    assert not engine.has_work
    assert engine.admit(asked(7, seed=1, max_tokens=4)) > 0
