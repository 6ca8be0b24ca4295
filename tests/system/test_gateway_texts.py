"""Texts that are costly to render, to encode or to hold: they are refused by a bound, and nobody else notices."""

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.model_folder import with_byte_fallback, write_model
from tests.support.waiting import soon, until
from tests.system.serving import Served, error_of, plainly, served
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus.gateway.fairness import MOST_WAITING

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
_FILL, _ENDED = "tokenbus_fill_ratio", "tokenbus_gateway_ended_encoders"
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return the folder of a model whose tokenizer has a normalizer and byte fallback, as Llama 2's."""
    with TemporaryDirectory() as name:
        yield write_model(Path(name) / "model", with_byte_fallback(), _TEMPLATE)


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[Served]:
    """Run a system whose gateway lets a text take an hour."""
    patience = {"gateway__encoding_time_ms": _HOUR_MS, "gateway__request_timeout_ms": _HOUR_MS}
    with served(gateway__tokenizer=str(folder), **patience) as system:
        system.start_worker()
        yield system


@pytest.fixture(scope="module")
def bounded(folder: Path) -> Iterator[Served]:
    """Run a gateway that gives a text half a second and 16 MiB."""
    bounds = {"gateway__encoding_time_ms": 500, "gateway__encoding_memory_bytes": 16 * _MEBIBYTE}
    with served(gateway__tokenizer=str(folder), gateway__request_timeout_ms=_HOUR_MS, **bounds) as system:
        yield system


def _children(process: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()
    ]


def _encoders(system: Served) -> list[int]:
    """Return the processes that encode, which the gateway's one child has forked."""
    return [process for server in _children(system.gateway.pid) for process in _children(server)]


def _seconds_of(process: int) -> float:
    """Return the processor time that a process has used; 0: it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _encoder_at_work(system: Served) -> int:
    """Return the process that works on the one text that is costly, once it has used more than cheap texts take."""
    found: list[int] = []

    def find() -> bool:
        found[:] = [each for each in _encoders(system) if _seconds_of(each) > 1]
        return bool(found)

    await until(find)
    return found[0]


async def _serves(client: httpx.AsyncClient) -> None:
    """Fail unless texts are encoded, short ones and long ones."""
    for content in ("hello", "hello" * 5000):
        answer = await soon(client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}))
        assert answer.status_code == 200, answer.text


async def test_costly_text_holds_up_nobody_and_ends_with_its_client(patient: Served) -> None:
    """While a text is encoded for an hour, others are encoded and streamed; its process ends when its client leaves."""
    async with plainly(patient.url) as client, plainly(patient.url) as attacker:
        attacks = [asyncio.create_task(attacker.post("/tokenize", json=_ENDLESS)) for _ in range(3)]
        process = await _encoder_at_work(patient)
        await _serves(client)
        completion = {"model": "tokenbus", "prompt": "hello" * 5000, "max_tokens": 300}
        assert (await soon(client.post("/v1/completions", json=completion))).status_code == 200
        assert (await soon(client.get("/healthz"))).status_code == 200
        assert not any(attack.done() for attack in attacks)
        for attack in attacks:
            attack.cancel()
        await until(lambda: process not in _encoders(patient))
        await until(lambda: len(_encoders(patient)) == 3)
        await _serves(client)


async def test_encoder_that_is_killed_fails_its_request_alone(patient: Served) -> None:
    """The request of a killed process is 503, and the next one is served; so it is without the server that forks."""
    async with plainly(patient.url) as client:
        attack = asyncio.create_task(client.post("/v1/chat/completions", json=_ENDLESS | {"model": "tokenbus"}))
        os.kill(await _encoder_at_work(patient), signal.SIGKILL)
        answer = await soon(attack)
        assert (answer.status_code, error_of(answer.text)["code"]) == (503, "overloaded")
        assert "the process that encoded its text was ended" in answer.text
        await _serves(client)

        async def is_served() -> bool:
            """Return whether texts are encoded again that are too long for the gateway itself."""
            return (await client.post("/tokenize", json={"prompt": "hello" * 1000})).status_code == 200

        for processes in (_encoders(patient), _children(patient.gateway.pid)):
            for process in processes:
                os.kill(process, signal.SIGKILL)
            await until(is_served)
            await _serves(client)


async def test_metrics_have_the_texts_that_wait_and_why_encoders_ended(patient: Served, bounded: Served) -> None:
    """Each text that waits is counted in its lane, and each encoder that ends before its text is encoded, by why."""
    slow, lanes = {"lane": "slow"}, ("quick", "slow")
    async with plainly(patient.url) as client, plainly(bounded.url) as other:
        known = {why: await _told(client, _ENDED, **slow, why=why) for why in ("left", "killed")}
        attacks = [asyncio.create_task(client.post("/tokenize", json=_ENDLESS)) for _ in range(3)]
        process = await _encoder_at_work(patient)
        await _until_told(client, _FILL, 2 / MOST_WAITING, of="slow_texts")
        os.kill(process, signal.SIGKILL)
        await _until_told(client, _ENDED, known["killed"] + 1, **slow, why="killed")
        await _until_told(client, _FILL, 1 / MOST_WAITING, of="slow_texts")
        for attack in attacks:
            attack.cancel()
        await until(partial(_has_left, client, known["left"]))  # maybe two: the last may have begun
        await _until_told(client, _FILL, 0, of="slow_texts")
        before = [await _told(other, _ENDED, lane=lane, why=why) for lane in lanes for why in ("time", "memory")]
        for body in (_ENDLESS, _COSTLY):  # the first is tried in the quick lane, and the second is too long for that
            await other.post("/tokenize", json=body)
        after = [await _told(other, _ENDED, lane=lane, why=why) for lane in lanes for why in ("time", "memory")]
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0, 1, 1]


async def _told(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    """Return what a gateway's metrics say."""
    page = (await soon(client.get("/metrics"))).text
    metrics = {metric.name: metric for metric in text_string_to_metric_families(page)}
    (value,) = [each.value for each in metrics[name].samples if each.labels == labels]
    return value


