"""ProcessorList: which processor a worker tries next."""

from tokenbus.bus.processor_list import ProcessorList


def test_each_is_tried_in_turn() -> None:
    """Without a worker's id a list is gone through in its order, again and again."""
    processors = ProcessorList(["a", "b", "c"])
    assert [processors.next() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert len(processors) == 3


def test_workers_spread() -> None:
    first = {ProcessorList(["a", "b", "c"], f"w{number}").next() for number in range(40)}
    assert first == {"a", "b", "c"}


def test_after_a_welcome_others_are_tried_first() -> None:
    processors = ProcessorList(["a", "b", "c"])
    assert [processors.next() for _ in range(2)] == ["a", "b"]
    processors.welcomed()
    assert {processors.next(), processors.next()} == {"a", "c"}
    assert processors.next() in {"a", "b", "c"}
