"""What requests ask of their tokens beyond logprobs, from the engine to whoever asked, whatever breaks on the way."""

from typing import Any

import numpy as np
import pytest

import tokenbus.testing
from tokenbus.client.parameters import request_of
from tokenbus.client.tokens import Generation
from tokenbus.delivery import RequestFailedError, Token
from tokenbus.engines.synthetic import SyntheticEngine, true_extras, true_tokens

WISHES: list[dict[str, Any]] = [
    {},
    {"entropies": True},
    {"other_logprobs": True, "top_logprobs": 3},
    {"logprob_token_ids": [9, 7, 300]},
    {"mask_bound": 4},
    {
        "mask_bound": 1024,
        "entropies": True,
        "logprob_token_ids": range(128),
        "other_logprobs": True,
        "top_logprobs": 20,
    },
]


def check(tokens: list[Token], key: int, given: dict[str, Any]) -> None:
    asked = {name: wish for name, wish in given.items() if name != "top_logprobs"}
    assert [token.extras for token in tokens] == true_tokens(key, 0, len(tokens), **asked).extras
    assert [token.position for token in tokens] == list(range(len(tokens)))


@pytest.mark.parametrize("given", WISHES, ids=lambda given: "+".join(given) or "nothing")
async def test_each_token_has_what_its_request_asked_for(given: dict[str, Any]) -> None:
    async with tokenbus.testing.bus() as bus, bus.client.generate([1, 2], max_tokens=8, **given) as generation:
        check([token async for token in generation], generation.request_id, given)


async def test_rows_have_them_as_arrays() -> None:
    given = WISHES[-1]
    async with tokenbus.testing.bus() as bus, bus.client.generate([1, 2], max_tokens=8, **given) as generation:
        rows = [row async for row in generation.rows()]
    true = true_extras(generation.request_id, 0, 8, request_of([1], given).token_scoring)
    assert all(row.extras is not None for row in rows)
    for name in ("other_logprobs", "entropies", "given_logprobs", "mask_sizes", "mask_token_ids"):
        assert np.array_equal(np.concatenate([getattr(row.extras, name) for row in rows]), getattr(true, name))


async def _read(generation: Generation) -> list[Token]:
    return [token async for token in generation]


async def test_wish_that_the_engine_does_not_have_is_refused_by_name() -> None:
    class Plain(SyntheticEngine):
        token_scores = frozenset({"token_ids"})

    async with tokenbus.testing.bus(Plain) as bus:
        with pytest.raises(RequestFailedError, match=r"token_scoring.mask_bound: none with this engine"):
            await bus.until(_read(bus.client.generate([1], max_tokens=2, mask_bound=4)))
        with pytest.raises(RequestFailedError, match=r"token_scoring.token_ids\[1\]: below 50000, got 50000"):
            await bus.until(_read(bus.client.generate([1], max_tokens=2, logprob_token_ids=[1, 50_000])))
