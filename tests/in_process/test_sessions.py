"""Requests with a session: their prompts are in the stream, for observers who may see prompts."""

import asyncio
from typing import Any

import numpy as np
import pytest

import tokenbus.testing
from tests.in_process.bench import Bench, BenchClient
from tests.in_process.builders import generate_of
from tests.processor.test_ownership import client_of
from tests.worker.looped import Looped, events
from tokenbus.bus import ANONYMOUS, Role
from tokenbus.engines.synthetic import SyntheticEngine, true_prompt_scores
from tokenbus.processor.client_connections import owner_of
from tokenbus.worker.engine_output import session_events
from tokenbus_contracts import ContractError, PromptScores
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Watch
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoring, RequestEvent, SessionPrompt, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

LONG = list(range(40_000))
"""A prompt of several chunks."""


async def watched(prompt: str | list[int], **parameters: Any) -> tuple[int, int, list[SessionPrompt]]:  # noqa: ANN401
    """Return a request's owner and id, and the chunks of its prompt that came before its tokens."""
    found: list[SessionPrompt] = []
    async with tokenbus.testing.bus() as bus, bus.client.watch() as items:

        async def until_tokens() -> None:
            async for item in items:
                if item.batch is not None and item.batch.token_ids.size:
                    return
                if item.event is not None and item.event.HasField("session_prompt"):
                    found.append(item.event.session_prompt)

        reading = asyncio.create_task(until_tokens())
        async with bus.client.generate(prompt, max_tokens=2, **parameters) as generation:
            assert len([token async for token in generation]) == 2
        await bus.until(reading)
        return bus.client.owner, generation.request_id, found


@pytest.mark.parametrize("prompt", [[5], LONG, "a text"], ids=["1", "40000", "text"])
async def test_prompt_is_published_before_the_first_token(prompt: str | list[int]) -> None:
    owner, request_id, chunks = await watched(prompt, session="run 7", parent=3, tenant=9)
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    assert owner
    assert {(each.request_id, each.session, each.parent, each.owner, each.tenant) for each in chunks} == {
        (request_id, "run 7", 3, owner, 9)
    }
    assert np.concatenate([np.frombuffer(each.token_ids, "<u4") for each in chunks]).tolist() == ids
    assert [each.position for each in chunks] == [15_360 * number for number in range(len(chunks))]
    assert {each.prompt_tokens for each in chunks} == {len(ids)}


async def test_prompts_without_a_session_are_not_published() -> None:
    assert (await watched([1, 2, 3]))[2] == []


async def test_long_label_is_refused() -> None:
    async with tokenbus.testing.bus() as bus:
        with pytest.raises(ContractError, match=r"^session: at most 128 bytes, got 129"):
            bus.client.generate([1], session="s" * 129)


class TextlessEngine(SyntheticEngine):
    """An engine that cannot encode texts."""

    encode = property()  # whoever looks for it finds nothing


def test_text_needs_an_engine_that_encodes() -> None:
    looped = Looped(TextlessEngine())
    looped.turn(Generate(request_id=1, text={"text": "a"}, sampling={}, session="s"), generate_of(2, 3, session="s"))
    looped.finish()
    message = "session: with this engine only for a prompt of token ids, got a text"
    assert {key: text for key, (_, text) in looped.errors().items()} == {1: message}
    (chunk,) = [each.session_prompt for each in events(looped.publisher) if each.HasField("session_prompt")]
    assert (chunk.request_id, chunk.session) == (2, "s")
    assert len(looped.tokens(2)) == 3


@pytest.mark.parametrize("may_see", [True, False])
def test_only_observers_with_the_role_see_prompts(*, may_see: bool) -> None:
    bench = Bench()
    worker = bench.worker()
    roles = {Role.OBSERVER, Role.PROMPTS} if may_see else {Role.OBSERVER}
    watcher = client_of(bench, 5, "grafana", roles=frozenset(roles))
    watcher.say(ClientFrame(watch=Watch()))
    (event,) = session_events(generate_of(1, session="s", tokens=TokenPrompt(token_ids=[7, 8])))
    event.sequence = 1
    worker.item(write_frame(event), 1, PayloadKind.PAYLOAD_KIND_REQUEST_EVENT)
    assert ids_seen(bench, watcher) == ([7, 8] if may_see else [])


@pytest.mark.parametrize("may_see", [True, False])
def test_scores_of_prompts_are_hidden_as_prompts_are(*, may_see: bool) -> None:
    bench = Bench()
    worker = bench.worker()
    roles = {Role.OBSERVER, Role.PROMPTS} if may_see else {Role.OBSERVER}
    watcher = client_of(bench, 5, "grafana", roles=frozenset(roles))
    watcher.say(ClientFrame(watch=Watch()))
    (chunk,) = true_prompt_scores(1, [7, 8, 9], PromptScoring(top_logprobs=2), 1).chunks()
    event = RequestEvent(sequence=1, prompt_scores=chunk)
    worker.item(write_frame(event), 1, PayloadKind.PAYLOAD_KIND_REQUEST_EVENT)
    (payload,) = [parts[1] for parts in bench.sent[watcher.peer] if len(parts) == 2]
    shown = PromptScores.of(read_frame(RequestEvent, payload).prompt_scores)
    assert shown.token_ids.tolist() == ([8, 9] if may_see else [])
    assert shown.prompt_tokens == 3


def ids_seen(bench: Bench, watcher: BenchClient) -> list[int]:
    """Return the ids of the only prompt that a watcher was shown."""
    (payload,) = [parts[1] for parts in bench.sent[watcher.peer] if len(parts) == 2]
    shown = read_frame(RequestEvent, payload).session_prompt
    assert (shown.session, shown.prompt_tokens) == ("s", 2)
    return list(np.frombuffer(shown.token_ids, "<u4"))


def test_client_cannot_name_another_owner() -> None:
    bench = Bench()
    worker, client = bench.worker(), bench.client(5)
    worker.heard()
    client.ask(generate_of(1, session="s", owner=77))
    (generate,) = [frame.generate for frame in worker.heard() if frame.HasField("generate")]
    owner = owner_of(bench.peers.identities.get(client.peer, ANONYMOUS), "client")
    assert generate.owner == owner
