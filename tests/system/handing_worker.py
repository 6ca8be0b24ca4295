"""A worker whose publisher has a process of its own, and that says which that is, each time there is another."""

import json
import signal
import sys
import threading
import time

from tests.system.programs import tell
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.logs import configure
from tokenbus.settings import Settings
from tokenbus.worker.engine_loop import EngineLoop
from tokenbus.worker.process.client import PublisherProcess

_PACE_SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 0.003


def _main() -> None:
    settings = Settings.load()
    configure(settings.log)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = SyntheticEngine(drafts=True, parts=2, role=settings.worker.role)
    told = 0

    def pace() -> None:
        """Wait between two steps, and say when there is another publisher."""
        nonlocal told
        if publisher.pid != told:
            told = publisher.pid
            tell(json.dumps({"publisher": told}))
        time.sleep(_PACE_SECONDS)

    with PublisherProcess(settings, engine.vocabulary_size) as publisher:
        EngineLoop(engine, publisher).serve(stop, pace)


if __name__ == "__main__":
    _main()
