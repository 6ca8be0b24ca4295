"""ScriptedEngine: what a test writes down is what a client gets."""

import pytest

import tokenbus
from tokenbus import testing
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate


async def answered(answer: testing.Answer, **asked: object) -> tuple[list[tokenbus.Token], tokenbus.Generation]:
    async with testing.bus(testing.ScriptedEngine(answer)) as bus:
        generation = bus.client.generate([1], **asked)  # type: ignore[arg-type]
        return [token async for token in generation], generation


async def test_answer_is_what_comes() -> None:
    answer = testing.Answer(
        tokens=[5, 6, 7],
        logprobs=[-0.25, -2.0, -0.5],
        ranks=[1, 3, 1],
        alternatives=[[(5, -0.25), (8, -1.0)], [(1, -0.5), (2, -1.0)], [(7, -0.5), (9, -0.75)]],
        tokens_per_step=2,
    )
    tokens, generation = await answered(answer, top_logprobs=2)
    assert [(token.id, token.logprob, token.rank) for token in tokens] == [(5, -0.25, 1), (6, -2.0, 3), (7, -0.5, 1)]
    assert [token.alternatives for token in tokens] == [tuple(each) for each in answer.alternatives or ()]
    assert generation.status is RowStatus.FINISHED_STOP


async def test_extras_come_to_requests_that_ask_for_them() -> None:
    """A mask above the request's bound has its size alone, and an id that the answer does not have is improbable."""
    answer = testing.Answer(
        tokens=[5, 6], tokens_per_step=2, other_logprobs=[-1.0, -2.0], entropies=0.5, given_logprobs={9: -3.0},
        masks=[[8, 5], [1, 6, 7]],
    )  # fmt: skip
    async with testing.bus(testing.ScriptedEngine(answer, answer, testing.Answer(tokens=[5]))) as bus:
        asked = bus.client.generate(
            [1], other_logprobs=True, entropies=True, logprob_token_ids=[9, 4], mask_bound=2, top_logprobs=1
        )
        plain, made_up = bus.client.generate([1]), bus.client.generate([1], mask_bound=1)
        assert [token.extras async for token in asked] == [
            tokenbus.TokenExtras(-1.0, 0.5, ((9, -3.0), (4, -10.0)), 2, (5, 8)),
            tokenbus.TokenExtras(-2.0, 0.5, ((9, -3.0), (4, -10.0)), 3, None),
        ]
        assert [token.extras async for token in plain] == [None, None]
        assert [token.extras async for token in made_up] == [tokenbus.TokenExtras(None, None, (), 1, (5,))]


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("rank", [1, 2, 4, 50])
async def test_alternatives_that_are_made_up_agree(top_k: int, rank: int) -> None:
    tokens, _ = await answered(testing.Answer(tokens=[5, 49_999], logprobs=-1.5, ranks=rank), top_logprobs=top_k)
    for token in tokens:
        assert len(token.alternatives) == top_k
        assert len({other for other, _ in token.alternatives}) == top_k
        if rank <= top_k:
            assert token.alternatives[rank - 1] == (token.id, -1.5)


async def test_limit_of_the_request_cuts_the_answer() -> None:
    tokens, generation = await answered(testing.Answer(tokens=[5, 6, 7]), max_tokens=2)
    assert [token.id for token in tokens] == [5, 6]
    assert generation.status is RowStatus.FINISHED_LENGTH


async def test_drafts_come_with_their_logprobs() -> None:
    answer = testing.Answer(tokens=[5, 6, 7], tokens_per_step=2, drafts=[[(5, -0.5), (8, -1.5)], []])
    async with testing.bus(testing.ScriptedEngine(answer)) as bus, bus.client.steps() as steps:
        bus.client.submit([1], top_logprobs=0, include_draft_logprobs=True)
        first, second = await anext(steps), await anext(steps)
        assert isinstance(first, tokenbus.StepRows)
        assert isinstance(second, tokenbus.StepRows)
        assert first.target.token_ids.tolist() == [5, 6]
        assert first.target.draft_token_counts.tolist() == [2]
        assert first.draft is not None
        assert first.draft.token_ids.tolist() == [5, 8]
        assert first.draft.logprobs.tolist() == [-0.5, -1.5]
        assert second.target.token_ids.tolist() == [7]


