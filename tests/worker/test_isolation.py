"""Whatever a request makes an engine raise ends that request: its neighbours go on, and so does the worker."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.in_process.builders import arrays_of, generate_of, ids
from tests.worker.looped import Looped, batches, events, running
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.testing import RowShape, batch
from tokenbus.worker import EngineBrokenError, EngineStepError, StepArrays
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate

ENGINE = ErrorCode.ERROR_CODE_ENGINE
POISON = 666


class PoisonedEngine(SyntheticEngine):
    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.error = error
        self.fails_from = 0
        self.refusal: Exception | None = None
        self.abort_error: Exception | None = None
        self.prompt_tokens: object = None

    def admit(self, generate: Generate) -> int:
        found: object = super().admit(generate)
        if generate.request_id == POISON:
            if self.refusal is not None:
                raise self.refusal
            found = found if self.prompt_tokens is None else self.prompt_tokens
        return found  # type: ignore[return-value]  # an engine may return anything

    def abort(self, key: int) -> None:
        super().abort(key)
        if self.abort_error is not None and key == POISON:
            raise self.abort_error

    def step(self) -> Sequence[StepArrays]:
        found = self._requests.get(POISON)
        if found is not None and not found.is_aborted and found.position >= self.fails_from:
            raise self.error()
        return super().step()


def worker(error: Callable[[], Exception]) -> Looped[PoisonedEngine]:
    made = Looped(PoisonedEngine(error))
    made.turn(generate_of(1, 30), generate_of(2, 31))
    return made


def assert_neighbours_are_right(made: Looped[PoisonedEngine]) -> None:
    made.finish()
    assert (made.tokens(1), made.tokens(2)) == (ids(1, 0, 30), ids(2, 0, 31))
    assert set(made.errors()) == {POISON}


@pytest.mark.parametrize("keys", [(POISON,), ()], ids=["named", "newest"])
def test_request_that_fails_a_step_ends_alone(keys: tuple[int, ...]) -> None:
    made = worker(lambda: EngineStepError("a bad line", keys))
    for _ in range(2):
        made.turn()
    made.turn(generate_of(POISON))
    assert made.errors() == {POISON: (ENGINE, "the engine failed: EngineStepError: a bad line")}
    assert_neighbours_are_right(made)


def test_named_request_ends_wherever_it_is() -> None:
    made = worker(lambda: EngineStepError("a bad line", [POISON]))
    made.engine.fails_from = 6
    made.turn(generate_of(POISON, 30))
    made.turn()
    made.turn(generate_of(3, 9))
    made.finish()
    assert made.tokens(3) == ids(3, 0, 9)
    assert_neighbours_are_right(made)


def test_engine_that_names_a_request_that_has_ended_ends_the_next_ones() -> None:
    made = worker(lambda: EngineStepError("a bad line", [99]))
    made.turn(generate_of(POISON, 30))
    assert_neighbours_are_right(made)


def test_request_that_fails_late_and_is_not_named_ends_the_engines_requests_and_not_the_worker() -> None:
    made = worker(lambda: EngineStepError("somewhere"))
    made.engine.fails_from = 6
    made.turn(generate_of(POISON, 30))
    made.turn()
    made.turn()
    assert set(made.errors()) == {1, 2, POISON}
    made.finish()
    made.turn(generate_of(4, 3))
    assert made.tokens(4) == ids(4, 0, 3)


@pytest.mark.parametrize("error", [EngineStepError("bad"), OSError("bad"), ZeroDivisionError("bad")])
def test_requests_that_fail_each_step_never_end_the_worker(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    made = Looped(PoisonedEngine(lambda: error))
    for _ in range(20):
        made.turn(generate_of(POISON))
        made.turn()
    made.turn(generate_of(4, 3))
    assert made.tokens(4) == ids(4, 0, 3)
    assert made.publisher.counts.failed_steps == 20
    assert [line.splitlines()[0] for line in caplog.messages] == ["step failed"]


def test_engine_that_fails_whatever_it_has_is_broken() -> None:
    made = Looped(PoisonedEngine(lambda: OSError("bad")))
    made.engine.abort = lambda key: None  # type: ignore[method-assign]  # noqa: ARG005 - it ends nothing
    made.turn(generate_of(POISON))
    made.turn()
    made.turn(generate_of(5))
    made.turn()
    with pytest.raises(EngineBrokenError, match="3 steps failed one after the other, the last with: bad"):
        made.turn()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("prompt: at least 1, got 0"), ErrorCode.ERROR_CODE_INVALID_REQUEST, "prompt: at least 1, got 0"),
        (ValueError(""), ErrorCode.ERROR_CODE_INVALID_REQUEST, "invalid_request"),
        (KeyError("layer"), ENGINE, "the engine failed: KeyError: 'layer'"),
        (MemoryError("cache"), ENGINE, "the engine failed: MemoryError: cache"),
        (OverflowError("too large"), ENGINE, "the engine failed: OverflowError: too large"),
    ],
)
def test_request_that_cannot_be_admitted_ends_alone(
    caplog: pytest.LogCaptureFixture, error: Exception, code: ErrorCode, text: str
) -> None:
    made = worker(lambda: EngineStepError("never"))
    made.engine.refusal = error
    made.engine.fails_from = 1000
    for _ in range(3):
        made.turn(generate_of(POISON))
        made.turn()  # which ends what the engine kept of it
    failures = 0 if isinstance(error, ValueError) else 3
    assert made.publisher.counts.engine_errors == failures
    assert [line.split()[:2] for line in caplog.messages] == [["engine", "error"]][: bool(failures)]
    assert "Traceback" not in caplog.text
    assert POISON not in made.publisher.session.requests
    found = [event.error for event in events(made.publisher) if event.HasField("error")]
    assert [(found_one.code, found_one.message) for found_one in found] == [(code, text)] * 3
    made.finish()
    assert (made.tokens(1), made.tokens(2)) == (ids(1, 0, 30), ids(2, 0, 31))


@pytest.mark.parametrize("length", [-5, 2**40, True, "3"])
def test_prompts_length_is_made_one(length: object) -> None:
    made = worker(lambda: EngineStepError("never"))
    made.engine.prompt_tokens, made.engine.fails_from = length, 1000
    made.turn(generate_of(POISON, 3))
    (told,) = [event.admitted for event in events(made.publisher) if event.admitted.request_id == POISON]
    assert told.prompt_tokens in (1, 3, 2**32 - 1)
    assert made.errors() == {}


def test_abort_that_raises_ends_its_request_here() -> None:
    made = worker(lambda: EngineStepError("never"))
    made.engine.fails_from = 1000
    made.turn(generate_of(POISON, 30))
    made.engine.abort_error = KeyError("slot")
    for _ in range(2):
        made.turn(Abort(request_id=POISON))
    assert made.errors() == {POISON: (ENGINE, "the engine failed: KeyError: 'slot'")}
    assert made.publisher.counts.engine_errors == 2
    assert_neighbours_are_right(made)


@pytest.mark.parametrize("method", ["admit", "abort", "step"])
def test_engine_may_say_anywhere_that_it_is_broken(method: str) -> None:
    made = worker(lambda: EngineBrokenError("card gone"))
    made.engine.fails_from = 0 if method == "step" else 1000
    if method == "admit":
        made.engine.refusal = EngineBrokenError("card gone")
    elif method == "abort":
        made.turn(generate_of(POISON))
        made.engine.abort_error = EngineBrokenError("card gone")
    made.publisher.incoming.put(Abort(request_id=POISON) if method == "abort" else generate_of(POISON))
    with pytest.raises(EngineBrokenError, match="card gone"):
        made.loop.serve(threading.Event())
    assert made.errors() == dict.fromkeys((1, 2, POISON), (ENGINE, "the engine is broken: card gone"))


def test_rows_that_break_the_contract_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Looped(PoisonedEngine(lambda: OSError("never")))
    made.engine.fails_from = 1000
    for key in range(1, 20):
        made.engine_publisher.emit(StepArrays(request_ids=[key], positions=[-1], token_counts=[1], token_ids=[1]))
    assert len(made.errors()) == 19
    (line,) = caplog.messages
    assert line.startswith("requests ended: their batch breaks the contract")


def test_draft_ends_no_request() -> None:
    engine_publisher = EnginePublisher(running(), 0)
    engine_publisher.active.add(generate_of(7))
    engine_publisher.emit(arrays_of(batch([RowShape(7)], draft_follows=True)))
    engine_publisher.emit(arrays_of(batch([RowShape(7, 0, 1, RowStatus.FINISHED_LENGTH)], kind=BatchKind.DRAFT)))
    engine_publisher.emit(arrays_of(batch([RowShape(8, 0, 1, RowStatus.FINISHED_LENGTH)], step=2)))
    assert engine_publisher.active.end([7, 8]) == [7]


@pytest.mark.parametrize(("parts", "published"), [(2, [(2, 1), (1, 0)]), (1, [])])
def test_part_that_is_no_single_rows_fault_leaves_its_step_whole(
    monkeypatch: pytest.MonkeyPatch, parts: int, published: list[tuple[int, int]]
) -> None:
    """A part that cannot be published goes out with empty rows: others wait for it. A step of one part is left out."""
    publisher = running()
    publish = publisher.publish

    def refuse(made: LogprobBatch) -> int:
        if made.token_counts[made.request_ids == 1].any():
            raise ContractError("step", "another", 1)
        return publish(made)

    monkeypatch.setattr(publisher, "publish", refuse)
    engine_publisher = EnginePublisher(publisher, 0)
    for key in (1, 2):
        engine_publisher.active.add(generate_of(key))
    engine_publisher.emit(replace(arrays_of(batch([RowShape(1), RowShape(2)])), parts=parts))
    found = [(row.request_id, row.token_ids.size) for made in batches(publisher) for row in made.rows()]
    assert sorted(found, reverse=True) == published
    assert {event.error.request_id for event in events(publisher)} >= {1}
    assert {made.header.part_count for made in batches(publisher)} <= {2}


class Prefill(SyntheticEngine):
    """Hands each request off after its first token, with a state of some size."""

    size = 0

    def step(self) -> Sequence[StepArrays]:
        found = super().step()
        for arrays in found:
            arrays.transfer_states = dict.fromkeys(map(int, arrays.request_ids), bytes(self.size))
        return found


@pytest.mark.parametrize(("size", "error"), [(49_152, {}), (49_153, {1: "at most 49152 bytes, got 49153"})])
def test_transfer_state_has_a_bound(size: int, error: dict[int, str]) -> None:
    """A state is published before the request's last row; a larger one ends its request."""
    made = Looped(Prefill(role="prefill"))
    made.engine.size = size
    made.turn(generate_of(1))
    assert made.errors() == {key: (ENGINE, f"prefilled.transfer_state: {message}") for key, message in error.items()}
    told = [event.prefilled for event in events(made.publisher) if event.HasField("prefilled")]
    assert [(each.request_id, len(each.transfer_state)) for each in told] == ([] if error else [(1, size)])
    assert not made.publisher.session.requests
