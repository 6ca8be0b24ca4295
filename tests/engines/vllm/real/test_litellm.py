"""litellm as it is on PyPI: a prompt that is too long goes to the model that takes it."""

from typing import Any, NamedTuple

import pytest

from tests.engines.vllm.real.hosts import apart
from tests.engines.vllm.real.servers import CONTEXT, Servers

pytestmark = pytest.mark.weekly
LONG: list[Any] = [{"role": "user", "content": "the cat " * CONTEXT}]
SHORT: list[Any] = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "max_tokens": 5}
CUT = {"truncate_prompt_tokens": -1}


class Routed(NamedTuple):
    """What became of a short and of a long prompt."""

    error: str
    """What a model raises that does not take the long one."""
    texts: list[str]
    prompt_tokens: list[int]


def routed(url: str, name: str) -> Routed:
    """Ask by a router that knows the server's model by two names, by one of which it cuts prompts to what fits."""
    import litellm  # noqa: PLC0415 - only where vLLM is

    place = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "none"}
    with pytest.raises(litellm.BadRequestError) as raised:
        litellm.completion(messages=LONG, num_retries=0, **place)
    models = [
        {"model_name": "short", "litellm_params": place},
        {"model_name": "long", "litellm_params": place | {"extra_body": CUT}},
    ]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
    found = [router.completion("short", messages, **GREEDY) for messages in (SHORT, LONG)]
    return Routed(
        raised.type.__name__,
        [each.choices[0].message.content for each in found],
        [each.usage.prompt_tokens for each in found],
    )


def both(theirs: str, ours: str, name: str) -> tuple[Routed, Routed]:
    """Ask both servers, in one process that imports litellm."""
    return routed(theirs, name), routed(ours, name)


def test_long_context_falls_back(servers: Servers) -> None:
    theirs, ours = apart(both, servers.theirs.url, servers.ours.url, servers.model)
    assert ours == theirs
    assert ours.error == "ContextWindowExceededError"
    short, long = ours.prompt_tokens
    assert short < CONTEXT // 2 < long < CONTEXT
