"""The whole way: a paddle engine's steps through publisher, processor and client, over real sockets."""

import asyncio
import tempfile
import threading
from pathlib import Path

from tests.engines.paddle.needs import NEEDS_PADDLE
from tests.engines.runs import asked, text_of, tokens_alone
from tests.system.deployment import Deployment
from tokenbus.client import Client, Generation
from tokenbus.delivery import RequestFailedError, Token
from tokenbus.engines.paddle import ByteTokenizer, PaddleEngine, PaddleOptions
from tokenbus.processor import Processor
from tokenbus.worker import Publisher
from tokenbus.worker.emitter import Emitter
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

pytestmark = NEEDS_PADDLE

REQUESTS = [
    asked(1, "It was cold. That morning Ida was at the bridge again. ", max_tokens=60, seed=1, top_logprobs=3),
    asked(2, "One night Oscar went to ", max_tokens=50, temperature=0.0, top_logprobs=0, include_draft_logprobs=True),
    asked(3, [0, 0, 72], max_tokens=40, seed=3),
    asked(4, "Nora ", max_tokens=40, seed=4, stop=["."], top_logprobs=20),
]


async def all_of(tokens: Generation) -> list[Token]:
    """Return a request's tokens, when all have come."""
    return [token async for token in tokens]


async def test_client_gets_what_the_engine_emitted() -> None:
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:  # a socket's path is short
        settings = Deployment(Path(folder)).settings(processor__drain_timeout_ms=0, client__drain_timeout_ms=0)
        engine = PaddleEngine(PaddleOptions(context=256, max_running=2, slice_steps=3, prefill_chunk=20))
        stop = threading.Event()
        async with Processor(settings), Client(settings) as client:
            with Publisher(settings, vocabulary_size=engine.vocabulary_size) as publisher:
                engine_loop = EngineLoop(engine, Emitter(publisher, engine.vocabulary_size))
                loop = asyncio.create_task(asyncio.to_thread(engine_loop.serve, stop))
                streams = [client.generate(generate) for generate in REQUESTS]
                wrong = client.generate(asked(9, [257, 300], max_tokens=24))
                got = await asyncio.wait_for(asyncio.gather(*map(all_of, streams)), 60)
                failed = await asyncio.wait_for(asyncio.gather(all_of(wrong), return_exceptions=True), 60)
                stop.set()
                await loop
    for generate, tokens, request in zip(REQUESTS, got, streams, strict=True):
        assert [token.id for token in tokens] == tokens_alone(PaddleEngine(), generate)
        assert all((token.logprob is None) == (not generate.HasField("top_logprobs")) for token in tokens)
        assert {len(token.alternatives) for token in tokens} == {generate.top_logprobs}
        assert request.status in {RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP}
    assert text_of(ByteTokenizer(), (token.id for token in got[3])).endswith(".")
    (error,) = failed
    assert isinstance(error, RequestFailedError)
    assert error.code == ErrorCode.ERROR_CODE_INVALID_REQUEST
    assert "tokens.token_ids[1]: below 258, got 300" in str(error)
