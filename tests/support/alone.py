"""Which tests start processes, take long or run at night alone, and the guard that keeps the others from processes."""

import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.processes import FORK

TESTS = Path(__file__).resolve().parents[1]
STARTING = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", FORK}
)
"""The audit events of Python's ways to start a process, and of the fork server's."""

PROCESS = (
    "benchmarks", "contracts/test_bombs.py",
    "engines/fastdeploy/test_paddle.py",  # to import Paddle starts some
    "engines/fastdeploy/test_processes.py", "engines/fastdeploy/test_switch.py", "engines/paddle",
    "engines/vllm/real", "examples",
    "gpu_ops/test_frameworks.py",  # to import Paddle starts some
    "gpu_ops/test_kernels.py", "system", "schema_tools", "bus/test_bounds.py", "cli", "recordings/durable_log",
    "gateway/page", "support/test_orphans.py", "test_again.py", "test_commands.py", "test_compose.py",
    "test_kubernetes.py", "test_python310.py", "test_readme.py", "test_structure.py", "test_supply.py",
    "test_yaml.py", "testing/test_plugin.py",
)  # fmt: skip
"""Folders and modules, below tests/, of which all tests are marked `process`; in others, single tests are."""

LONG = (
    "bus/test_conformance.py", "bus/test_crowds.py", "bus/test_keys.py", "contracts/published",
    "contracts/test_equivalence.py", "engines/fastdeploy/test_differential.py", "engines/fastdeploy/test_errors.py",
    "engines/fastdeploy/test_ranks.py", "engines/ngram/test_engine.py", "engines/ngram/test_speculation.py",
    "gateway/test_access.py", "gateway/test_accounting.py", "gateway/test_dialects.py", "gateway/test_models.py",
    "gateway/test_native.py", "gateway/test_routes.py", "in_process/test_control.py",
    "in_process/test_state_machine.py", "test_api.py", "testing/test_bus.py",
)  # fmt: skip
"""Folders and modules of which all tests are marked `long`: together they take seconds of processor time."""


NIGHTLY: tuple[str, ...] = ()
"""Modules and folders of which all tests are marked `nightly`: campaigns, floods, builds, many examples."""


class ProcessStartedError(AssertionError):
    """A test that is not marked `process` started one."""


class Guard:
    """Refuses the start of a process while it is on."""

    def __init__(self) -> None:
        """Hook into the interpreter, once for its life; begin switched off."""
        self.is_on = False
        self.refused: list[str] = []
        """The starts that were refused since it was switched on."""
        sys.addaudithook(self._audit)
        start = BaseProcess.start

        def guarded(process: BaseProcess) -> None:
            """Start a process of multiprocessing, whose ways to start one raise no event."""
            self._audit("multiprocessing", ())
            start(process)

        BaseProcess.start = guarded  # type: ignore[assignment,method-assign]  # it has no seam

    def switch(self, *, is_on: bool) -> None:
        """Begin or end to refuse."""
        self.is_on = is_on
        self.refused.clear()

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and (event in STARTING or event == "multiprocessing"):
            self.refused.append(f"{event} {arguments[:2]}")
            raise ProcessStartedError(f"{self.refused[-1]}: mark the test `process`, or start none")


def marks_of(path: Path) -> list[str]:
    if not path.is_relative_to(TESTS):
        return []
    place = path.relative_to(TESTS).as_posix()
    tables = {"process": PROCESS, "long": LONG, "nightly": NIGHTLY}
    return [
        mark
        for mark, places in tables.items()
        if place.startswith(tuple(f"{each}/" for each in places)) or place in places
    ]
