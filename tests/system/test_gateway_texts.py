"""Texts that are costly to render, to encode or to hold: they are refused by a bound, and nobody else notices.

The gateway is in this process, and its encoders are processes: what bounds them is the kernel.
"""

import asyncio
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.support.model_folder import with_byte_fallback, write_model
from tests.support.waiting import soon, until
from tests.system.bytewise import alone, connected, not_reading
from tests.system.deployment import COMMAND, Deployment
from tests.system.serving import error_of, plainly
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus.gateway.server import Serving

pytestmark = pytest.mark.xdist_group("gateway")
_HOUR_MS = 3_600_000
_MEBIBYTE = 2**20
_CHAT = [{"role": "user", "content": "hello"}]
_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{{ more }}{% endfor %}"
    "{% for a in work %}{% for b in work %}{% for c in work %}{% for d in work %}{% endfor %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
_ENDLESS = {"messages": _CHAT, "chat_template_kwargs": {"work": list(range(1000))}}
"""A chat whose template goes on for days and writes nothing."""
_COSTLY = {"prompt": "a" * 600_000}
"""A text for whose encoding the tokenizer takes some 100 MiB."""
_PATIENCE = {"gateway__encoding_time_ms": _HOUR_MS, "gateway__request_timeout_ms": _HOUR_MS}
_BODIES: dict[str, object] = {"gateway__max_body_bytes": 100_000, "gateway__request_timeout_ms": _HOUR_MS}
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """Return the folder of a model whose tokenizer has a normalizer and byte fallback, as Llama 2's."""
    with TemporaryDirectory() as name:
        yield str(write_model(Path(name) / "model", with_byte_fallback(), _TEMPLATE))


def _children(process: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()
    ]


def _fork_server(served: Serving) -> int:
    server = served.gateway.encoders._server
    assert server is not None
    return server._process.pid


def _seconds_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _encoder_at_work(served: Serving) -> int:
    """Return the process that works on the one text that is costly, once the quick lane has given it up."""
    found: list[int] = []

    def find() -> bool:
        found[:] = [each for each in _children(_fork_server(served)) if _seconds_of(each) > 0.2]
        return bool(found)

    await until(find)
    return found[0]


async def _serves(client: httpx.AsyncClient) -> None:
    for content in ("hello", "hello" * 5000):
        answer = await soon(client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}))
        assert answer.status_code == 200, answer.text


def _waiting(served: Serving, count: int) -> Callable[[], bool]:
    return lambda: served.gateway.encoders.lanes["slow"].turns.waiting == count


async def test_costly_text_holds_up_nobody_and_ends_with_its_client(deployment: Deployment, folder: str) -> None:
    """While a text is encoded for an hour, others are encoded; its process ends when its client leaves.

    The request of a killed process is 503, and the next one is served; so it is without the server that forks.
    """
    async with alone(deployment, **_PATIENCE, gateway__tokenizer=folder) as served, plainly(served.url) as client:
        ended = served.gateway.encoders.lanes["slow"].ended
        async with plainly(served.url) as attacker:
            attacks = [asyncio.create_task(attacker.post("/tokenize", json=_ENDLESS)) for _ in range(3)]
            process = await _encoder_at_work(served)
            await until(_waiting(served, 2))
            await _serves(client)
            assert (await soon(client.get("/healthz"))).status_code == 200
            assert not any(attack.done() for attack in attacks)
            for attack in attacks:
                attack.cancel()
            await until(lambda: process not in _children(_fork_server(served)))
        await until(_waiting(served, 0))
        assert ended["left"] in (1, 2)  # the next may have begun
        await until(lambda: len(_children(_fork_server(served))) == 3)

        attack = asyncio.create_task(client.post("/tokenize", json=_ENDLESS))
        os.kill(await _encoder_at_work(served), signal.SIGKILL)
        answer = await soon(attack)
        assert (answer.status_code, error_of(answer.text)["code"]) == (503, "overloaded")
        assert "the process that encoded its text was killed" in answer.text
        assert ended["killed"] == 1
        await _serves(client)

        async def is_served() -> bool:
            return (await client.post("/tokenize", json={"prompt": "hello" * 1000})).status_code == 200

        for processes in (_children(_fork_server(served)), [_fork_server(served)]):
            for process in processes:
                os.kill(process, signal.SIGKILL)
            await until(is_served)
            await _serves(client)


async def test_texts_of_one_key_hold_up_no_other_keys(deployment: Deployment, folder: str, tmp_path: Path) -> None:
    keys = [made(name) for name in ("greedy", "modest")]
    write_keys(tmp_path / "keys.json", [key for _, key in keys])
    (greedy, modest) = ({"authorization": f"Bearer {clear}"} for clear, _ in keys)
    long = {"prompt": "hello" * 15_000}
    asked = {"gateway__keys_file": str(tmp_path / "keys.json"), "gateway__tokenizer": folder}
    async with alone(deployment, **_PATIENCE | _BODIES | asked) as served, plainly(served.url) as client:
        texts = []
        for place in range(4):
            texts.append(asyncio.create_task(client.post("/tokenize", json=_ENDLESS, headers=greedy)))
            if place:
                await until(_waiting(served, place))
            else:
                await _encoder_at_work(served)
        answer = asyncio.create_task(client.post("/tokenize", json=long, headers=modest))
        await until(_waiting(served, 4))
        for text in texts[:2]:  # the one that is being encoded, and the next one
            text.cancel()
        assert (await soon(answer)).status_code == 200
        assert not any(text.done() for text in texts[2:])
        for text in texts:
            text.cancel()
        await until(_waiting(served, 0))
        async with _unfinished(served, 12, greedy) as bodies:
            await until(lambda: sum(each.done() for each in bodies) == 12 - 9)
            assert (await client.post("/tokenize", json=long, headers=modest)).status_code == 200
            await until(lambda: sum(each.done() for each in bodies) == 12 - 8)
            assert {each.result() for each in bodies if each.done()} == {_TOO_MANY}


