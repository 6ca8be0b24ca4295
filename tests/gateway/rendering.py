"""Answers made of batches without a bus, and what OpenAI's clients would read in them."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tests.in_process.builders import settings
from tokenbus.client.tokens import Turn
from tokenbus.gateway.answer import Format, WholeAnswer
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.event_writer import EventWriter, Rows
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.sse import StreamedAnswer
from tokenbus.gateway.vocabulary import Vocabulary
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus, Scoring

KEY = 0xA
Steps = Sequence[tuple[LogprobBatch, LogprobBatch | None]]


class Spelling:
    """A tokenizer whose tokens are the pieces of one text."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self._pieces = pieces
        self.vocabulary_size = max(pieces) + 1

    def encode(self, text: str) -> list[int]:
        """Return nothing: no test encodes a text."""
        del text
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's text."""
        return self._pieces.get(token_id, "").encode()


def three_steps(
    status: RowStatus = RowStatus.FINISHED_LENGTH, *, scoring: Scoring = Scoring.FULL, top_k: int = 0
) -> Steps:
    shapes = [(0, 1, RowStatus.ACTIVE), (1, 3, RowStatus.ACTIVE), (4, 2, status)]
    rows = [RowShape(3, *shape, scoring=scoring, top_k=top_k) for shape in shapes]
    return [(batch([row], step=step), None) for step, row in enumerate(rows, 1)]


def spelled(text: str, steps: Steps) -> Vocabulary:
    ids = [token for each, _ in steps for row in each.rows() for token in row.token_ids.tolist()]
    cuts = [place * len(text) // len(ids) for place in range(len(ids) + 1)]
    return Vocabulary(
        Spelling({token: text[begin:end] for token, begin, end in zip(ids, cuts, cuts[1:], strict=False)})
    )


async def said(  # noqa: PLR0913 - each has a name and a default
    asked: CompletionRequest,
    steps: Steps,
    vocabulary: Vocabulary,
    form: Callable[[CompletionRequest, int], Format] = Envelope,
    *,
    cached: int | None = None,
    turns: Sequence[Turn] = (),
) -> bytes:
    """Return what an answer sends of some steps, of which its requests have the first rows.

    Of each prompt so many tokens were cached, and each request has these turns.
    """
    maker = StreamedAnswer if asked.is_streamed else WholeAnswer
    answer = maker(asked, form(asked, KEY), settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    writer = EventWriter(vocabulary, len(answer.choices))
    keys = steps[0][0].request_ids.tolist()
    wanting = dict(zip(keys, answer.choices, strict=False))
    for key, choice in wanting.items():
        choice.cached_tokens, choice.turns = cached, turns
        writer.open(key, choice.stream)
    for target, draft in steps:
        rows = Rows(writer, [RenderedStep(target, vocabulary, draft)])
        for key, left in rows.write(0, len(rows)):
            for view, place, events, _ in left if key in wanting else ():
                if events is not None:
                    answer.put_events(events, view.produced_at_ns)
                elif not wanting[key].take(view, place):
                    del wanting[key]
                    writer.close(key)
    assert answer.error is None
    await answer.ready()
    sending = answer.queue.take(2**30)
    assert sending.is_last
    return sending.data


def chunks(data: bytes) -> Iterator[dict[str, Any]]:
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        yield json.loads(event.removeprefix("data: "))


def named(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream that has no mark at its end; each is named by its data's type."""
    found = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, text = event.partition("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def both(
    asked: CompletionRequest,
    steps: Steps,
    output: str,
    form: Callable[[CompletionRequest, int], Format],
    cached: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer in which a model writes some output, and the events of the same answer as a stream."""
    streamed, vocabulary = replace(asked, is_streamed=True), spelled(output, steps)
    whole: dict[str, Any] = json.loads(await said(asked, steps, vocabulary, form, cached=cached))
    return whole, named(await said(streamed, steps, vocabulary, form, cached=cached))


def begun(
    asked: CompletionRequest, form: Callable[[CompletionRequest, int], Format], given: dict[str, object] | None = None
) -> StreamedAnswer:
    asked = replace(asked, is_streamed=True)
    answer = StreamedAnswer(asked, form(asked, 1), settings(given).gateway, Buffers(2**30))
    answer.begin(lambda: None)
    return answer


FORCED_CALLS = [
    ("weather", '{"city": "Bern"}', [("weather", {"city": "Bern"})]),
    (
        None,
        '[{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "now", "parameters": {}}]',
        [("weather", {"city": "Bern"}), ("now", {})],
    ),
]
"""The function that a request forces, the output of a model, and the calls that it is."""
FOUND_CALL = 'So: <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def array(text: str, kind: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), kind)


def joined(parts: Iterable[Any], name: str) -> list[Any]:
    return [each for part in parts if part is not None for each in part[name] or ()]
