"""A defect within a step ends the requests that it is about, and the others' tokens stay what they would have been."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engines.ngram.runs import asked
from tests.engines.paddle.needs import NEEDS_PADDLE
from tokenbus_contracts import RowStatus
from tokenbus_engines.handoff import RequestState
from tokenbus_engines.ngram import NgramEngine, NgramOptions, Tokenizer
from tokenbus_engines.ngram.model import Model
from tokenbus_engines.paddle import ByteTokenizer, PaddleEngine, PaddleOptions
from tokenbus_engines.paddle.runner import Runner
from tokenbus_services.worker import Engine, EngineStepError

ENGINES = [
    pytest.param(lambda role="mixed": NgramEngine(NgramOptions(role=role, prefill_chunk=3)), id="ngram"),
    pytest.param(
        lambda role="mixed": PaddleEngine(PaddleOptions(role=role, context=128, max_running=4)),
        id="paddle",
        marks=NEEDS_PADDLE,
    ),
]
REQUESTS = {
    1: asked(1, seed=1, max_tokens=12, stop=["zzz"]),
    2: asked(2, seed=2, max_tokens=12, stop=["poison"]),
    3: asked(3, seed=3, max_tokens=12),
    4: asked(4, seed=4, max_tokens=12, temperature=0.0),
}


class Poison(Exception):  # noqa: N818 - what a defect raises is not named by us
    """What a defect raises."""


class Outputs(dict[int, list[int]]):
    """What the requests of an engine got, step by step."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.ended: dict[int, RowStatus] = {}
        self.states: dict[int, bytes] = {}

    def step(self) -> None:
        """Add what a step gives to each request."""
        arrays = self.engine.step()[0]
        statuses = np.asarray(arrays.statuses).tolist()
        kept = arrays.token_counts if arrays.kept_counts is None else arrays.kept_counts
        ids = iter(arrays.token_ids)
        for key, count, left, status in zip(
            arrays.request_keys.tolist(), arrays.token_counts.tolist(), kept.tolist(), statuses, strict=True
        ):
            tokens = [int(next(ids)) for _ in range(count)]
            self.setdefault(key, []).extend(tokens[:left])
            self.ended[key] = RowStatus(status)
        self.states |= arrays.states

    def to_the_end(self) -> "Outputs":
        while self.engine.has_work:
            self.step()
        return self


def running(engine: Engine, steps: int) -> Outputs:
    """Return an engine with all requests, some steps on."""
    outputs = Outputs(engine)
    for generate in REQUESTS.values():
        engine.admit(generate)
    for _ in range(steps):
        outputs.step()
    return outputs


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:  # noqa: ANN401 - any class
    """Let the next call of a method raise, and return a list that grows when it has."""
    real = getattr(owner, name)
    calls: list[int] = []

    def broken(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
        if calls:
            return real(*arguments, **named)
        calls.append(1)
        raise Poison("broken")

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize("steps", [0, 2, 3])
@pytest.mark.parametrize("make", ENGINES)
def test_step_that_fails_is_computed_again(
    make: Callable[[], Engine], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails as a whole changes nothing: the next one, and all after it, give what it would have given.

    An abort that came before it is not forgotten, whether its request was running or not.
    """
    calm = running(make(), steps)
    calm.engine.abort(4)
    outputs = running(make(), steps)
    outputs.engine.abort(4)
    owner, name = (Model, "tokens") if isinstance(outputs.engine, NgramEngine) else (Runner, "logits")
    calls = failing_once(monkeypatch, owner, name)
    with pytest.raises(EngineStepError, match="Poison: broken") as raised:
        outputs.to_the_end()
    assert not raised.value.keys
    assert len(calls) == 1
    assert outputs.to_the_end() == calm.to_the_end()
    assert outputs.ended == calm.ended
    assert outputs.ended[4] is RowStatus.ABORTED


@pytest.mark.parametrize("make", ENGINES)
def test_defect_in_one_requests_stops_names_that_request(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the stops of one request cannot be looked for, the error names it alone; once aborted, the others go on."""
    calm = running(make(), 0).to_the_end()
    outputs = running(make(), 3)
    before = outputs[2].copy()
    tokenizer = Tokenizer if isinstance(outputs.engine, NgramEngine) else ByteTokenizer
    real = tokenizer.token_bytes
    expected = calm[2][len(before)]

    def broken(self: Any, token_id: int) -> bytes:  # noqa: ANN401 - either tokenizer
        if token_id == expected:
            raise Poison("no bytes")
        return real(self, token_id)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "token_bytes", broken)
        with pytest.raises(EngineStepError, match="Poison: no bytes") as raised:
            outputs.to_the_end()
    assert 2 in raised.value.keys
    for key in raised.value.keys:
        outputs.engine.abort(key)
    outputs.to_the_end()
    for key in REQUESTS.keys() - raised.value.keys:
        assert outputs[key] == calm[key]
        assert outputs.ended[key] is RowStatus.FINISHED_LENGTH
    assert {outputs.ended[key] for key in raised.value.keys} == {RowStatus.ABORTED}
    assert 3 not in raised.value.keys


@pytest.mark.parametrize("make", ENGINES)
def test_defect_in_one_hand_off_names_that_request(
    make: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one request's state cannot be written, the error names it alone, and the others are handed off."""
    calm = running(make("prefill"), 0).to_the_end()
    outputs = running(make("prefill"), 0)
    failing_once(monkeypatch, RequestState, "packed")
    with pytest.raises(EngineStepError, match="Poison: broken") as raised:
        outputs.to_the_end()
    (named,) = raised.value.keys
    outputs.engine.abort(named)
    outputs.to_the_end()
    assert outputs.ended.pop(named) is RowStatus.ABORTED
    assert set(outputs.ended.values()) == {RowStatus.HANDED_OFF}
    assert outputs.states.keys() == calm.states.keys() - {named}
    for key, state in outputs.states.items():
        fields, carried = state.split(b"\n", 1)
        true_fields, true_carried = calm.states[key].split(b"\n", 1)
        assert fields == true_fields
        # A product of matrices rounds by how many requests share it, on some processors.
        values, true_values = np.frombuffer(carried, np.float32), np.frombuffer(true_carried, np.float32)
        np.testing.assert_allclose(values, true_values, atol=1e-5)
