"""The channel between a gateway's supervisor and one of its processes."""

import asyncio
import socket
from typing import Any

import pytest

from tests.support.waiting import soon
from tokenbus_services.gateway.channel import Channel, FailedAnswerError


async def test_question_whose_answer_fails_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Who asks learns that there is no answer without waiting its time out, and the log of the other side says why."""

    async def failing(what: str) -> Any:  # noqa: ANN401 - JSON
        """Fail, or answer."""
        if what == "broken":
            raise ZeroDivisionError("a defect")
        return what

    ends = socket.socketpair()
    channels = [await Channel.over(end, lambda *_: None, failing) for end in ends]
    running = [asyncio.create_task(channel.run()) for channel in channels]
    with pytest.raises(FailedAnswerError, match="a defect"):
        await soon(channels[0].ask("broken", 1_000_000))
    assert "a question could not be answered" in caplog.text
    assert await soon(channels[0].ask("whole", 1_000_000)) == "whole"
    for channel in channels:
        channel.close()
    await soon(asyncio.gather(*running))
