"""A request's deadline is a moment: its client says it each time it asks, and ends the request if no end comes."""

import pytest

from tests.client.peer import HELLO_FIRST, TIMEOUT, opened
from tests.client.test_client import met
from tests.in_process.builders import generate_of, ids
from tests.support.waiting import turns
from tokenbus.delivery import RequestFailedError
from tokenbus.testing import RowShape
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, Generate, RequestError
from tokenbus_contracts.generated.stream_pb2 import Refusal

DEADLINE = ErrorCode.ERROR_CODE_DEADLINE
GRACE_MS = int(TIMEOUT * 1000)


def admitted(key: int, deadline: int) -> Admitted:
    return Admitted(request_id=key, worker_id="w", epoch=1, prompt_tokens=3, deadline_unix_ms=deadline)


@pytest.mark.parametrize(("given", "sent"), [(0, 6000), (9000, 6000), (2000, 2000)])
async def test_moment_is_sent_beside_what_it_may_take(given: int, sent: int) -> None:
    async with met({"client.drain_timeout_ms": 0}) as (processor, client, clock):
        now = clock.unix_ms()
        generate = generate_of(5, deadline_ms=6000, deadline_unix_ms=given and now + given)
        before = Generate.FromString(generate.SerializeToString())
        generation = client.generate(generate)
        heard = (await processor.body("generate")).generate
        assert (heard.deadline_ms, heard.deadline_unix_ms) == (6000, now + sent)
        assert generate == before
        assert not generation.has_ended


async def test_moment_survives_a_processors_restart() -> None:
    async with met({"client.drain_timeout_ms": 0}) as (processor, client, clock):
        first = client.generate(generate_of(5, deadline_ms=6000))
        await processor.body("generate")
        settled = clock.unix_ms() + 5000
        processor.number += 1
        processor.say(ServerFrame(number=processor.number, admitted=admitted(5, settled)))
        second = client.resume(7, 3, deadline_unix_ms=settled + 1)
        assert (await processor.body("resume")).resume.deadline_unix_ms == settled + 1
        processor.number = 0
        processor.say(ServerFrame(refusal=Refusal(reason=HELLO_FIRST, message="say hello")))
        await processor.welcome()
        resumed = [(await processor.body("resume")).resume for _ in range(2)]
        assert {resume.request_id: resume.deadline_unix_ms for resume in resumed} == {5: settled, 7: settled + 1}
        assert not any(each.has_ended for each in (first, second))


async def test_request_whose_end_is_not_heard_ends_here() -> None:
    async with met() as (processor, client, clock):
        tokens = client.generate(generate_of(5, deadline_ms=6000))
        await processor.body("generate")
        processor.rows(RowShape(5, 0, 2))
        await turns()
        for _ in range(9):
            clock.advance(1)
            await turns()
        assert not tokens.has_ended
        clock.advance(1)
        await turns()
        assert [(await anext(tokens)).id for _ in range(2)] == ids(5, 0, 2)
        with pytest.raises(
            RequestFailedError, match=r"no end arrived within \d+ ms after it \(after 2 tokens\)"
        ) as failed:
            await anext(tokens)
        assert (failed.value.code, failed.value.emitted_tokens) == (DEADLINE, 2)
    assert len(client.requests) == 0


def test_processors_word_comes_first() -> None:
    """Within the grace the processor's own word ends the request; beyond it the client asks for its end."""
    peer = opened()
    for key, deadline in ((5, 1000), (6, 1000), (7, 0)):
        peer.requests.open(generate_of(key, deadline_unix_ms=deadline))
    list(peer.says_all())
    peer.requests.end_overdue(1000 + GRACE_MS)
    assert peer.session.outstanding == 3
    told = RequestError(request_id=5, code=DEADLINE, message="it took longer than it may")
    peer.numbered(error=told)
    peer.requests.end_overdue(1001 + GRACE_MS)
    assert set(peer.requests.requests) == {7}
    assert [frame.abort.request_id for frame in peer.says_all() if frame.HasField("abort")] == [6]


def test_what_the_processor_settles_replaces_what_was_asked() -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    peer.requests.open(generate_of(6, deadline_unix_ms=9000))
    peer.numbered(admitted=admitted(5, 4000))
    peer.numbered(admitted=admitted(6, 0))
    assert [request.deadline_unix_ms for request in peer.requests.requests.values()] == [4000, 9000]
    peer.numbered(admitted=admitted(6, 2**64 - 1))
    peer.requests.end_overdue(4001 + GRACE_MS)
    assert set(peer.requests.requests) == {6}
