"""The log beside bare nats-py: how many items and how many messages a second a cluster of three takes."""

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from benchmarks.durable_log.writing import Source, log_settings
from benchmarks.nats_servers import NatsServer, address_of
from benchmarks.outputs import Record, progress
from tokenbus_services.durable_log.stream import LogStream
from tokenbus_services.durable_log.writer import LogWriter

IN_FLIGHT = 64
"""How many messages bare nats-py has on their way at once."""
_WANTED = 0.7
"""The least share of bare nats-py's messages that the log is to write as items."""


async def beside_bare(servers: Sequence[NatsServer], rounds: int, seconds: float, size: int) -> Record:
    """Return the rates of both, and what the goal comes to."""
    settings = log_settings(servers)
    payloads = [os.urandom(size) for _ in range(16)]
    connection = await nats.connect(address_of(servers).split(","))
    jetstream = connection.jetstream()
    found: dict[str, list[float]] = {"bare": [], "log": []}
    acks: list[float] = []
    try:
        async with LogWriter(LogStream(settings), settings, drain_seconds=60) as writer:  # waits for the cluster
            await jetstream.add_stream(StreamConfig(name="bare", subjects=["bare"], num_replicas=len(servers)))
            for number in range(rounds):
                progress(f"beside bare nats-py, round {number + 1} of {rounds}")
                bare = _bare(jetstream, payloads, seconds, acks)
                ours = Source(writer, settings, number + 1, payloads).write(seconds)
                for name, turn in (("bare", bare), ("log", ours))[:: 1 if number % 2 == 0 else -1]:
                    found[name].append(await turn)
            counts = writer.counts
    finally:
        await connection.close()
    share = median(log / bare for log, bare in zip(found["log"], found["bare"], strict=True))
    return {
        "bare": {"per_second": _rounded(found["bare"]), "ack_ms": round(median(acks) * 1e3, 3)},
        "log": {
            "per_second": _rounded(found["log"]),
            "ack_ms": round(counts.write_seconds / counts.messages * 1e3, 3),
            "items_a_message": round(counts.items / counts.messages, 1),
        },
        "goals": [
            {
                "goal": "items/s of the log / messages/s of bare nats-py, three replicas",
                "wanted": f"at least {_WANTED}",
                "measured": round(share, 3),
                "met": share >= _WANTED,
            }
        ],
    }


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 1) for rate in rates]


async def _bare(jetstream: JetStreamContext, payloads: list[bytes], seconds: float, acks: list[float]) -> float:
    """Publish by nats-py alone for a while; return how many messages a second were acknowledged."""
    began, done = time.perf_counter(), 0

    async def publish() -> None:
        """Publish one message after the other."""
        nonlocal done
        while (sent := time.perf_counter()) < began + seconds:
            await jetstream.publish("bare", payloads[done % len(payloads)])
            acks.append(time.perf_counter() - sent)
            done += 1

    await asyncio.gather(*(publish() for _ in range(IN_FLIGHT)))
    return done / (time.perf_counter() - began)
