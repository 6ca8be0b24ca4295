"""Card: the kernels and memory of one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from tokenbus_gpu_ops.cuda.compile import kernel
from tokenbus_gpu_ops.cuda.driver import core, done, driver
from tokenbus_gpu_ops.cuda.memory import Pool, Scratches


class Kernel(NamedTuple):
    """A loaded kernel and its launch function."""

    handle: Any
    owner: object


class Card:
    """The state of one GPU, which is kept until the process ends."""

    def __init__(self, number: int) -> None:
        cuda = driver()
        self.number = number
        self.context = done(cuda.cuDevicePrimaryCtxRetain(done(cuda.cuDeviceGet(number))))
        self._context = int(self.context)
        self._device = core().Device(number)
        self.processors = int(self._device.properties.multiprocessor_count)
        self.pool = Pool()
        self.scratches = Scratches()
        self._kernels: dict[tuple[str, bool, bool], Kernel] = {}

    def is_current(self) -> bool:
        return int(done(driver().cuCtxGetCurrent())) == self._context

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the card current for this thread within a `with` block."""
        done(driver().cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            done(driver().cuCtxPopCurrent())

    def kernel(self, dtype: str, *, with_alternatives: bool, with_extras: bool) -> Kernel:
        """Return a kernel, which is compiled and loaded on first use."""
        found = self._kernels.get((dtype, with_alternatives, with_extras))
        if found is None:
            with self.entered():
                loaded = kernel(self._device, dtype, with_alternatives=with_alternatives, with_extras=with_extras)
                function = done(driver().cuKernelGetFunction(int(loaded.handle)))
            found = self._kernels[dtype, with_alternatives, with_extras] = Kernel(function, loaded)
        return found


@cache
def card(number: int) -> Card:
    return Card(number)
