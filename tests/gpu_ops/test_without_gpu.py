"""What happens where there is no GPU: nothing is imported in vain, and what is missing is named."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from tests.gpu_ops.logits import random
from tests.gpu_ops.producer import Produced, as_if_on_gpu
from tests.gpu_ops.reference import assert_right
from tokenbus_contracts import ContractError
from tokenbus_gpu_ops import GpuUnavailableError, token_logprobs

needs_no_cuda = pytest.mark.skipif(
    find_spec("cuda") is not None, reason="not run: CUDA's bindings are installed here, so nothing is missing"
)

_IMPORT = """
import sys
import tokenbus_gpu_ops
print(sorted(name for name in ("cuda", "cupy", "paddle", "torch", "tokenbus_gpu_ops.cuda") if name in sys.modules))
"""


@pytest.mark.process
def test_importing_costs_no_framework() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": ""}
    )
    assert run.stdout == "[]\n"


@needs_no_cuda
def test_a_missing_cuda_is_named() -> None:
    logits = as_if_on_gpu(random(np.random.default_rng(1), 2, 50))
    with pytest.raises(GpuUnavailableError) as caught:
        token_logprobs(logits, [1, 2], 3)
    message = str(caught.value)
    assert "CUDA cannot be reached" in message
    assert "install tokenbus[gpu], or pass cpu_fallback=True" in message


@needs_no_cuda
def test_the_cpu_computes_only_where_it_was_asked_to() -> None:
    values = random(np.random.default_rng(2), 2, 50)
    ids = np.array([1, 2])
    assert_right(token_logprobs(as_if_on_gpu(values), ids, 3, cpu_fallback=True), values, ids, 3)
    assert_right(token_logprobs(as_if_on_gpu(values), as_if_on_gpu(ids), 3, cpu_fallback=True), values, ids, 3)
    there, others = as_if_on_gpu(ids), as_if_on_gpu(values)
    result = token_logprobs(as_if_on_gpu(values), there, 3, token_counts=[1, 1], other_logits=others, cpu_fallback=True)
    assert_right(result, values, ids, 3)
    assert result.other_logprobs.tolist() == result.logprobs.tolist()


def test_ids_on_a_gpu_do_for_logits_on_the_cpu() -> None:
    values = random(np.random.default_rng(3), 2, 50)
    ids = np.array([1, 2])
    assert_right(token_logprobs(values, as_if_on_gpu(ids), 3), values, ids, 3)


def test_bad_input_is_refused_before_the_gpu_is_asked_for() -> None:
    logits = as_if_on_gpu(random(np.random.default_rng(4), 2, 50))
    with pytest.raises(ContractError) as caught:
        token_logprobs(logits, [1, 50], 3)
    assert str(caught.value) == "token_ids[1]: at most 49, got 50"
    with pytest.raises(ContractError) as caught:
        token_logprobs(logits, as_if_on_gpu(np.array([1, 2], np.int16)), 3)
    assert str(caught.value) == "token_ids: whole numbers (int32, int64), got int16"


def test_the_producer_is_told_the_stream() -> None:
    logits = as_if_on_gpu(random(np.random.default_rng(5), 2, 50))
    for stream in (0, 77):
        with pytest.raises(ContractError):
            token_logprobs(logits, [1, 50], stream=stream)
    assert logits.streams == [1, 77]


def test_streams_are_handles_or_say_theirs() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 78

    of_torch = SimpleNamespace(cuda_stream=79)
    logits = as_if_on_gpu(random(np.random.default_rng(6), 2, 50))
    for stream in (Protocol(), of_torch, SimpleNamespace(stream_base=of_torch)):  # the last as Paddle has them
        with pytest.raises(ContractError, match="token_ids"):
            token_logprobs(logits, [1, 50], stream=stream)
    assert logits.streams == [78, 79, 79]
    with pytest.raises(ContractError) as caught:
        token_logprobs(logits, [1, 2], stream="mine")
    assert str(caught.value) == "stream: a stream or its handle, got str"


def test_other_devices_are_refused() -> None:
    values = random(np.random.default_rng(7), 2, 50)
    with pytest.raises(ContractError) as caught:
        token_logprobs(Produced(values, 2, device=(10, 0)), [1, 2])
    assert str(caught.value) == "logits: an array on a CPU or a CUDA GPU, got DLPack device 10"
