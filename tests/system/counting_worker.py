"""A worker as a process, as `tokenbus worker` runs one, that says at its end how many items it sent, and sent again."""

import json
import signal
import threading
import time

from tests.system.counting import CountingTransport
from tests.system.programs import tell
from tokenbus.bus import transport_for
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.logs import configure
from tokenbus.settings import Settings
from tokenbus.worker import Publisher
from tokenbus.worker.emitter import Emitter
from tokenbus.worker.engine_loop import EngineLoop

_PACE_SECONDS = 0.003


def _main() -> None:
    settings = Settings.load()
    configure(settings.log)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = SyntheticEngine(drafts=True, parts=2)
    transport = CountingTransport(transport_for(settings.bus, settings.bus.workers_address))
    with Publisher(settings, vocabulary_size=engine.vocabulary_size, transport=transport) as publisher:
        EngineLoop(engine, Emitter(publisher, engine.vocabulary_size)).serve(stop, lambda: time.sleep(_PACE_SECONDS))
    tell(json.dumps({"sent": transport.sent, "sent_again": transport.sent_again}))


if __name__ == "__main__":
    _main()
