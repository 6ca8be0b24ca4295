"""A prefill and a decode worker of vLLM: the cache goes from one to the other by a connector of vLLM's own."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines.vllm.real.hosts import EngineHost
from tests.engines.vllm.real.runs import SHARED, Answer, Case, add, arguments
from tokenbus.engines.vllm import VllmEngine
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, RowStatus

CASE = Case([5 + place * 7 % 300 for place in range(70)], {"temperature": 0.0, "max_tokens": 9}, 2)
BLOCK = SHARED["block_size"]


def computed(
    engine: VllmEngine, key: int, accepted: list[int], state: bytes
) -> tuple[Answer, dict[int, bytes], list[int]]:
    generate, answer = CASE.generate(key), Answer(tokens=list(accepted))
    generate.continuation.token_ids.extend(accepted)
    generate.continuation.transfer_state = state
    engine.admit(generate)
    assembler = StepAssembler(Limits.default(), engine.vocabulary_size)
    states: dict[int, bytes] = {}
    cached = []
    while engine.has_work:
        for arrays in engine.step():
            states.update(arrays.transfer_states)
            cached += [count for _, _, count in arrays.cached_prompts]
            for batch in assembler.assemble(arrays):
                for row in batch.rows():
                    add(answer, row)
    return answer, states, cached


def test_decode_worker_goes_on_with_the_cache_of_the_prefill_worker(model: Path, tmp_path: Path) -> None:
    """The connector's parameters are the transfer state. Without it the decode worker computes the prompt itself."""
    connector = {
        "kv_connector": "NamedCache",
        "kv_connector_module_path": "tests.engines.vllm.real.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    shared = {**SHARED, "dtype": "float32", "max_num_batched_tokens": 512, "kv_transfer_config": connector}
    given = [*arguments(shared), "--no-enable-prefix-caching"]
    with (
        closing(EngineHost(model, given, "prefill")) as prefill,
        closing(EngineHost(model, given, "decode")) as decode,
    ):
        begun, states, _ = prefill(computed, 1, [], b"")
        assert (begun.status, len(begun.tokens)) == (RowStatus.HANDED_OFF, 1)
        assert json.loads(states[1]) == {"written": 70}
        whole, _, cached = decode(computed, 2, [], b"")
        assert (whole.status, len(whole.tokens), cached) == (RowStatus.FINISHED_LENGTH, 9, [])
        rest, _, cached = decode(computed, 1, begun.tokens, states[1])
    assert cached == [70 // BLOCK * BLOCK]
    assert rest.tokens == whole.tokens
    assert begun.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