async def _until_told(client: httpx.AsyncClient, name: str, value: float, **labels: str) -> None:
    """Wait until a gateway's metrics say so."""

    async def is_told() -> bool:
        return await _told(client, name, **labels) == value

    await until(is_told)


async def _has_left(client: httpx.AsyncClient, known: float) -> bool:
    return await _told(client, _ENDED, lane="slow", why="left") > known


async def test_texts_of_one_key_hold_up_no_other_keys(folder: Path, tmp_path: Path) -> None:
    """A key's costly texts wait behind the one of another key that came last, and its bodies make room for that."""
    keys = [made(name) for name in ("greedy", "modest")]
    write_keys(tmp_path / "keys.json", [key for _, key in keys])
    (greedy, modest) = ({"authorization": f"Bearer {clear}"} for clear, _ in keys)
    bounds = {"gateway__encoding_time_ms": _HOUR_MS, "gateway__request_timeout_ms": _HOUR_MS}
    long = {"prompt": "hello" * 15_000}
    with served(
        gateway__tokenizer=str(folder),
        gateway__keys_file=str(tmp_path / "keys.json"),
        gateway__max_body_bytes=100_000,
        **bounds,
    ) as system:
        async with plainly(system.url) as client:
            texts = []
            for place in range(4):
                texts.append(asyncio.create_task(client.post("/tokenize", json=_ENDLESS, headers=greedy)))
                if place:
                    await _until_told(client, _FILL, place / MOST_WAITING, of="slow_texts")
                else:
                    await _encoder_at_work(system)
            answer = asyncio.create_task(client.post("/tokenize", json=long, headers=modest))
            await _until_told(client, _FILL, 4 / MOST_WAITING, of="slow_texts")
            for text in texts[:2]:  # the one that is being encoded, and the next one
                text.cancel()
            assert (await soon(answer)).status_code == 200
            assert not any(text.done() for text in texts[2:])
            for text in texts:
                text.cancel()
            await _until_told(client, _FILL, 0, of="slow_texts")
            async with _unfinished(system, 12, greedy) as bodies:
                await until(lambda: sum(each.done() for each in bodies) == 12 - 9)
                assert (await client.post("/tokenize", json=long, headers=modest)).status_code == 200
                await until(lambda: sum(each.done() for each in bodies) == 12 - 8)
                assert {each.result() for each in bodies if each.done()} == {_TOO_MANY}


