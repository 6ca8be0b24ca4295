"""What an engine that takes no requests of the bus publishes through: in threads of its process, or in a process."""

from contextlib import ExitStack

from tokenbus_services.metrics.publisher import serve_publisher
from tokenbus_services.settings import Settings
from tokenbus_services.worker.client import PublisherClient
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.engine import DescribesModel
from tokenbus_services.worker.outbox import Outbox
from tokenbus_services.worker.process.client import PublisherProcess
from tokenbus_services.worker.publisher import Publisher


def publishing(
    stack: ExitStack, settings: Settings, vocabulary_size: int, model: DescribesModel | None = None
) -> tuple[PublisherClient, Outbox | PublisherProcess]:
    """Publish until the stack ends: return what the engine asks, and what it hands its steps and errors to.

    Where `worker.publisher` is auto, it publishes in threads. Raises an AddressError where metrics cannot be served.
    """
    if settings.worker.publisher == "process":
        process = stack.enter_context(PublisherProcess(settings, vocabulary_size=vocabulary_size, model=model))
        return process, process
    publisher = Publisher(settings, vocabulary_size=vocabulary_size, model=model)
    stack.enter_context(serve_publisher(publisher))
    stack.enter_context(publisher)
    emitter = Emitter(publisher, vocabulary_size)
    return emitter, stack.enter_context(Outbox(emitter, settings.worker.outbox))
