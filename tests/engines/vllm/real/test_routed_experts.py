"""Routed experts as vLLM's own scheduler returns them: the files have the arrays that its front end gets.

Only vLLM's V2 model runner captures experts, and it needs a GPU. So each row here has the position of its token. The
rest is vLLM's: its scheduler cuts the rows to the accepted tokens, and its front end joins them.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.real.hosts import apart
from tests.engines.vllm.real.runs import SHARED
from tests.engines.vllm.real.test_engine import LONG, SPECULATION
from tests.engines.vllm.real.test_scheduler import OURS, deployment
from tests.system.deployment import Deployment
from tokenbus.engines.vllm import published
from tokenbus.engines.vllm.sessions import SESSION
from tokenbus.processor import Processor
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus_contracts.generated import request_pb2 as pb

__all__ = ["deployment"]
LAYERS, EXPERTS = 2, 3
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7], {"max_tokens": 1}),
    (LONG, {"max_tokens": 20, "n": 2, "temperature": 1.0}),
    ([7, 8, 9] * 5, {"max_tokens": 12, "routed_experts_prompt_start": 7}),
    ([5, *[7, 8, 9] * 5], {"max_tokens": 60, "stop": ["a", "o", "the"]}),
]


class Captured:
    """Gives vLLM's scheduler the rows that a model runner would have captured."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

        self._scheduler, self._update = scheduler, scheduler.update_from_output
        self._ends: dict[str, int] = {}
        scheduler.aux_output_connector = AuxOutputSchedulerConnector()
        scheduler.update_from_output = self.update

    def update(self, scheduled: Any, computed: Any) -> Any:  # noqa: ANN401 - as above
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        computed.aux_output_connector_output = found = {}
        for name in scheduled.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            sampled = computed.sampled_token_ids[computed.req_id_to_index[name]]
            if not sampled:
                continue
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            end = request.num_computed_tokens - (drafts - len(sampled) + 1 if drafts else 0)
            begin = self._ends.get(name, request.sampling_params.routed_experts_prompt_start)
            rows = np.repeat(np.arange(begin, end, dtype=np.uint16), LAYERS * EXPERTS)
            found[name] = AuxRequestOutput(begin, rows.reshape(-1, LAYERS, EXPERTS))
            self._ends[name] = end
        return self._update(scheduled, computed)


def answered(model: Path, options: dict[str, Any]) -> list[list[Any]]:
    """Publish with our scheduler, and return the array of each answer in vLLM's front end."""
    from vllm import LLM, SamplingParams

    # The option needs a GPU. The process is the test's own.
    vars(published)["check_routed_experts"] = lambda *_: None
    made = LLM(model=str(model), scheduler_cls=OURS, async_scheduling=False, disable_log_stats=True, **options)
    Captured(made.llm_engine.engine_core.engine_core.scheduler)
    extra = {"ignore_eos": True, "extra_args": {SESSION: "run"}}
    sampling = [SamplingParams(**{"temperature": 0, **given}, **extra) for _, given in ASKED]
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in ASKED]
    answers = made.generate(prompts, sampling, use_tqdm=False)
    made.llm_engine.engine_core.shutdown()
    return [each.routed_experts.tolist() for answer in answers for each in answer.outputs]


async def test_files_have_the_arrays_of_the_front_end(
    model: Path, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_WORKER_ROUTED_EXPERTS_FOLDER", str(tmp_path / "spool"))
    places: list[pb.RoutedExperts] = []

    def note(item: Any, _: object) -> None:  # noqa: ANN401 - a ReceivedItem
        if item.event is not None and item.event.HasField("routed_experts"):
            places.append(item.event.routed_experts)

    async with Processor(deployment.settings()) as processor:
        processor.intake.log_item = note
        expected = await asyncio.to_thread(apart, answered, model, {**SHARED, "speculative_config": SPECULATION})
    assert [place.missing for place in places] == [""] * 5
    found = [RoutedExperts.of(place).read(tmp_path / "spool").tolist() for place in places]
    assert sorted(found) == sorted(expected)
    assert min(rows[0][0][0] for rows in expected[:-2]) == 0
