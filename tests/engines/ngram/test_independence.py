"""A request's outcome follows from what it asks for alone."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.runs import asked, ngram
from tokenbus.engines.ngram import default_tokenizer
from tokenbus_contracts.generated.request_pb2 import Generate

PROMPTS = ["The old man said", "What is", "xyz 12", "In the evening the", ".", "\N{GRINNING FACE}"]
SAMPLINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "max_tokens": st.integers(1, 24)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 3.0]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 100_000]),
        "stop": st.lists(st.sampled_from(["the", ". ", "e w", '"']), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, default_tokenizer().vocabulary_size - 1), max_size=3),
        "ignore_end_token": st.booleans(),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> Generate:
    """Draw a request; its key is given later."""
    sampling: dict[str, Any] = draw(SAMPLINGS)
    top_logprobs = draw(st.none() | st.integers(0, 20))
    wants_drafts = draw(st.booleans())
    return asked(1, draw(st.sampled_from(PROMPTS)), top_logprobs, include_draft_logprobs=wants_drafts, **sampling)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    mine=requests(),
    others=st.lists(requests(), min_size=1, max_size=12),
    place=st.integers(0, 11),
    late=st.integers(0, 3),
    options=st.sampled_from([{}, {"max_running": 2, "slice_steps": 2, "prefill_chunk": 3}, {"prefill_chunk": 2}]),
)
def test_an_outcome_does_not_depend_on_neighbours(
    mine: Generate, others: list[Generate], place: int, late: int, options: dict[str, int]
) -> None:
    """Tokens, scores and drafts of a request are the same alone and among others, whatever they ask for.

    So they are where it is preempted, and computed again in chunks (cases 15, 22).
    """
    alone = ngram([mine]).to_the_end()
    wanted = list(others)
    wanted.insert(min(place, len(wanted)), mine)
    for key, generate in enumerate(wanted, start=1):
        generate.request_key = key
    mine_key = mine.request_key
    run = ngram(wanted[: len(wanted) - late], **options)
    for generate in wanted[len(wanted) - late :]:
        run.step()
        run.admit(generate)
    run.to_the_end()
    got, other = run.got[mine_key], alone.got[1]
    for column in ("tokens", "logprobs", "ranks", "alternatives"):
        assert getattr(got, column) == getattr(other, column), column
    assert got.statuses[-1] is other.statuses[-1]
    drafts = [
        [(row.token_ids.tolist(), row.logprobs.tolist()) for row in each.drafts if row.token_ids.size]
        for each in (got, other)
    ]
    assert drafts[0] == drafts[1]
