"""AckTracker: an item is acknowledged when all of its consumers have let go, in order, and never half a step."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.delivery import AckTracker, PendingAck


def held(*sequences: int) -> tuple[AckTracker, list[PendingAck]]:
    """Return items of ten bytes, each with a hold of its own."""
    acks = AckTracker(sequences[0] - 1)
    made = [PendingAck() for _ in sequences]
    for sequence, pending_ack in zip(sequences, made, strict=True):
        acks.add(sequence, pending_ack, 10)
    return acks, made


def test_step_that_is_not_complete_yet_is_not_acknowledged() -> None:
    """A later part of a step may come after its first one was passed: that is taken back to the step's beginning."""
    acks = AckTracker(0)
    early, step = PendingAck(), PendingAck()
    acks.add(1, early, 1)
    acks.add(2, step, 1)
    early.release()
    assert acks.advance()
    assert acks.acknowledged == 1
    acks.add(3, step, 1)
    step.release()
    assert acks.advance()
    assert acks.acknowledged == 3


def test_lost_items_are_passed() -> None:
    acks, (first,) = held(1)
    acks.add(9, PendingAck(0), 0)
    assert not acks.advance()
    first.release()
    assert acks.advance()
    assert acks.acknowledged == 9


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.permutations(range(6)))
def test_what_is_acknowledged_is_what_a_plain_count_says(owners: list[int], order: list[int]) -> None:
    """Whatever belongs together and lets go in whatever order, the longest prefix of whole steps is acknowledged."""
    acks, made = AckTracker(0), [PendingAck() for _ in range(6)]
    for sequence, owner in enumerate(owners, 1):
        acks.add(sequence, made[owner], 1)
    released: set[int] = set()
    for owner in order:
        made[owner].release()
        released.add(owner)
        acks.advance()
        prefix = [
            end
            for end in range(len(owners) + 1)
            if set(owners[:end]) <= released and not set(owners[:end]) & set(owners[end:])
        ]
        # A step of which one item is passed and another is not waits whole.
        assert acks.acknowledged == max(prefix)
    assert acks.acknowledged == len(owners)
    assert acks.bytes == 0