@asynccontextmanager
async def _unfinished(
    served: Serving, count: int, headers: Mapping[str, str]
) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Send all but the last of 100,000 bytes of some bodies at once, and yield the first lines of their answers."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lines}".encode()
    clients = [await connected(served.address) for _ in range(count)]
    for _, writer in clients:
        writer.write(head + b"Content-Length: 100000\r\n\r\n" + b" " * 99_999)
    answers = [asyncio.create_task(reader.readline()) for reader, _ in clients]
    try:
        yield answers
    finally:
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)


BEYOND = (
    (_ENDLESS, "500 ms of processor time"),
    (_COSTLY, "16777216 bytes of memory"),
    ({"messages": _CHAT * 1024, "chat_template_kwargs": {"more": "m" * 60_000}}, "at most 1048576 characters"),
    ({"prompt": "a" * 1_048_577}, "at most 1048576 bytes of text, got 1048577"),
    ({"prompt": "é" * 600_000}, "at most 1048576 bytes of text, got 1200000"),
)


async def test_text_beyond_a_bound_is_400(deployment: Deployment, folder: str) -> None:
    bounds = {"gateway__encoding_time_ms": 500, "gateway__encoding_memory_bytes": 16 * _MEBIBYTE}
    given = {**_PATIENCE, **bounds, "gateway__tokenizer": folder}
    async with alone(deployment, **given) as served, plainly(served.url) as client:
        lanes = served.gateway.encoders.lanes
        for body, bound in BEYOND:
            answer = await soon(client.post("/tokenize", json=body))
            assert answer.status_code == 400, answer.text
            assert bound in error_of(answer.text)["message"]
            if body is _COSTLY:  # the one before it was tried in the quick lane, and it is too long for that
                ended = [lanes[lane].ended[why] for lane in ("quick", "slow") for why in ("time", "memory")]
                assert ended == [1, 0, 1, 1]
        await _serves(client)


async def test_memory_of_all_texts_is_bounded(deployment: Deployment, folder: str) -> None:
    given = {"gateway__address": "127.0.0.1:0", "gateway__tokenizer": folder, **_PATIENCE}
    program = deployment.start("gateway", [COMMAND, "gateway"], **given)
    (url,) = re.findall(r"http://[^\"]+", await asyncio.to_thread(program.wait_for, '"listening"'))
    left: list[int] = []

    def measure() -> bool:
        left[:] = _memory_left([child for server in _children(program.pid) for child in _children(server)])
        return bool(left)

    await until(measure)
    assert sum(left) <= 192 * _MEBIBYTE
    before = _peak_bytes(program.pid)
    body = {"prompt": "a" * 4_000_000}
    async with plainly(url) as client:
        answers = await soon(asyncio.gather(*(client.post("/tokenize", json=body) for _ in range(24))))
        assert {answer.status_code for answer in answers} <= {400, 429}
        await _serves(client)
    assert _peak_bytes(program.pid) - before < 96 * _MEBIBYTE


def _memory_left(processes: list[int]) -> list[int]:
    """Return how much memory each process that encodes may still take; empty: one of the three begins, or one ends."""
    try:
        limits = [resource.prlimit(process, resource.RLIMIT_AS)[0] for process in processes]
        used = [int(Path(f"/proc/{each}/statm").read_text().split()[0]) for each in processes]
    except OSError:  # one has ended
        return []
    if len(limits) != 3 or resource.RLIM_INFINITY in limits or 0 in used:
        return []
    return [limit - pages * resource.getpagesize() for limit, pages in zip(limits, used, strict=True)]


def _peak_bytes(process: int) -> int:
    (line,) = [each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


async def test_bodies_that_never_end_leave_room(deployment: Deployment) -> None:
    async with alone(deployment, **_BODIES) as served:
        async with _unfinished(served, 24, {}) as answers:
            # So much of each is counted: 9 of them have room.
            await until(lambda: sum(each.done() for each in answers) == 24 - 800_000 // (99_999 - 16_384))
            assert {each.result() for each in answers if each.done()} == {_TOO_MANY}
            assert served.gateway.bodies.size == 9 * (99_999 - 16_384)
        await until(lambda: not served.gateway.bodies.size)


async def test_client_that_does_not_read_its_tokens_is_cut_off(deployment: Deployment) -> None:
    body = b'{"prompt": "%b", "return_token_strs": true}' % (b"a" * 100_000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with alone(deployment, gateway__write_timeout_ms=100) as served:
        stalled = not_reading(served.address, wanted=head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: served.gateway.counts.cut_clients == 1)
        stalled.close()