@asynccontextmanager
async def _unfinished(
    system: Served, count: int, headers: Mapping[str, str]
) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Send all but the last of 100,000 bytes of some bodies at once, and yield the first lines of their answers."""
    host, _, port = system.url.removeprefix("http://").rpartition(":")
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lines}".encode()
    clients = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    for _, writer in clients:
        writer.write(head + b"Content-Length: 100000\r\n\r\n" + b" " * 99_999)
    answers = [asyncio.create_task(reader.readline()) for reader, _ in clients]
    try:
        yield answers
    finally:
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        (_ENDLESS, "500 ms of processor time"),
        (_COSTLY, "16777216 bytes of memory"),
        ({"messages": _CHAT * 1024, "chat_template_kwargs": {"more": "m" * 60_000}}, "at most 1048576 characters"),
        (
            {"prompt": "a" * 1_048_577},
            "at most 1048576 bytes of text, got 1048577",
        ),
        ({"prompt": "é" * 600_000}, "at most 1048576 bytes of text, got 1200000"),
        ({"tools": [{"function": {"name": "f"}}] * 9, **_ENDLESS}, "500 ms of processor time"),
    ],
    ids=["time", "memory", "template", "text", "bytes", "tools"],
)
async def test_text_beyond_a_bound_is_400(bounded: Served, body: dict[str, Any], bound: str) -> None:
    """What a template may make, and what its text may take to encode, are bounds that the error names."""
    async with plainly(bounded.url) as client:
        for _ in range(2):
            answer = await soon(client.post("/tokenize", json=body))
            assert answer.status_code == 400, answer.text
            assert bound in error_of(answer.text)["message"]
        await _serves(client)


async def test_memory_of_all_texts_is_bounded(patient: Served) -> None:
    """However many texts come at once, the gateway holds few of them, and its processes can take no more."""
    left: list[int] = []

    def measure() -> bool:
        """Tell whether it can be measured."""
        left[:] = _memory_left(patient)
        return bool(left)

    await until(measure)
    assert sum(left) <= 192 * _MEBIBYTE
    before = _peak_bytes(patient.gateway.pid)
    body = {"prompt": "a" * 4_000_000}
    async with plainly(patient.url) as client:
        answers = await soon(asyncio.gather(*(client.post("/tokenize", json=body) for _ in range(24))))
        assert {answer.status_code for answer in answers} <= {400, 429}
        await _serves(client)
    assert _peak_bytes(patient.gateway.pid) - before < 96 * _MEBIBYTE


def _memory_left(system: Served) -> list[int]:
    """Return how much memory each process that encodes may still take; empty: one of the three begins, or one ends."""
    processes = _encoders(system)
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


async def test_bodies_that_never_end_leave_room(folder: Path) -> None:
    """Of bodies that are too many together the newest are 429 while their clients still send, and none later."""
    bounds = {"gateway__max_body_bytes": 100_000, "gateway__request_timeout_ms": _HOUR_MS}
    with served(gateway__tokenizer=str(folder), **bounds) as system:
        async with _unfinished(system, 24, {}) as answers:
            # So much of each is counted: 9 of them have room.
            await until(lambda: sum(each.done() for each in answers) == 24 - 800_000 // (99_999 - 16_384))
            assert {each.result() for each in answers if each.done()} == {_TOO_MANY}
            async with plainly(system.url) as client:
                held = await _told(client, _FILL, of="bodies")
            assert held == 9 * (99_999 - 16_384) / 800_000
        async with plainly(system.url) as client:
            await _serves(client)


async def test_client_that_does_not_read_its_tokens_is_cut_off(folder: Path) -> None:
    """An answer of /tokenize that its client does not read waits as long as a write may take, and is gone then."""
    with served(gateway__tokenizer=str(folder), gateway__write_timeout_ms=100) as system, socket.socket() as client:
        host, _, port = system.url.removeprefix("http://").rpartition(":")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps({"prompt": "a" * 100_000, "return_token_strs": True}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with plainly(system.url) as other:

            async def is_cut_off() -> bool:
                return 'lost_clients_total{why="cut_off"} 1.0' in (await other.get("/metrics")).text

            await until(is_cut_off)


async def test_what_a_template_relies_on_is_not_replaced(patient: Served) -> None:
    """No variable of a request has the name of a special token, a field, or a function of the template."""
    names = [
        *("eos_token", "bos_token", "image_token", "additional_special_tokens", "messages", "tools", "documents"),
        *("add_generation_prompt", "raise_exception", "strftime_now", "range", "namespace", "chat_template"),
    ]
    async with plainly(patient.url) as client:
        for name in names:
            answer = await client.post("/tokenize", json={"messages": _CHAT, "chat_template_kwargs": {name: "x"}})
            assert (answer.status_code, error_of(answer.text)["param"]) == (400, f"chat_template_kwargs.{name}")


_TEXT = {"model": "tokenbus", "prompt": "a"}
_TALK = {"model": "tokenbus", "messages": _CHAT}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", {"model": "tokenbus"}, "prompt"),
        ("/v1/completions", _TEXT, "logit_bias"),
        ("/v1/completions", _TEXT, "stop"),
        ("/v1/completions", _TEXT, "echo"),
        ("/v1/completions", _TEXT, "no_such_field"),
        ("/v1/completions", _TEXT, "structured_outputs.json"),
        ("/v1/chat/completions", _TALK, "chat_template_kwargs.x"),
        ("/v1/chat/completions", _TALK, "response_format.json_schema.schema.x"),
        ("/v1/chat/completions", _TALK, "tools.function.parameters.x"),
        ("/v1/chat/completions", {"model": "tokenbus"}, "messages"),
        ("/inspect", {"prompt": "a"}, "seed"),
        ("/tokenize", {"messages": _CHAT}, "documents"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_body_nested_too_deep_is_400_with_its_depth(
    patient: Served, path: str, body: dict[str, Any], place: str
) -> None:
    """Lists or objects nested too deep are refused with the field and the depth, on every route and in every field."""
    async with plainly(patient.url) as client:
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for depth in (200, 1000, 1025, 50_000):
                data = _nested(body, place.split("."), opening * depth + "1" + closing * depth)
                answer = await client.post(path, content=data, headers={"content-type": "application/json"})
                assert answer.status_code == 400, answer.text
                error = error_of(answer.text)
                beginning, _, deep = error["message"].rpartition(" ")
                assert beginning.endswith(": nested at most 128 deep, got")
                assert depth <= int(deep) <= depth + len(place.split("."))
                if depth <= 1000:  # what is nested deeper is not parsed at all
                    assert error["param"] == place.partition(".")[0]


def _nested(body: dict[str, Any], place: list[str], inner: str) -> str:
    """Return a body's JSON with one more member, at a place."""
    for name in reversed(place):
        inner = f'{{"{name}":{inner}}}'
    return json.dumps(body)[:-1] + ("," if body else "") + inner[1:]


async def test_texts_that_are_json_are_not_nested_too_deep_either(patient: Served) -> None:
    """A schema that is sent as a text has the same bound; arguments of a call that are no JSON object are none."""
    deep = '{"a":' * 1000 + "1" + "}" * 1000
    calls = [{"function": {"name": "f", "arguments": deep}}]
    async with plainly(patient.url) as client:
        answer = await client.post("/v1/completions", json=_TEXT | {"structured_outputs": {"json": deep}})
        assert error_of(answer.text)["message"] == "structured_outputs.json: nested at most 128 deep, got 1000"
        answer = await client.post("/tokenize", json={"messages": [{"role": "assistant", "tool_calls": calls}]})
        assert answer.status_code == 200, answer.text
