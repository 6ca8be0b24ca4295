"""Feed: how a request ends that is not ended by a row."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.services.builders import generate_of, settings
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestTokens
from tokenbus_services.gateway import dispatcher
from tokenbus_services.gateway.api_keys import Caller
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.vocabulary import vocabulary_of


class _Listener:
    """One that has had so many tokens, and waits for the end."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.error = asyncio.get_running_loop().create_future()

    def take(self, _view: object, _place: int) -> bool:
        """Take no row."""
        raise AssertionError

    def fail(self, error: ApiError) -> None:
        """Keep the error."""
        self.error.set_result(error)


@pytest.mark.parametrize(("emitted", "had", "told"), [(7, 7, 7), (30, 12, 12)])
async def test_error_tells_how_many_tokens_were_handed_out(
    monkeypatch: pytest.MonkeyPatch, emitted: int, had: int, told: int
) -> None:
    """Tokens that were not handed out in time do not count as emitted: a client that continues would skip them."""
    monkeypatch.setattr(dispatcher, "_LAST_ROWS_SECONDS", 0)
    tokens = RequestTokens(5)
    session = SimpleNamespace(outstanding=0, refusal=None)
    client: Any = SimpleNamespace(session=session, generate=lambda _generate: tokens, abort=lambda _key: None)
    fed = dispatcher.Feed(cast("Client", client), vocabulary_of("numbers"), settings().gateway, Buffers(2**30))
    listener = _Listener(had)
    fed.open(
        [generate_of(5)],
        cast("Any", SimpleNamespace(listeners=[listener])),
        Caller(None, settings().gateway, time.monotonic),
    )
    tokens.fail(RequestError(request_key=5, code=ErrorCode.ERROR_CODE_GAP, message="lost", emitted_tokens=emitted))
    error = await asyncio.wait_for(listener.error, 30)
    assert (error.message, error.code) == (f"lost (after {told} tokens)", "gap")
    assert len(fed) == 0
