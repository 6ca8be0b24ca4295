"""What waits for a client's socket: in order, bounded, and past the queue where the socket has room."""

import asyncio

from tokenbus_services.gateway.outbox import Outbox


async def test_what_waits_is_sent_together_and_in_order() -> None:
    """Chunks come out in their order, and the end is told with the last of them."""
    outbox = Outbox(100, lambda: None)
    outbox.put(b"a", 1)
    outbox.put(b"b", 2)
    first = await outbox.next()
    assert (first.data, first.produced_at_ns, first.is_last) == (b"ab", [1, 2], False)
    outbox.put(b"c")
    outbox.close()
    outbox.put(b"too late")
    last = await outbox.next()
    assert (last.data, last.is_last) == (b"c", True)


async def test_bound_is_told() -> None:
    """Who fills it is told once, as soon as more waits than may, can put a last word, and its peak can be asked for."""
    told = []

    def full() -> None:
        """Say so in the box itself, as an answer does."""
        told.append(outbox.size)
        outbox.put(b"!")
        outbox.close()

    outbox = Outbox(3, full)
    outbox.put(b"abc")
    assert not told
    outbox.put(b"d")
    assert (told, outbox.peak) == ([4], 5)
    assert (await outbox.next()).data == b"abcd!"
    assert (outbox.size, outbox.peak) == (0, 5)


async def test_chunks_pass_by_only_while_nothing_waits() -> None:
    """A chunk is written at once while the task waits, and never before one that came earlier."""
    written: list[bytes] = []
    room = True

    def write(chunk: bytes, _produced_at_ns: int) -> bool:
        """Write, while there is room."""
        if room:
            written.append(chunk)
        return room

    outbox = Outbox(100, lambda: None)
    outbox.write = write
    outbox.put(b"nobody waits yet")
    assert not written
    assert (await outbox.next()).data == b"nobody waits yet"
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.put(b"1")
    room = False
    outbox.put(b"2")
    room = True
    outbox.put(b"3")
    assert (await waiting).data == b"23"
    assert written == [b"1"]
