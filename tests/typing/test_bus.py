"""The bus's public names, used as a caller uses them: this file is what mypy holds their types against."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import numpy as np

from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client, Generation, RequestFailedError, Token
from tokenbus.processor import Processor, Step
from tokenbus.settings import BusSettings, Settings
from tokenbus.worker import Publisher, PublishError, RetentionFullError
from tokenbus_contracts import BatchHeader, LogprobBatch, Row, RowStatus, Scoring
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode, Generate, SamplingParameters, TokenPrompt


def _settings() -> Settings:
    return Settings(bus=BusSettings(workers_address="memory://workers", clients_address="memory://clients"))


def _batch(key: int, step: int, position: int) -> LogprobBatch:
    return LogprobBatch(
        BatchHeader("any", epoch=1, sequence=1, step=step, step_rows=1),
        request_keys=[key],
        batch_indices=[0],
        positions=[position],
        statuses=[RowStatus.FINISHED_STOP if position else RowStatus.ACTIVE],
        token_counts=[1],
        draft_token_counts=[0],
        proposal_counts=[0],
        scorings=[Scoring.NONE],
        top_ks=[0],
        token_ids=np.array([step], np.uint32),
    )


async def test_public_names_are_typed_and_work() -> None:
    """Publish, ask, take tokens, rows and steps, and fail, with nothing but the public names."""
    settings = _settings()
    transport = MemoryTransport(settings.bus)
    async with (
        Processor(settings, transport=transport) as processor,
        Client(settings, transport=transport) as client,
        Publisher(settings, vocabulary_size=10, transport=transport) as publisher,
    ):
        taken: list[Generate | Abort] = []
        tokens: Generation = client.generate(
            Generate(tokens=TokenPrompt(token_ids=[1]), sampling=SamplingParameters(max_tokens=2))
        )
        while not taken:
            taken = await asyncio.to_thread(publisher.take_requests, 0.1)
        sequence: int = publisher.admitted(tokens.request_id, prompt_tokens=1)
        for step_number in (1, 2):
            assert await publisher.published(_batch(tokens.request_id, step_number, step_number - 1)) > sequence
        read: list[Token] = [token async for token in tokens]
        assert [(token.id, token.position, token.logprob) for token in read] == [(1, 0, None), (2, 1, None)]
        status: RowStatus | None = tokens.status
        assert status is RowStatus.FINISHED_STOP

        publisher.publish(_batch(7, 3, 0))
        publisher.failed_request(7, ErrorCode.ERROR_CODE_ENGINE, "on fire", emitted_tokens=1)
        ended: Generation = client.resume(7, 0)
        rows: AsyncIterator[Row] = ended.rows()
        assert (await anext(rows)).token_ids.tolist() == [3]
        try:
            await anext(rows)
        except RequestFailedError as error:
            told: tuple[int, int, int] = error.request_id, error.code, error.emitted_tokens
            assert told == (7, ErrorCode.ERROR_CODE_ENGINE, 1)

        steps: AsyncGenerator[Step, None] = processor.steps()
        following = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        publisher.publish(_batch(9, 4, 0))
        step: Step = await following
        whole: LogprobBatch = step.target
        assert (step.draft, whole.request_keys.tolist()) == (None, [9])
        await steps.aclose()
    errors: list[type[PublishError]] = [RetentionFullError]
    assert errors
