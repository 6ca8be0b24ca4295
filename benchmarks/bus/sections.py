"""Where a process's time goes: its main thread is looked at a thousand times a second, and each look counted.

Nothing is wrapped, so nothing is slower for being measured but for the looks themselves.
"""

import linecache
import signal
from collections import Counter
from types import FrameType

_INTERVAL = 0.001
_SERVICES = "/tokenbus_services/"
_BY_LINE = (("crc32(", "CRC-32"), ("decode(", "decode"), ("read_frame(", "read and write frames"))
"""Calls into C and into the codec, told by the line of ours that makes them."""
_BY_FILE = (
    ("bus/", "transport: send, receive"),
    ("link.py", "link: what to send next"),
    ("processor/stream.py", "stream: order and credit"),
    ("processor/assembly.py", "assembly: parts to steps"),
    ("processor/requests.py", "settle"),
    ("processor/buffers.py", "hand out"),
    ("processor/session.py", "hand out"),
    ("processor/send_queue.py", "hand out"),
    ("delivery/tokens.py", "consumers take rows"),
    ("delivery/step.py", "batch order"),
    ("delivery/holds.py", "intake, holds, acknowledgements"),
    ("processor/", "intake, holds, acknowledgements"),
    ("worker/retention.py", "retention and CRC-32"),
    ("worker/session.py", "link: what to send next"),
    ("worker/publisher.py", "publish: address, keys, lock"),
)
_BY_FUNCTION = {
    ("router.py", "_settle"): "settle",
    ("router.py", "_hand_out"): "hand out",
    ("router.py", "_give"): "hand out",
    ("publisher.py", "_wait_for_room"): "wait for room (credit)",
}
WAITING = "wait for messages"
_LOOP = "event loop: wake-ups, turns"
_BENCHMARK = "the benchmark itself"
_OTHER = "other"


class Sections:
    """Counts where the main thread is, from `start` to `stop`."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._looks: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to look."""
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _INTERVAL, _INTERVAL)

    def stop(self) -> None:
        """Look no more."""
        signal.setitimer(signal.ITIMER_REAL, 0, 0)

    def shares(self) -> dict[str, float]:
        """Return each section's share of the time, the largest first."""
        total = max(1, self._looks.total())
        return {name: count / total for name, count in self._looks.most_common()}

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        self._looks[_section(frame)] += 1


def _section(frame: FrameType | None) -> str:
    """Return the section of the innermost frame that has one."""
    fallback = _OTHER
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if _SERVICES in path:
            return _of_service(path.split(_SERVICES, 1)[1], function, frame)
        if path.endswith("tokenbus_contracts/frames.py"):
            return "read and write frames"
        if path.endswith("selectors.py") and function == "select":
            return WAITING
        if "/asyncio/" in path:
            return _LOOP
        if "/benchmarks/" in path:
            fallback = _BENCHMARK
            if not path.endswith(("codec/ours.py", "pace.py")):
                return _BENCHMARK
        frame = frame.f_back
    return fallback


def _of_service(path: str, function: str, frame: FrameType) -> str:
    # Between two instructions of a frame there may be no line, and what is raised here is raised in what is measured.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    for call, section in _BY_LINE:
        if call in line and not line.lstrip().startswith("def "):
            return section
    for (name, called), section in _BY_FUNCTION.items():
        if path.endswith(name) and function == called:
            return section
    return next((section for begin, section in _BY_FILE if path.startswith(begin)), _OTHER)
