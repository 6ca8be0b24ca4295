"""AckTracker: an item is acknowledged when everybody it concerns has let go, in order, and never half a step."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus_services.delivery import AckTracker, Hold


def held(*sequences: int) -> tuple[AckTracker, list[Hold]]:
    """Return items of ten bytes, each with a hold of its own."""
    holds = AckTracker(sequences[0] - 1)
    made = [Hold() for _ in sequences]
    for sequence, hold in zip(sequences, made, strict=True):
        holds.add(sequence, hold, 10)
    return holds, made


def test_nothing_is_acknowledged_while_it_is_held() -> None:
    """An item is acknowledged when its last holder lets go, and not before."""
    holds, (hold,) = held(1)
    hold.keep(2)
    hold.release()
    assert not holds.advance()
    hold.release(2)
    assert holds.advance()
    assert not holds.advance()
    assert (holds.acknowledged, len(holds), holds.bytes) == (1, 0, 0)


def test_items_are_acknowledged_in_order() -> None:
    """What is let go waits for what is held before it; who holds that back is known."""
    holds, (first, second, third) = held(5, 6, 7)
    second.release()
    third.release()
    assert not holds.advance()
    assert holds.acknowledged == 4
    assert holds.oldest is first
    assert (len(holds), holds.bytes) == (3, 30)
    first.release()
    assert holds.advance()
    assert holds.acknowledged == 7
    assert holds.oldest is None


def test_step_is_acknowledged_whole() -> None:
    """Between a step's items nothing is acknowledged, as who starts anew must have all of its parts."""
    holds = AckTracker(0)
    step, other = Hold(), Hold()
    for sequence, hold in ((1, step), (2, other), (3, step), (4, other)):
        holds.add(sequence, hold, 1)
    assert (step.last_sequence, step.bytes) == (3, 2)
    step.release()
    holds.advance()
    assert holds.acknowledged == 0
    assert len(holds) == 3
    other.release()
    assert holds.advance()
    assert holds.acknowledged == 4


def test_step_that_is_not_complete_yet_is_not_acknowledged() -> None:
    """A later part of a step may come after its first one was passed: that is taken back to the step's beginning."""
    holds = AckTracker(0)
    early, step = Hold(), Hold()
    holds.add(1, early, 1)
    holds.add(2, step, 1)
    early.release()
    assert holds.advance()
    assert holds.acknowledged == 1
    holds.add(3, step, 1)
    step.release()
    assert holds.advance()
    assert holds.acknowledged == 3


def test_lost_items_are_passed() -> None:
    """A run that cannot be had holds nobody back, and is acknowledged with what is before it."""
    holds, (first,) = held(1)
    holds.skip(9)
    assert not holds.advance()
    first.release()
    assert holds.advance()
    assert holds.acknowledged == 9


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.permutations(range(6)))
def test_what_is_acknowledged_is_what_a_plain_count_says(owners: list[int], order: list[int]) -> None:
    """Whatever belongs together and lets go in whatever order, the longest prefix of whole steps is acknowledged."""
    holds, made = AckTracker(0), [Hold() for _ in range(6)]
    for sequence, owner in enumerate(owners, 1):
        holds.add(sequence, made[owner], 1)
    released: set[int] = set()
    for owner in order:
        made[owner].release()
        released.add(owner)
        holds.advance()
        prefix = [
            end
            for end in range(len(owners) + 1)
            if set(owners[:end]) <= released and not set(owners[:end]) & set(owners[end:])
        ]
        # A step of which one item is passed and another is not waits whole.
        assert holds.acknowledged == max(prefix)
    assert holds.acknowledged == len(owners)
    assert holds.bytes == 0


def test_peak_is_remembered() -> None:
    """The most items that were held at once can be asked for."""
    holds, made = held(1, 2, 3)
    for hold in made:
        hold.release()
    holds.advance()
    assert (len(holds), holds.peak) == (0, 3)
