"""A processor and its workers while the log's servers are away, full or closed to them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metrics.running import Bus, settings
from tests.recordings.durable_log.using import (
    JETSTREAM,
    SMALL,
    health,
    logged,
    logging_to,
    numbered,
    read,
    restarted,
    says_that_it_does_not_log,
    sequences,
    told,
    whole,
    write,
    writer_of,
)
from tests.support.nats import NatsServer
from tests.support.nats_cluster import cluster, until_ready
from tests.support.waiting import MOST, until
from tokenbus.bus import AddressError
from tokenbus.settings import SettingsError


def no_server(server: NatsServer) -> Callable[[], None]:
    server.kill()
    return server.start


def no_answer(server: NatsServer) -> Callable[[], None]:
    server.pause()
    return server.resume


def no_jetstream(server: NatsServer) -> Callable[[], None]:
    return restarted(server, "")


def other_credentials(server: NatsServer) -> Callable[[], None]:
    return restarted(server, f"{server._config}authorization: {{ user: other, password: other }}\n")


def no_room(server: NatsServer) -> Callable[[], None]:
    return restarted(server, JETSTREAM.format(folder=server.folder).replace("}", ", max_file_store: 1MB }"))


@pytest.mark.parametrize("fault", [no_server, no_answer, no_jetstream, other_credentials, no_room])
async def test_processor_starts_without_its_log(
    server: NatsServer, fault: Callable[[NatsServer], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    mend = fault(server)
    chosen = logging_to(server, **SMALL)
    bus = Bus(chosen)
    async with bus.running():
        await bus.serve(requests=3, tokens=90)
        await until(lambda: not bus.publisher.retention)
        await until(lambda: says_that_it_does_not_log(bus.processor))
        assert health(bus.processor).is_ready
        assert json.loads(health(bus.processor).body)["status"] == "degraded"
        await until(lambda: "not written to the log yet" in caplog.text)
        assert (told(bus.processor)("log_items_total", outcome="left_out") or 0) > 0
        mend()
        await until(lambda: told(bus.processor)("log_writable_servers"))
        await logged(bus)
        await bus.serve(requests=1, tokens=3)
        last = await logged(bus)
        assert json.loads(health(bus.processor).body)["status"] == "ok"
        counts = told(bus.processor)
    items = await read(chosen)
    missing = sum(item.missing_items for item in items)
    assert (items[-1].sequence, len(items) + missing) == (last, last)
    assert counts("log_items_total", outcome="written") == len(items)
    assert 0 < missing == counts("log_items_total", outcome="missing")
    assert missing <= (counts("log_items_total", outcome="left_out") or 0)


@pytest.mark.parametrize("fault", [no_server, no_answer, no_jetstream, other_credentials])
async def test_processor_notices_that_its_log_is_gone(
    server: NatsServer, fault: Callable[[NatsServer], Callable[[], None]]
) -> None:
    chosen = logging_to(server)
    bus = Bus(chosen)
    async with bus.running():
        await bus.serve(requests=1, tokens=3)
        await logged(bus)
        mend = fault(server)
        await until(lambda: says_that_it_does_not_log(bus.processor))
        await bus.serve(requests=1, tokens=3)
        mend()
        await until(lambda: not health(bus.processor).outside)
        last = await logged(bus)
    assert numbered(await read(chosen)) == whole(last)


async def test_log_without_a_quorum_is_none(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        plain, durable = logging_to(*nodes), logging_to(*nodes, durable_log__durable=True)
        await until_ready(plain)
        for node in nodes[1:]:
            node.kill()
        bus, waiting = Bus(plain), Bus(durable)
        async with asyncio.timeout(4 * MOST):
            async with bus.running(4 * MOST):  # on a busy machine each of two elections takes half a minute
                # Until the leader has missed the others for a while, one that starts then takes the log for writable.
                await until(lambda: any("no quorum" in each for each in health(bus.processor).outside))
                starting = asyncio.create_task(waiting.processor.__aenter__())
                await bus.serve(requests=1, tokens=6)
                await until(lambda: waiting.processor.item_log and says_that_it_does_not_log(waiting.processor))
                assert not starting.done()
                found = health(waiting.processor)
                assert (found.problems, found.is_ready) == ((), False)
                nodes[1].start()
                await until(lambda: not health(bus.processor).outside)
                await until(lambda: told(bus.processor)("log_missing_replicas") == 1)
                await logged(bus)
            await starting
            assert health(waiting.processor).is_ready
            async with waiting.client, waiting.publisher:
                await until(lambda: waiting.processor.workers.by_id)
                await waiting.serve(requests=1, tokens=6)
            await waiting.processor.__aexit__(None, None, None)


async def test_log_of_a_new_cluster_is_made(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        chosen = logging_to(*nodes)
        async with writer_of(chosen) as writer:
            await write(writer, [1, 2, 3])

        async def has_all() -> bool:
            """Tell whether all was read; a reader's server may be behind that which took them."""
            return sequences(await read(chosen)) == [1, 2, 3]

        await until(has_all, every=0.1)


async def test_credentials_are_read_again(server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "credentials"

    def use(user: str) -> None:
        file.write_text(user)
        file.chmod(0o600)

    def serve(user: str) -> None:
        name, _, password = user.partition(":")
        server.kill()
        server._config = JETSTREAM.format(folder=tmp_path) + (
            f"authorization: {{ users: [{{ user: {name}, password: {password} }}] }}\n"
        )
        server.start()

    use("old:old")
    serve("old:old")
    bus = Bus(logging_to(server, durable_log__credentials=str(file)))
    async with bus.running():
        await until(lambda: told(bus.processor)("log_writable_servers"))
        serve("new:new")
        await until(lambda: "authorization violation" in " ".join(health(bus.processor).outside).lower())
        file.write_text("")
        await until(lambda: "nats credentials cannot be read: the last good ones stay" in caplog.text)
        use("new:new")
        await until(lambda: told(bus.processor)("log_writable_servers"))
        await bus.serve(requests=1, tokens=3)
        await logged(bus)


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [
        ({"durable_log__address": "http://127.0.0.1:4222"}, "expected nats://HOST:PORT/NAME"),
        ({"durable_log__credentials": "/nowhere/at/all"}, "a file that can be read"),
        ({"durable_log__monitors": "127.0.0.1"}, "HOST:PORT, with commas between"),
    ],
)
async def test_mistake_in_the_settings_fails_at_once(wrong: dict[str, object], limit: str) -> None:
    chosen = settings(**({"durable_log__address": "nats://127.0.0.1:4222"} | wrong))
    with pytest.raises((AddressError, SettingsError), match=limit) as refused:
        await Bus(chosen).processor.__aenter__()
    assert "\n" not in str(refused.value)
