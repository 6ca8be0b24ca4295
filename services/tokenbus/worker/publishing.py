"""Starts a publisher, in this process or another process, for an engine that runs in another server."""

import sys
from contextlib import ExitStack

from tokenbus.settings import Settings
from tokenbus.worker.engine import NO_DESCRIPTION, EngineDescription
from tokenbus.worker.engine_publisher import EnginePublisher
from tokenbus.worker.process.client import PublisherProcess
from tokenbus.worker.process.shared_memory_publisher import SharedMemoryPublisher
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.publisher_thread import PublisherThread

PublisherClient = EnginePublisher | SharedMemoryPublisher
"""Publisher of one engine, which also delivers the engine's requests."""


def publishing(
    stack: ExitStack, settings: Settings, vocabulary_size: int, description: EngineDescription
) -> tuple[PublisherClient, PublisherThread | PublisherProcess]:
    """Start a publisher that ends with the stack. Return the publisher, and the output for the engine's steps.

    Raises AddressError if the metrics address cannot be used, and NotRunningError if a process cannot start.
    """
    client = publisher_client(stack, settings, vocabulary_size, description)
    if isinstance(client, PublisherProcess):
        return client, client
    return client, stack.enter_context(PublisherThread(client, settings.worker.outbox))


def publisher_client(
    stack: ExitStack,
    settings: Settings,
    vocabulary_size: int = 0,
    description: EngineDescription = NO_DESCRIPTION,
    *,
    in_background: bool = False,
) -> EnginePublisher | PublisherProcess:
    """Start a publisher that ends with the stack. On Linux, the default is another process.

    The publisher's methods may block. PublisherProcess explains `in_background`. Errors are those of `publishing`.
    """
    chosen = settings.worker.publisher
    if chosen == "process" or (chosen == "auto" and sys.platform == "linux"):
        process = PublisherProcess(settings, vocabulary_size, description, in_background=in_background)
        return stack.enter_context(process)
    from tokenbus.metrics.publisher import serve_publisher  # noqa: PLC0415 - slow, and only threads need it

    publisher = Publisher(settings, vocabulary_size=vocabulary_size, description=description)
    stack.enter_context(serve_publisher(publisher))
    stack.enter_context(publisher)
    return EnginePublisher(publisher, vocabulary_size)
