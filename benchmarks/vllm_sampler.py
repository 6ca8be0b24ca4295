"""Measure vLLM's sampler without and with `--token-scores`: `python -m benchmarks.vllm_sampler`.

A step goes from logits to logprobs on the host, through the sampler of vLLM's V1 runner.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.errors import NotRunError
from benchmarks.report import Report, Row

ASKED = {
    "nothing beside": None,
    "entropy": [0, 1, 0],
    "both logprobs and entropy": [1, 1, 0],
    "that, 8 given ids, masks up to 64": [1, 1, 64, *range(8)],
}
"""What every request asks for, as an argument of vLLM's has it."""
_WARM = 3
"""How many turns come before those that count: vLLM compiles."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("vllm_sampler", __doc__)
    report.parser.add_argument("--rows", type=int, default=256, help="how many requests (%(default)s)")
    report.parser.add_argument("--vocabulary", type=int, default=151_936, help="how many tokens (%(default)s)")
    report.parser.add_argument("--repeats", type=int, default=50, help="how often each is timed (%(default)s)")
    options = report.parse(arguments)
    repeats = 3 if options.quick else options.repeats
    try:
        import torch
        from vllm.v1.sample.sampler import Sampler
    except ImportError as error:
        report.say(f"not run: vLLM cannot be imported: {error}")
        return
    try:
        with torch.inference_mode():
            for top_p in (None, 0.9):
                rows = measure(torch, Sampler, options.rows, options.vocabulary, repeats, top_p)
                report.table(
                    rows, f"temperature 0.8, top-p {top_p or 'none'}, {options.rows} rows: milliseconds a step"
                )
    except NotRunError as error:
        report.say(f"not run: {error}")
    report.write()


def measure(  # noqa: PLR0913, PLR0917 - what a step is of
    torch: Any,  # noqa: ANN401 - the module
    plain: Any,  # noqa: ANN401 - vLLM's class
    rows: int,
    vocabulary: int,
    repeats: int,
    top_p: float | None,
) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.randn(rows, vocabulary, device=device).mul_(4).to(torch.bfloat16)
    table: list[Row] = []
    for top_k in (0, 20):
        metadata = metadata_of(torch, rows, device, top_k, top_p)
        steps = {"vLLM's own": step_of(torch, plain(), logits, metadata)}
        for name, asked in ASKED.items():
            steps[name] = step_of(torch, scoring(plain(), rows, device, asked), logits, metadata)
        found: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(repeats + _WARM):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if turn >= _WARM:
                    found[name].append((time.perf_counter() - begin) * 1e3)
        own = median(found["vLLM's own"])
        table += [
            {"k": top_k, "what": name, "median": median(times), "times vLLM's own": median(times) / own}
            for name, times in found.items()
        ]
    return table


def step_of(torch: Any, sampler: Any, logits: Any, metadata: Any) -> Callable[[], Any]:  # noqa: ANN401 - vLLM's and torch's
    def step() -> Any:  # noqa: ANN401
        made = sampler(logits, metadata)
        pending = made.logprobs_tensors.to_cpu_nonblocking()
        if logits.is_cuda:
            torch.cuda.synchronize()
        return pending.tolists()

    return step


def scoring(sampler: Any, rows: int, device: Any, asked: list[int] | None) -> Any:  # noqa: ANN401 - vLLM's and torch's
    """Return a sampler that is ours, in a model runner with requests that all ask for the same."""
    from tokenbus.engines.vllm.sampler import use_token_scores  # noqa: PLC0415 - it imports vLLM
    from tokenbus.engines.vllm.token_scores import ASKED as NAME  # noqa: PLC0415

    names = [str(place) for place in range(rows)]
    parameters = SimpleNamespace(extra_args=None if asked is None else {NAME: asked})
    runner = SimpleNamespace(
        sampler=sampler,
        device=device,
        requests=dict.fromkeys(names, SimpleNamespace(sampling_params=parameters)),
        input_batch=SimpleNamespace(req_ids=names),
        _get_prompt_logprobs_dict=None,
    )
    try:
        use_token_scores(SimpleNamespace(model_runner=runner))
    except ValueError as error:
        raise NotRunError(str(error)) from None
    return sampler


def metadata_of(torch: Any, rows: int, device: Any, top_k: int, top_p: float | None) -> Any:  # noqa: ANN401
    """Return vLLM's SamplingMetadata of requests that sample at random without seeds."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def each(value: float) -> Any:  # noqa: ANN401
        return torch.full((rows,), value, device=device)

    return SamplingMetadata(
        temperature=each(0.8),
        all_greedy=False,
        all_random=True,
        top_p=None if top_p is None else each(top_p),
        top_k=None,
        generators={},
        max_num_logprobs=top_k,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=each(0),
        presence_penalties=each(0),
        repetition_penalties=each(1),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


if __name__ == "__main__":
    main()
