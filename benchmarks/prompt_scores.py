"""Measure how long a prompt's scores hold a gateway's event loop at once: `python -m benchmarks.prompt_scores`.

They are written as JSON in parts, and other tasks run between two of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.report import Report, Row
from tokenbus_contracts import PromptScores
from tokenbus_contracts.generated.request_pb2 import PromptScoring
from tokenbus_engines.synthetic import true_prompt_scores
from tokenbus_services.gateway.prompt_writers import echoed_lists, prompt_logprobs
from tokenbus_services.gateway.vocabulary import Vocabulary, vocabulary_of

_POSITIONS = 8192
_FORMS: dict[str, Callable[[PromptScores, list[int], Vocabulary], Iterator[object]]] = {
    "prompt_logprobs": lambda scores, _, vocabulary: prompt_logprobs(scores, vocabulary),
    "echo": lambda scores, prompt, vocabulary: echoed_lists(prompt, scores, vocabulary, vocabulary.tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("prompt_scores", __doc__)
    options = report.parse(arguments)
    vocabulary, count = vocabulary_of("ngram"), 512 if options.quick else _POSITIONS
    prompt = [place % vocabulary.size for place in range(count)]
    report.table([_measured(form, k, prompt, vocabulary) for form in _FORMS for k in (0, 20)])
    report.write()


def _measured(form: str, k: int, prompt: list[int], vocabulary: Vocabulary) -> Row:
    scores = true_prompt_scores(1, prompt, PromptScoring(top_logprobs=k))
    scores = replace(scores, alternative_token_ids=scores.alternative_token_ids % vocabulary.size)
    for _ in range(2):  # the second time the vocabulary's tables have all tokens
        turns, parts = [], _FORMS[form](scores, prompt, vocabulary)
        while True:
            began = time.thread_time()
            part = next(parts, None)
            turns.append(1e3 * (time.thread_time() - began))
            if part is None:
                break
    return {
        "form": form,
        "k": k,
        "positions": len(prompt),
        "parts": len(turns) - 1,
        "all of them, ms": sum(turns),
        "the longest, ms": max(turns),
        "the median, ms": float(np.median(turns)),
    }


if __name__ == "__main__":
    main()
