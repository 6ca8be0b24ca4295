"""Paddle itself: brought in when an engine is made, and set to a device."""

import signal
import threading
import warnings
from typing import Any

from tokenbus_engines.paddle.errors import DeviceError


def framework(device: str) -> Any:  # noqa: ANN401 - a module
    """Return paddle, set to a device; a DeviceError says what is missing."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of compilers that it would like to have
            import paddle
    except ImportError as error:
        raise DeviceError(f"the engine needs paddle, of the extra paddle or gpu: {error}") from None
    # Paddle takes signals over when it is imported: a stop would print a trace and not come through.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    # A transposed view is made whole number by number then, forty times slower than a transposition that copies.
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise DeviceError(f"device {device}: {' '.join(str(error).split())[:200]}") from None
    return paddle
