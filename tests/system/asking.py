"""Requests of a test's client, each compared with the truth as its tokens come."""

import asyncio
from collections.abc import Iterable

from tests.support.waiting import soon, until
from tests.system.audit import Audit
from tokenbus.client import Client, Generation
from tokenbus.delivery import RequestFailedError
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, Generate, SamplingParameters, TokenPrompt


def wanted(
    tokens: int | None, model: str = "", key: int = 0, top_logprobs: int = 2, *, is_continued: bool = True
) -> Generate:
    return Generate(
        request_id=key,
        model=model,
        tokens=TokenPrompt(token_ids=[1]),
        sampling=SamplingParameters(max_tokens=tokens),
        top_logprobs=top_logprobs,
        continuation_policy=None if is_continued else ContinuationPolicy.CONTINUATION_POLICY_OFF,
    )


class Asked:
    """One request, consumed by a task of its own."""

    def __init__(self, tokens: Generation, position: int = 0) -> None:
        self.tokens = tokens
        self.audit = Audit(tokens.request_id, position)
        self.task = asyncio.create_task(self._consume())

    async def _consume(self) -> Audit:
        try:
            async for row in self.tokens.rows():
                self.audit.take(row)
        except RequestFailedError as error:
            self.audit.error = error
        return self.audit

    async def begun(self) -> None:
        await until(lambda: self.audit.position or self.task.done())
        assert not self.task.done(), self.audit

    async def ended(self) -> Audit:
        return await soon(self.task)


def ask(  # noqa: PLR0913 - each has a name and a default
    client: Client, count: int, tokens: int | None, model: str = "", top_logprobs: int = 2, *, is_continued: bool = True
) -> list[Asked]:
    generate = wanted(tokens, model, top_logprobs=top_logprobs, is_continued=is_continued)
    return [Asked(client.generate(generate)) for _ in range(count)]


async def begun(asked: Iterable[Asked]) -> None:
    for each in asked:
        await each.begun()


async def all_exact(asked: Iterable[Asked], tokens: int) -> None:
    for each in asked:
        audit = await each.ended()
        assert audit.error is None, audit.error
        assert audit.is_exact, audit
        assert audit.position == tokens


async def all_failed(asked: Iterable[Asked], code: int) -> None:
    """Wait for the requests' ends, and fail unless each got true tokens and then an error that counts them."""
    for each in asked:
        audit = await each.ended()
        assert audit.is_exact, audit
        assert audit.error is not None
        assert audit.error.code == code, audit.error
        assert audit.error.emitted_tokens == audit.position


async def all_exact_so_far(client: Client, asked: Iterable[Asked]) -> None:
    """Wait for more tokens of endless requests, abort them, and fail unless each got exactly its true tokens."""
    before = [(each, each.audit.position) for each in asked]
    for each, position in before:
        await until(lambda: each.audit.position > position or each.task.done())  # noqa: B023 - it is awaited here
        client.abort(each.tokens.request_id)
        audit = await each.ended()
        assert audit.error is None, audit.error
        assert audit.is_exact, audit


class Witness:
    """Requests that follow each other beside something else, and must notice nothing of it."""

    def __init__(self, client: Client, count: int = 4) -> None:
        self._client = client
        self._over = False
        self.audits: list[Audit] = []
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(count)]

    async def _ask(self) -> None:
        while not self._over:
            self.audits.append(await Asked(self._client.generate(wanted(60))).task)

    async def noticed_nothing(self) -> None:
        """Stop asking, and fail unless every request got exactly its tokens, some of them after this call."""
        before = len(self.audits)
        await until(lambda: len(self.audits) > before or any(task.done() for task in self._tasks))
        self._over = True
        await soon(asyncio.gather(*self._tasks))
        for audit in self.audits:
            assert audit.error is None, audit.error
            assert audit.is_exact, audit
            assert audit.position == 60