async def test_step_that_fails_ends_its_request_alone() -> None:
    async with testing.bus(
        testing.ScriptedEngine(
            testing.Answer(tokens=[1, 2, 3, 4], fails_after=2, error="out of memory"),
            testing.Answer(tokens=[5, 6, 7, 8]),
        )
    ) as bus:
        failing, other = bus.client.generate([1]), bus.client.generate([1])
        had = []
        with pytest.raises(tokenbus.RequestFailedError, match=r"engine: .*out of memory") as failed:
            had += [token.id async for token in failing]
        assert failed.value.generated_tokens == 2
        assert [token.id async for token in other] == [5, 6, 7, 8]


async def test_engine_that_breaks_ends_its_worker() -> None:
    async with testing.bus(testing.ScriptedEngine(testing.Answer(tokens=[1, 2], breaks_after=1))) as bus:
        with pytest.raises(tokenbus.RequestFailedError, match="the engine is broken"):
            [token async for token in bus.client.generate([1], continuation="off")]
        await bus.advance(1)
        assert isinstance(bus.worker.failure, tokenbus.EngineBrokenError)
        assert not bus.processor.workers.by_id


async def test_function_answers_each_request() -> None:
    def twice(generate: Generate) -> testing.Answer:
        return testing.Answer(tokens=[2 * each for each in generate.tokens.token_ids])

    async with testing.bus(testing.ScriptedEngine(answer=twice)) as bus:
        for prompt in ([1, 2], [9]):
            assert [token.id async for token in bus.client.generate(prompt)] == [2 * each for each in prompt]


async def test_aborted_request_ends() -> None:
    engine = testing.ScriptedEngine(testing.Answer(tokens=[1] * 1000))
    async with testing.bus(engine, step_seconds=0.1) as bus:
        generation = bus.client.generate([1], request_id=7)
        await bus.until(anext(generation))
        bus.client.abort(7)

        async def rest() -> list[int]:
            return [token.id async for token in generation]

        await bus.until(rest())
        assert generation.status is RowStatus.ABORTED
        assert engine.aborted == [7]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (testing.Answer(tokens=[1, 2], logprobs=[-1.0]), "answer.logprobs: 2, one per token, got 1"),
        (testing.Answer(tokens=[1, 2], ranks=[1, 1, 1]), "answer.ranks: 2, one per token, got 3"),
        (testing.Answer(tokens=[1, 2], masks=[[1]]), "answer.masks: 2, one per token, got 1"),
        (testing.Answer(tokens=[1], alternatives=[]), "answer.alternatives: 1, one per token, got 0"),
        (testing.Answer(tokens=[1, 2, 3], fails_after=3), "answer.fails_after: below 3, its number of tokens, got 3"),
        (testing.Answer(tokens=[1], breaks_after=-1), "answer.breaks_after: below 1, its number of tokens, got -1"),
        (testing.Answer(tokens=[1], status=RowStatus.ABORTED), "answer.status: FINISHED_STOP or FINISHED_LENGTH, got ABORTED"),  # noqa: E501
        (testing.Answer(tokens=[1], tokens_per_step=0), "answer.tokens_per_step: at least 1, got 0"),
        (testing.Answer(tokens=[1], alternatives=[[(1, -0.5)]]), "answer.alternatives: 2 per token, as the request"),
    ],
)  # fmt: skip
async def test_answer_that_cannot_be_given_refuses_its_request(answer: testing.Answer, reason: str) -> None:
    with pytest.raises(tokenbus.RequestFailedError, match=reason):
        await answered(answer, top_logprobs=2)


async def test_request_beyond_the_script_is_refused() -> None:
    async with testing.bus(testing.ScriptedEngine()) as bus:
        with pytest.raises(tokenbus.RequestFailedError, match="the script has no answer for request 7"):
            [token async for token in bus.client.generate([1], request_id=7)]
