"""lm-eval and litellm as they are on PyPI: the same by the gateway as by vLLM's own server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.vllm.real.hosts import apart
from tests.engines.vllm.real.servers import CONTEXT, Servers
from tests.engines.vllm.tiny_model import WORDS

pytestmark = pytest.mark.weekly
DOCUMENTS: dict[str, list[Any]] = {
    "asked": ["the cat sat on", "saw one more token", "words went", "é"],
    "choices": [
        [" a mat", " the bus", " one more token"],
        [" pass by", " and", " stop while words"],
        [" round and round", " by the bus"],
        ["é", " cat", "zzz"],
    ],
    "gold": [0, 1, 0, 2],
    "text": [WORDS * 9, "the cat", "é 猫 <end>", "x"],
}
"""The first of the texts is far longer than what is asked of at once."""
TASKS: dict[str, dict[str, Any]] = {
    "loglikelihood": {"doc_to_text": "{{asked}}", "doc_to_target": "{{choices[gold]}}"},
    "multiple_choice": {"doc_to_text": "{{asked}}", "doc_to_target": "gold", "doc_to_choice": "choices"},
    "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "{{text}}"},
}
METRICS = {
    "loglikelihood": {"perplexity", "acc"},
    "multiple_choice": {"acc", "acc_norm"},
    "loglikelihood_rolling": {"word_perplexity", "byte_perplexity", "bits_per_byte"},
}


Scores = Mapping[str, tuple[Mapping[str, Any], list[Any]]]
"""By the kind of task its metrics, and of each document what the model says, as lm-eval has them."""


def scores(url: str, name: str, folder: Path) -> Scores:
    from datasets import Dataset  # noqa: PLC0415 - only where vLLM is
    from lm_eval import simple_evaluate  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    data = {"custom_dataset": lambda **_: {"test": Dataset.from_dict(DOCUMENTS)}, "test_split": "test"}
    found = simple_evaluate(
        "local-completions",
        f"model={name},base_url={url}/v1/completions,tokenizer={folder},num_concurrent=4,max_length=128,max_retries=1",
        [{"task": kind, "output_type": kind, "target_delimiter": "", **data, **task} for kind, task in TASKS.items()],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        kind: (
            {metric.partition(",")[0]: value for metric, value in results.items() if "stderr" not in metric},
            [each["resps"] for each in sorted(found["samples"][kind], key=lambda sample: sample["doc_id"])],
        )
        for kind, results in found["results"].items()
    }


def both_scores(theirs: str, ours: str, name: str, folder: Path) -> tuple[Scores, Scores]:
    return scores(theirs, name, folder), scores(ours, name, folder)


@pytest.fixture(scope="module")
def both(servers: Servers) -> tuple[Scores, Scores]:
    return apart(both_scores, servers.theirs.url, servers.ours.url, servers.model, servers.folder)


@pytest.mark.parametrize("kind", TASKS)
def test_same_scores(both: tuple[Scores, Scores], kind: str) -> None:
    """A document's scores are the same numbers of 32 bits, whose sums are written with other digits."""
    (theirs, their_answers), (ours, our_answers) = (scores[kind] for scores in both)
    assert METRICS[kind] <= theirs.keys()
    assert len(their_answers) == len(DOCUMENTS["text"])
    assert our_answers == approximately(their_answers)
    assert ours == approximately(theirs)


def approximately(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return what is equal to a value whose numbers differ by no more than a sum of them is rounded."""
    if isinstance(value, dict):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(approximately, value))
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


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


def both_routed(theirs: str, ours: str, name: str) -> tuple[Routed, Routed]:
    return routed(theirs, name), routed(ours, name)


def test_long_context_falls_back(servers: Servers) -> None:
    theirs, ours = apart(both_routed, servers.theirs.url, servers.ours.url, servers.model)
    assert ours == theirs
    assert ours.error == "ContextWindowExceededError"
    short, long = ours.prompt_tokens
    assert short < CONTEXT // 2 < long < CONTEXT
