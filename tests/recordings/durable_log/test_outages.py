"""A processor and its workers while the log's servers are away, full or closed to them."""

import json
from pathlib import Path

import pytest

from tests.metrics.running import Bus, settings
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tests.support.waiting import until
from tokenbus.bus import AddressError
from tokenbus.settings import SettingsError


async def test_processor_starts_without_its_log(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    chosen = log.logging_to(server, **log.SMALL)
    bus = Bus(chosen)
    async with bus.running():
        await bus.serve(requests=3, tokens=90)
        await until(lambda: not bus.publisher.retention)
        await until(lambda: log.says_that_it_does_not_log(bus.processor), every=0.05)
        assert log.health(bus.processor).is_ready
        assert json.loads(log.health(bus.processor).body)["status"] == "degraded"
        await until(lambda: "not written to the log yet" in caplog.text)
        assert (log.told(bus.processor)("log_items_total", outcome="left_out") or 0) > 0
        server.start()
        await until(lambda: log.told(bus.processor)("log_writable_servers"), every=0.05)
        await log.logged(bus)
        await bus.serve(requests=1, tokens=3)
        last = await log.logged(bus)
        assert json.loads(log.health(bus.processor).body)["status"] == "ok"
        counts = log.told(bus.processor)
    items = await log.read(chosen)
    missing = sum(item.missing_items for item in items)
    assert (items[-1].sequence, len(items) + missing) == (last, last)
    assert counts("log_items_total", outcome="written") == len(items)
    assert 0 < missing == counts("log_items_total", outcome="missing")
    assert missing <= (counts("log_items_total", outcome="left_out") or 0)


async def test_credentials_are_read_again(server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "credentials"

    def use(user: str) -> None:
        file.write_text(user)
        file.chmod(0o600)

    def serve(user: str) -> None:
        name, _, password = user.partition(":")
        users = f"authorization: {{ users: [{{ user: {name}, password: {password} }}] }}\n"
        log.restarted(server, log.JETSTREAM.format(folder=server.folder) + users)

    use("old:old")
    serve("old:old")
    bus = Bus(log.logging_to(server, durable_log__credentials=str(file)))
    async with bus.running():
        await until(lambda: log.told(bus.processor)("log_writable_servers"), every=0.05)
        serve("new:new")
        await until(lambda: "authorization violation" in " ".join(log.health(bus.processor).outside).lower())
        file.write_text("")
        await until(lambda: "nats credentials cannot be read: the last good ones stay" in caplog.text)
        use("new:new")
        await until(lambda: log.told(bus.processor)("log_writable_servers"), every=0.05)
        await bus.serve(requests=1, tokens=3)
        await log.logged(bus)


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [
        ({"durable_log__address": "http://127.0.0.1:4222"}, "expected nats://HOST:PORT/NAME"),
        ({"durable_log__credentials": "/nowhere/at/all"}, "a file that can be read"),
        ({"durable_log__monitors": "127.0.0.1"}, "HOST:PORT, separated by commas"),
    ],
)
async def test_mistake_in_the_settings_fails_at_once(wrong: dict[str, object], limit: str) -> None:
    chosen = settings(**({"durable_log__address": "nats://127.0.0.1:4222"} | wrong))
    with pytest.raises((AddressError, SettingsError), match=limit) as refused:
        await Bus(chosen).processor.__aenter__()
    assert "\n" not in str(refused.value)
