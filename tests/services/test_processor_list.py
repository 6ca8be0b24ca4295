"""ProcessorList: which processor a worker tries next, and when it goes to another one."""

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from tests.support.waiting import soon
from tokenbus_services.bus import AddressError
from tokenbus_services.processor_list import ProcessorList, processors_at
from tokenbus_services.settings import BusSettings

GROUP = "nats://127.0.0.1:1/workers.*"


class Announced(ProcessorList):
    """A list whose processors have announced how many workers they have."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        super().__init__(worker_id="w")
        self.announced = workers

    @property
    def workers(self) -> Mapping[str, int]:
        return self.announced


async def test_each_is_tried_in_turn() -> None:
    """Without a worker's id a list is gone through in its order, again and again."""
    processors = ProcessorList("a", "b", "c")
    assert [await processors.next() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert processors.count == 3


async def test_workers_spread() -> None:
    first = {await ProcessorList("a", "b", "c", worker_id=f"w{number}").next() for number in range(40)}
    assert first == {"a", "b", "c"}


async def test_after_a_welcome_others_are_tried_first() -> None:
    processors = ProcessorList("a", "b", "c")
    assert [await processors.next() for _ in range(2)] == ["a", "b"]
    processors.welcomed()
    assert {await processors.next(), await processors.next()} == {"a", "c"}
    assert await processors.next() in {"a", "b", "c"}


async def test_fewest_workers_come_first() -> None:
    processors = Announced({"a": 5, "b": 1, "c": 3})
    assert [await processors.next() for _ in range(3)] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("workers", "share"),
    [({"a": 4, "b": 0}, 0.5), ({"a": 2, "b": 1}, 0.0), ({"a": 1, "b": 0}, 0.0), ({"a": 6, "b": 3, "c": 0}, 0.5)],
)
async def test_share_to_leave(workers: Mapping[str, int], share: float) -> None:
    processors = Announced({"a": 0})
    await processors.next()
    processors.announced = workers
    assert processors.share_to_leave() == pytest.approx(share)


async def test_current_one_that_has_gone() -> None:
    processors = Announced({"a": 0})
    assert not processors.is_outdated
    await processors.next()
    processors.announced = {}
    assert (processors.is_outdated, processors.count) == (False, 1)
    processors.announced = {"b": 0}
    assert (processors.is_outdated, processors.count) == (True, 2)
    assert processors.share_to_leave() == 0


async def test_group_stands_alone() -> None:
    """An address of a group is the whole setting; a list beside it is refused with the value."""
    settings = BusSettings()
    assert not processors_at(GROUP, settings).is_fixed
    assert processors_at("tcp://a:1,tcp://b:1", settings).count == 2
    with pytest.raises(AddressError, match=r"an address that ends with \.\* stands alone"):
        processors_at(f"{GROUP},tcp://b:1", settings)


async def test_group_beyond_loopback_needs_what_its_listeners_need() -> None:
    processors = processors_at("nats://10.0.0.1:4222/workers.*", BusSettings())
    with pytest.raises(AddressError, match="beyond loopback it needs tls://"):
        await soon(processors.open())


async def test_newcomer_is_tried_at_once() -> None:
    processors = processors_at(GROUP, BusSettings())
    found: dict[str, int] = {"a": 0}
    processors._directory = SimpleNamespace(listeners=found)  # type: ignore[assignment]
    processors._changed()
    assert await soon(processors.next()) == "a"
    assert not processors.is_outdated
    found["b"] = 5
    processors._changed()
    assert processors.is_outdated
    assert await processors.next() == "b"
    assert not processors.is_outdated
    found["c"] = 0
    processors._changed()
    processors.welcomed()
    assert not processors.is_outdated
