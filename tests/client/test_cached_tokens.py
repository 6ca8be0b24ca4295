"""How many tokens of a prompt were cached, as a client hears it: with the admission, and again before its tokens."""

import pytest

from tests.client.peer import Peer, opened
from tests.in_process.builders import generate_of
from tokenbus.client import RequestEnd, StepRows
from tokenbus.testing import RowShape
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Admitted


def say(peer: Peer, cached: int | None) -> None:
    peer.numbered(admitted=Admitted(request_id=5, worker_id="w", epoch=1, prompt_tokens=48, cached_tokens=cached))


@pytest.mark.parametrize("said", [(), (None,), (0,), (0, 32), (None, 32)])
def test_last_number_counts(said: tuple[int | None, ...]) -> None:
    peer, outputs, heard = opened(), list[StepRows | RequestEnd](), list[tuple[int, int | None]]()
    peer.requests.open_stream(outputs.append)
    peer.requests.on_cached = lambda *each: heard.append(each)
    tokens = peer.requests.open(generate_of(5))
    for each in said:
        say(peer, each)
    known = [each for each in said if each is not None]
    assert heard == [(5, each) for each in known]
    assert tokens.cached_tokens == (known[-1] if known else None)
    peer.rows(RowShape(5, 0, 1, RowStatus.FINISHED_LENGTH))
    end = outputs[-1]
    assert isinstance(end, RequestEnd)
    assert end.cached_tokens == tokens.cached_tokens


@pytest.mark.parametrize("has_begun", [False, True])
def test_restarted_processor_may_not_have_heard_the_last_number(*, has_begun: bool) -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    say(peer, 0)
    if has_begun:
        peer.rows(RowShape(5, 0, 1))
    peer.welcome(processor_id="q")
    assert tokens.cached_tokens == (0 if has_begun else None)
