"""The door's names, used as a caller uses them: this file is what mypy holds their types against."""

from collections.abc import AsyncGenerator, Callable

import numpy as np
import numpy.typing as npt

import tokenbus
from tokenbus import Step
from tokenbus_contracts.generated.request_pb2 import Abort, ErrorCode


async def _use(address: str) -> None:
    client: tokenbus.Client = tokenbus.connect(address, name="typing")
    async with client:
        generation: tokenbus.Generation = client.generate("text", max_tokens=8, top_logprobs=2, seed=1, stop=["."])
        async with generation:
            async for token in generation:
                told: tuple[int, float | None, int | None, int, int] = (
                    token.id,
                    token.logprob,
                    token.rank,
                    token.position,
                    token.request_id,
                )
                alternatives: tuple[tuple[int, float], ...] = token.alternatives
                assert told[0] != len(alternatives)
        async for row in client.generate([1, 2], temperature=0).rows():
            values: list[float] = row.logprobs.tolist()
            assert values
        async with client.steps() as steps:
            request_id: int = client.submit([1, 2, 3])
            async for item in steps:
                if isinstance(item, tokenbus.StepRows):
                    batch: tokenbus.LogprobBatch = item.target
                    assert batch.row_count
                elif item.error is not None:
                    failed: tokenbus.RequestFailedError = item.error
                    assert (failed.request_id, failed.code_name) == (request_id, "overloaded")


async def _read(path: str, log: str) -> None:
    recorded: list[tokenbus.StreamItem] = list(tokenbus.read_recording(path, after="46.1"))
    async for item in tokenbus.read_log(log, after=recorded[-1].position, follow=True):
        batch: tokenbus.LogprobBatch | None = item.batch
        assert batch is None or item.missing_items == 0


def _encode(made: tokenbus.LogprobBatch) -> list[int]:
    data: bytes = tokenbus.encode(made)
    read: tokenbus.LogprobBatch = tokenbus.decode(data, limits=tokenbus.Limits.default())
    rows: list[tokenbus.Row] = list(read.in_batch_order().rows())
    ids: npt.NDArray[np.uint32] = rows[0].token_ids
    columns: dict[str, npt.NDArray[np.generic]] = dict(read.select([0]).columns)
    try:
        return [row.request_id for row in rows if columns["token_ids"].size == ids.size]
    except tokenbus.ContractError as error:
        told: tuple[str, object, object, tokenbus.Rule] = (error.field, error.limit, error.actual, error.rule)
        raise ValueError(told) from None


async def _publish(settings: tokenbus.Settings, made: tokenbus.LogprobBatch) -> None:
    async with tokenbus.Processor(settings) as processor, tokenbus.Publisher(settings, vocabulary_size=10) as publisher:
        taken: list[tokenbus.Generate | Abort] = publisher.take_requests(0.1)
        sequence: int = publisher.admitted(taken[0].request_id, prompt_tokens=1)
        try:
            later: tuple[int, int] = publisher.publish(made), await publisher.published(made)
            assert min(later) > sequence
        except tokenbus.RetentionFullError as error:
            lost: frozenset[int] = error.request_ids
            publisher.failed_request(max(lost), ErrorCode.ERROR_CODE_ENGINE, "on fire", emitted_tokens=1)
        steps: AsyncGenerator[Step, None] = processor.steps()
        step: Step = await anext(steps)
        draft: tokenbus.LogprobBatch | None = step.draft
        assert draft is None or draft.row_count == step.target.row_count
        await steps.aclose()


def test_names_are_typed() -> None:
    """Mypy reads the functions above with the types that users see; nothing of it needs to run."""
    run: Callable[..., None] = tokenbus.run_engine
    use: Callable[[str], object] = _use
    read: Callable[[str, str], object] = _read
    encode: Callable[[tokenbus.LogprobBatch], list[int]] = _encode
    publish: Callable[[tokenbus.Settings, tokenbus.LogprobBatch], object] = _publish
    assert all(map(callable, (run, use, read, encode, publish)))
