"""Stream: credit that cannot leak, and is given when it is worth a message."""

from zlib import crc32

from tests.in_process.builders import EPOCH, hello_of, item_of, settings
from tests.processor.streams import come, payload, stream, take
from tokenbus.processor.stream import ItemOutcome, Stream
from tokenbus_contracts.generated.stream_pb2 import GapReason


def test_credit_ends_where_it_was_granted() -> None:
    """The last item that credit allows is taken, and the one after it is a flood (case 20)."""
    made = stream(credit_items=4)
    assert take(made, 4, 5) == [ItemOutcome.TAKEN, ItemOutcome.FLOOD]
    take(made, 1)
    come(made)
    made.grant()
    assert take(made, 5, 6) == [ItemOutcome.TAKEN, ItemOutcome.FLOOD]


def test_credit_in_bytes_ends_where_it_was_granted() -> None:
    """What waits for its turn takes no more bytes than credit allows, however few items it is (case 20)."""
    data = payload(2)
    chosen = settings({"limits.max_message_bytes": 2000, "processor.credit_bytes": 2000})
    most = 2000 // len(data)
    made = Stream(hello_of(), EPOCH, chosen.limits, chosen.processor)
    made.open_connection()
    outcomes = take(made, *range(2, most + 4))
    assert outcomes == [ItemOutcome.TAKEN] * most + [ItemOutcome.FLOOD] * 2
    assert take(made, 2) == [ItemOutcome.DUPLICATE]
    made.declare_lost(1, 1, GapReason.GAP_REASON_RETENTION, frozenset())
    come(made)
    assert take(made, most + 2) == [ItemOutcome.TAKEN]


def test_grants_are_made_when_they_are_worth_a_message() -> None:
    made = stream(credit_items=8)
    assert (made.credit.through_sequence, made.credit.bytes) == (8, settings().processor.credit_bytes)
    take(made, 1)
    come(made)
    assert not made.is_credit_due
    assert made.credit.through_sequence == 8
    take(made, 2)
    come(made)
    assert made.is_credit_due
    made.grant()
    assert made.credit.through_sequence == 10
    assert not made.is_credit_due


def test_bytes_that_were_taken_are_granted_again() -> None:
    chosen = settings({"limits.max_message_bytes": 2000, "processor.credit_bytes": 2000})
    made = Stream(hello_of(), EPOCH, chosen.limits, chosen.processor)
    made.open_connection()
    taken, refused = payload(1, size=20), b"not a batch" * 60
    made.receive(item_of(taken, 1), taken)
    made.receive(item_of(refused, 2, checksum=crc32(refused)), refused)
    come(made)
    assert made.is_credit_due
    made.grant()
    assert made.credit.bytes == 2000 + len(taken) + len(refused)
