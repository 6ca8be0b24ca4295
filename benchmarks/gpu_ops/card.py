"""Time on the card: by events, over inputs that the card's cache does not hold from the last time."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any
from unittest import mock

import numpy as np

from tokenbus_gpu_ops import token_logprobs
from tokenbus_gpu_ops.cuda import launch
from tokenbus_gpu_ops.cuda.driver import done, driver

_REPEATS = 7
_MOST_CALLS, _FEWEST_CALLS = 40, 3
_LONG_ENOUGH_US = 4000
_HEAD_START_CYCLES = 4_000_000
"""What the card waits first, about two milliseconds, so that whole calls are queued faster than they are done."""
_HOST_CALLS = 400
_OTHER = slice(72, 80)
"""Where the struct Call has the address of the second tensor."""

Call = Callable[[int], object]


def microseconds(torch: Any, call: Call) -> float:  # noqa: ANN401
    """Return the median time on the card of one of several calls in a row."""
    call(0)
    once = _span(torch, call, 1)
    calls = int(min(_MOST_CALLS, max(_FEWEST_CALLS, _LONG_ENOUGH_US / max(once, 1))))
    return round(float(np.median([_span(torch, call, calls) / calls for _ in range(_REPEATS)])), 2)


def _span(torch: Any, call: Call, calls: int) -> float:  # noqa: ANN401
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)  # noqa: SLF001 - there is no public way to keep a card busy
    before.record()
    for number in range(calls):
        call(number)
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after) * 1e3)


class Kernel:
    """The kernel of a call by itself: the very launch that the call made, again, over other rows."""

    def __init__(
        self,
        torch: Any,  # noqa: ANN401
        inputs: Sequence[Any],
        ids: Any,  # noqa: ANN401
        top_k: int,
        others: Sequence[Any] = (),
        **asked: Any,  # noqa: ANN401
    ) -> None:
        self._driver = driver()
        launches: list[tuple[Any, ...]] = []
        recording = _Recording(self._driver, launches)
        with mock.patch.object(launch, "driver", return_value=recording):
            other = others[0] if others else None
            self._result = token_logprobs(
                inputs[0], ids, top_k, other_logits=other, **asked
            )  # held, so that its memory stays its own
            self._call = bytearray(launch._call)  # noqa: SLF001 - what was launched is nowhere else
        torch.cuda.synchronize()
        (self._arguments,) = launches
        self._addresses, self._others = (
            [tensor.data_ptr().to_bytes(8, "little") for tensor in tensors] for tensors in (inputs, others)
        )
        self._parameters = launch.Parameters(self._call)

    def __call__(self, number: int) -> None:
        self._call[:8] = self._addresses[number % len(self._addresses)]
        if self._others:
            self._call[_OTHER] = self._others[number % len(self._others)]
        *arguments, _, extra = self._arguments
        done(self._driver.cuLaunchKernel(*arguments, self._parameters.address, extra))


class _Recording:
    """The driver, but for launches, which are taken down too."""

    def __init__(self, real: Any, launches: list[tuple[Any, ...]]) -> None:  # noqa: ANN401
        self._real = real
        self._launches = launches

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._real, name)

    def cuLaunchKernel(self, *arguments: Any) -> Any:  # noqa: ANN401, N802 - the driver's own name
        self._launches.append(arguments)
        return self._real.cuLaunchKernel(*arguments)


def host_microseconds(torch: Any, call: Call) -> float:  # noqa: ANN401
    """Return the median time until a call returns, on a card that has nothing else to do."""
    taken = []
    for number in range(_HOST_CALLS):
        torch.cuda.synchronize()
        before = perf_counter_ns()
        result = call(number)
        taken.append(perf_counter_ns() - before)
        del result
    return round(float(np.median(taken[_HOST_CALLS // 4 :])) / 1e3, 2)


def copy_bandwidth(torch: Any) -> float:  # noqa: ANN401
    """Return the bytes a microsecond that a large copy on the card reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    nbytes: int = source.nbytes
    return 2 * nbytes / microseconds(torch, lambda _: target.copy_(source))
