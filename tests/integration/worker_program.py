"""A worker as a process: a synthetic engine, paced, that says at its end how much it sent."""

import argparse
import json
import signal
import threading
import time

from tests.integration.counting import CountingTransport
from tokenbus_services.bus import transport_for
from tokenbus_services.logs import configure
from tokenbus_services.settings import Settings
from tokenbus_services.worker import Publisher
from tokenbus_services.worker.service import serve
from tokenbus_services.worker.synthetic import SyntheticEngine


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace-ms", type=float, default=3.0)
    parser.add_argument("--tokens-per-step", type=int, default=3)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--drafts", action="store_true")
    return parser.parse_args()


def _main() -> None:
    options, settings = _options(), Settings.load()
    configure(settings.log)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = SyntheticEngine(tokens_per_step=options.tokens_per_step, drafts=options.drafts, parts=options.parts)
    transport = CountingTransport(transport_for(settings.bus))
    with Publisher(settings, vocabulary_size=engine.vocabulary_size, transport=transport) as publisher:
        serve(publisher, engine, stop, lambda: time.sleep(options.pace_ms / 1000))
        print(json.dumps({"sent": transport.sent, "sent_again": transport.sent_again}), flush=True)


if __name__ == "__main__":
    _main()
