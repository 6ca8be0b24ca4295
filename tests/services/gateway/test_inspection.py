"""What the inspector gets of tokens that have no text of their own."""

import json
from typing import Any

from tests.services.builders import settings
from tokenbus_contracts import BatchHeader, LogprobBatch, RowStatus, Scoring, ValueKind
from tokenbus_engines.paddle.tokenizer import END
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.completion_request import CompletionRequest
from tokenbus_services.gateway.rendered_step import RenderedStep
from tokenbus_services.gateway.sse import InspectedAnswer
from tokenbus_services.gateway.vocabulary import vocabulary_of


async def told(ids: list[int], others: list[int]) -> list[dict[str, Any]]:
    """Return the members of a row's tokens, each of which has one alternative."""
    count = len(ids)
    batch = LogprobBatch(
        BatchHeader("worker-0", epoch=1, sequence=1, step=1, step_rows=1, value_kind=ValueKind.RAW_LOGPROBS),
        request_keys=[1],
        batch_indices=[0],
        positions=[0],
        statuses=[RowStatus.FINISHED_LENGTH],
        token_counts=[count],
        draft_token_counts=[0],
        proposal_counts=[0],
        scorings=[Scoring.FULL],
        top_ks=[1],
        token_ids=ids,
        logprobs=[-1.0] * count,
        ranks=[2] * count,
        alternative_token_ids=others,
        alternative_logprobs=[-0.5] * count,
    )
    answer = InspectedAnswer(
        CompletionRequest(model="m", prompts=[[1]], top_logprobs=1), 1, settings().gateway, Buffers(2**30)
    )
    answer.begin(lambda: None)
    answer.take(RenderedStep(batch, vocabulary_of("bytes")), 0)
    events = answer.outbox.take(2**30).data.decode().split("\n\n")
    (row,) = (json.loads(event.partition("data: ")[2]) for event in events if event.startswith("event: row"))
    tokens: list[dict[str, Any]] = row["tokens"]
    return tokens


async def test_parts_of_characters_can_be_told_apart() -> None:
    first, second = "\u00e9".encode()
    tokens = await told([ord("a"), first, second, END], [0xC4, second, ord("b"), END])
    assert [token["text"] for token in tokens] == ["a", "", "\u00e9", ""]
    assert [token.get("name") for token in tokens] == [None, "bytes:\\xc3", "bytes:\\xa9", f"<|{END}|>"]
    alternatives = [token["alternatives"][0][1] for token in tokens]
    assert alternatives == ["bytes:\\xc4", "bytes:\\xa9", "b", f"<|{END}|>"]
