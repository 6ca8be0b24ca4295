"""RequestTable: open requests in arrays, and for a while those that ended."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.processor.requests import Deadline, Request, RequestTable, State
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError


def table(requests: int = 1000, ended: int = 1000) -> RequestTable:
    return RequestTable(requests, ended, requests)


def opened(to: RequestTable, key: int, *, owner: int = 0, position: int = 0, deadline: float = 100.0) -> Request:
    return to.open(key, position, owner, State.RUNNING, Deadline(deadline))


def keys_of(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, np.uint64)


def test_end_is_remembered_for_a_while() -> None:
    made = table(ended=2)
    error = RequestError(code=ErrorCode.ERROR_CODE_GAP, message="lost")
    for key in (1, 2, 3):
        made.close(opened(made, key, position=key * 10), error if key == 2 else None)
    assert made.ended(1) is None
    second, third = made.ended(2), made.ended(3)
    assert second is not None
    assert third is not None
    assert (second.error, second.tokens) == (error, 20)
    assert (third.error, third.tokens) == (None, 30)
    opened(made, 3)
    assert made.ended(3) is None


def test_what_clients_said_has_ended_is_remembered_up_to_a_number() -> None:
    made = table(ended=2)
    for key in (1, 2, 3):
        made.note_end_at_client(key, owner=7)
    assert [made.has_ended_at_client(key) for key in (1, 2, 3)] == [False, True, True]


@given(st.lists(st.integers(1, 12), max_size=60))
def test_table_agrees_with_a_dict(keys: list[int]) -> None:
    made, plain = table(), dict[int, int]()
    for place, key in enumerate(keys):
        request = made.get(key)
        if request is None:
            opened(made, key, owner=key, position=place)
            plain[key] = place
        else:
            made.close(request, None)
            del plain[key]
        slots = made.slots_of(keys_of(*range(1, 13)))
        assert {each for each in range(1, 13) if slots[each - 1] >= 0} == plain.keys()
        for each, position in plain.items():
            slot = slots[each - 1]
            assert (made.at(slot).id, made.next_position[slot], made.stream[slot]) == (each, position, each)
