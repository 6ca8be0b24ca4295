"""EmbeddedSystem: an engine that breaks, cannot be made, or is still being made."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.services.offline.conftest import interrupted
from tests.support.waiting import MOST, wait_until
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.client import RequestFailedError
from tokenbus_services.offline.requests import Requests
from tokenbus_services.offline.system import EmbeddedSystem
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Engine, EngineBrokenError, StepArrays

SETTINGS = Settings.load(environment={}, overrides={})


class Breaking(SyntheticEngine):
    """An engine that breaks in the step after a request whose prompt begins with 13 was admitted."""

    is_closed = False
    _breaks = False

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        self._breaks |= generate.tokens.token_ids[0] == 13
        return super().admit(generate, state)

    def step(self) -> Sequence[StepArrays]:
        if self._breaks:
            raise EngineBrokenError("a card fell off the bus")
        return super().step()

    def close(self) -> None:
        self.is_closed = True


def requests(*prompts: int) -> Requests:
    return Requests([[prompt] for prompt in prompts], None, {"max_tokens": 3}, 1)


def test_broken_engine_ends_the_call_and_the_system() -> None:
    engine = Breaking()
    system = EmbeddedSystem(lambda _settings: engine, SETTINGS, "breaking")
    assert system.generate(requests(1, 2), shows_progress=False).tokens == 6
    with pytest.raises(RequestFailedError, match=r"prompts\[\d\]: the engine is broken: a card fell off the bus"):
        system.generate(requests(1, 13), shows_progress=False)
    wait_until(lambda: system._is_over)
    with pytest.raises(EngineBrokenError, match="a card fell off the bus"):
        system.generate(requests(1), shows_progress=False)
    system.close()
    assert engine.is_closed


def refuse(_settings: Settings) -> Engine:
    raise LookupError("no weights")


def test_what_making_the_engine_raises_is_raised() -> None:
    before = set(threading.enumerate())
    with pytest.raises(LookupError, match="no weights"):
        EmbeddedSystem(refuse, SETTINGS, "refused")
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_interrupt_does_not_wait_for_the_engine(go: threading.Event) -> None:
    engine, begun = Breaking(), threading.Event()

    def make(_settings: Settings) -> Engine:
        begun.set()
        go.wait(MOST)
        return engine

    with interrupted(begun.is_set):
        EmbeddedSystem(make, SETTINGS, "slow")
    assert not engine.is_closed
    go.set()
    wait_until(lambda: engine.is_closed)


def test_interrupt_as_the_thread_starts_ends_it(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun = Breaking(), threading.Event()

    def make(_settings: Settings) -> Engine:
        begun.set()
        go.wait(MOST)
        return engine

    class Interrupted(threading.Thread):
        """One whose starter is interrupted."""

        def start(self) -> None:
            super().start()
            if self.name == "tokenbus-llm":
                begun.wait(MOST)
                raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        EmbeddedSystem(make, SETTINGS, "slow")
    go.set()
    wait_until(lambda: engine.is_closed)
    wait_until(lambda: set(threading.enumerate()) <= before)
