"""A worker whose publisher has a process of its own, and whose engine forks in C: the child keeps its open files."""

import ctypes
from dataclasses import replace

from tests.system.programs import tell
from tokenbus import run_engine
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.settings import Settings
from tokenbus_contracts.generated.request_pb2 import Generate

_C = ctypes.CDLL(None)


class ForkingEngine(SyntheticEngine):
    """Forks once, as a library may: nothing that Python registers for a fork runs."""

    _child = 0

    def admit(self, generate: Generate) -> int:
        if not self._child:
            self._child = _C.fork()
            while not self._child:
                _C.pause()
            tell(f"forked {self._child}")
        return super().admit(generate)


if __name__ == "__main__":
    settings = Settings.load()
    run_engine(ForkingEngine(), replace(settings, worker=replace(settings.worker, publisher="process")))
