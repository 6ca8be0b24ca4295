"""What goes over one connection to the gateway: headers, bodies and requests in any order, whole or broken."""

import contextlib
import gc

import pytest

from tests.support.waiting import soon, until
from tests.system.bytewise import LONG, alone, asked, connected, sent, serving
from tests.system.deployment import Deployment
from tests.system.serving import error_of, plainly

pytestmark = pytest.mark.xdist_group("gateway")


async def test_requests_of_one_connection_are_answered_in_turn(deployment: Deployment) -> None:
    """Requests that wait behind others are answered after them, wherever their bytes are cut.

    A request that offers HTTP/2, as each of Java's client does, keeps its body, and so do those after it.
    """
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    stream = asked(max_tokens=9, stream=True)
    offering = asked(max_tokens=9).replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + upgrade)
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with serving(deployment) as served:
        data = await sent(served, stream * 2 + last)
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.count(b"data: [DONE]") == 2
        assert data.index(b'"object":"list"') > data.rindex(b"data: [DONE]")
        for pieces in ([offering + offering + last], [offering[:-5], offering[-5:], last]):
            data = await sent(served, *pieces)
            assert data.count(b'"finish_reason":"length"') == data.count(b"HTTP/1.1 200 OK") - 1 > 0
            assert b'"object":"list"' in data
        assert (await sent(served, b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_answered_requests_leave_nothing_for_the_garbage_collector(deployment: Deployment) -> None:
    wanted = [asked(max_tokens=9, logprobs=2, stream=is_streamed) for is_streamed in (False, True)]
    async with serving(deployment) as served:
        _, writer = await connected(served.address)
        counts = served.gateway.counts
        gc.collect()  # what earlier tests of this process have left
        gc.disable()
        try:
            writer.write(b"".join(wanted))
            await until(lambda: counts.requests["/v1/completions", "200"] == 2 and not counts.open_answers)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("tokenbus.gate")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            writer.close()
    assert left == set()


async def test_client_that_leaves_with_requests_waiting_ends_all(deployment: Deployment) -> None:
    async with serving(deployment) as served:
        for is_streamed in (False, True):
            _, writer = await connected(served.address)
            writer.write(asked(max_tokens=LONG, stream=is_streamed))
            await until(lambda: len(served.gateway.dispatcher) == 1)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await writer.drain()
            writer.close()
            await until(lambda: not served.gateway.counts.open_answers and not len(served.gateway.dispatcher))


async def test_what_is_refused_behind_a_request_breaks_its_stream_off(deployment: Deployment) -> None:
    """Too many requests, nonsense and a long header end the connection: an answer inside the stream would be its."""
    behind = (
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000,
    )
    async with serving(deployment) as served:
        for each in behind:
            reader, writer = await connected(served.address)
            writer.write(asked(max_tokens=LONG, stream=True))
            data = await soon(reader.readuntil(b"data: "))
            writer.write(each)
            data += await soon(reader.read())
            assert data.count(b"HTTP/1.1 ") == 1
            assert b"[DONE]" not in data
            writer.close()
            await until(lambda: not len(served.gateway.dispatcher))


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_answers_are_compressed_for_clients_that_accept_it(
    deployment: Deployment,
    is_streamed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    asked = {"model": "tokenbus", "prompt": [1], "max_tokens": 20, "logprobs": 5, "stream": is_streamed}
    async with serving(deployment, gateway__compression="gzip") as served, plainly(served.url) as client:
        plain = await client.post("/v1/completions", json=asked, headers={"accept-encoding": "gzip;q=0"})
        assert "content-encoding" not in plain.headers
        found = b""
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.headers["content-encoding"] == "gzip"
            async for data in response.aiter_bytes():
                if is_streamed and data:
                    assert data.endswith(b"\n\n")
                found += data
            assert response.num_bytes_downloaded < len(found) / 2
    assert len(found) == pytest.approx(len(plain.content), rel=0.1)


async def test_empty_line_behind_a_request_disturbs_no_stream(deployment: Deployment) -> None:
    async with serving(deployment, gateway__request_timeout_ms=50) as served:
        reader, writer = await connected(served.address)
        writer.write(asked(max_tokens=300, stream=True))
        data = await soon(reader.readuntil(b"data: "))
        writer.write(b"\r\n")
        data += await soon(reader.readuntil(b"0\r\n\r\n"))
        assert b"data: [DONE]" in data
        writer.close()


async def test_late_requests_and_silent_connections_are_closed(deployment: Deployment) -> None:
    """Headers and bodies are due within a time, of a request that was answered before its body too."""
    post = b"POST /inspect HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    async with alone(deployment, gateway__request_timeout_ms=100, gateway__idle_timeout_ms=300) as served:
        assert (await sent(served, b"GET / HTTP/1.1\r\nHost: localhost\r\n")).startswith(b"HTTP/1.1 408 ")
        assert (await sent(served, post + b"Connection: close\r\n\r\n{")).startswith(b"HTTP/1.1 408 ")
        assert await sent(served) == b""
        assert served.gateway.counts.late_requests == 1
        assert (await sent(served, get, b"{")).startswith(b"HTTP/1.1 200 ")


async def test_trailer_is_bounded_like_a_header(deployment: Deployment) -> None:
    chunked = b"POST /inspect HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked += b"Transfer-Encoding: chunked\r\n\r\n"
    async with alone(deployment, gateway__max_header_bytes=2048) as served:
        with contextlib.suppress(ConnectionError):  # it is closed while this writes
            await sent(served, chunked, b"2\r\n{}\r\n0\r\nX: ", *[b"a" * 100_000] * 10)
        assert served.gateway.counts.requests["other", "431"] == 1
        close = b"0\r\nContent-Type: text/plain\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        data = await sent(served, chunked, b"2\r\n{}\r\n" + close)
        assert b"prompt: required, got nothing" in data


HOST = b"Host: localhost\r\n"
HEADS: tuple[tuple[int, bytes], ...] = (
    (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    (400, b"GET / HTTP/9.9\r\n"),
    (400, b"GET / HTTP/1.1\r\nX y: 1\r\n"),
    (400, b"GET / HTTP/1.1\r\nX: \x00\r\n"),
    (400, b"POST /inspect HTTP/1.1\r\nContent-Length: -1\r\n"),
    (400, b"POST /inspect HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n"),
    (400, b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
    (400, b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"),
    (431, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n"),
    (431, b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n"),
    (431, b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(102))),
    (431, b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 102),
    (200, b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 1500 + b"\r\n"),
    # A request names one host.
    (400, b"GET /healthz HTTP/1.1\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\n" + HOST * 2),
    (400, b"GET /healthz HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nHost: \r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nHost: local host\r\n"),
    (400, b"GET /healthz HTTP/1.1\r\nHost: user@localhost\r\n"),
    (400, b"GET http://evil.example/healthz HTTP/1.1\r\n" + HOST),
    (200, b"GET http://localhost/healthz HTTP/1.1\r\n" + HOST),
    (400, b"GET /healthz HTTP/1.0\r\n" + HOST * 2),
    (200, b"GET /healthz HTTP/1.0\r\n"),
    (200, b"GET /healthz?x=http://evil.example/ HTTP/1.1\r\n" + HOST),
)


async def test_head_of_a_request_is_http_of_a_bounded_length(deployment: Deployment) -> None:
    async with alone(deployment, gateway__max_header_bytes=2048) as served:
        for status, given in HEADS:
            head, _, body = (await sent(served, given + b"Connection: close\r\n\r\n")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), (given, head)
            if status != 200:
                code = {400: "bad_request", 431: "request_header_fields_too_large"}[status]
                assert error_of(body.decode())["code"] == code
        slowly = await sent(served, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 500] * 5)
        assert slowly.startswith(b"HTTP/1.1 431 ")
        assert served.gateway.counts.requests["other", "431"] == 5
