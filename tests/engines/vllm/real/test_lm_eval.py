"""lm-eval as it is on PyPI: its scores by the gateway are those by vLLM's own server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.real.hosts import apart
from tests.engines.vllm.real.servers import Servers
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
    """Return how both servers score, in one process that imports lm-eval."""
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
