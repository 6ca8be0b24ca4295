"""What goes over one connection to the gateway: headers, bodies and requests in any order, whole or broken."""

import contextlib
import json

import pytest

from tests.support.waiting import soon, until
from tests.system.bytewise import LONG, alone, asked, connected, sent, serving
from tests.system.deployment import Deployment
from tests.system.serving import error_of, plainly

pytestmark = pytest.mark.xdist_group("gateway")


async def test_several_requests_of_one_connection_are_answered_in_turn(deployment: Deployment) -> None:
    body = json.dumps({"model": "tokenbus", "prompt": "a", "max_tokens": 9, "stream": True}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post += b"Content-Length: %d\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with serving(deployment) as served:
        data = await sent(served, (post % len(body) + body) * 2 + last)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.count(b"data: [DONE]") == 2
    assert data.index(b'"object":"list"') > data.rindex(b"data: [DONE]")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_leaves_with_requests_waiting_ends_all(
    deployment: Deployment,
    is_streamed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    async with serving(deployment) as served:
        _, writer = await connected(served.address)
        writer.write(asked(max_tokens=LONG, stream=is_streamed))
        await until(lambda: len(served.gateway.feed) == 1)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        writer.close()
        await until(lambda: not served.gateway.counts.open_answers and not len(served.gateway.feed))


async def test_too_many_requests_behind_one_answer_end_the_connection(deployment: Deployment) -> None:
    async with serving(deployment) as served:
        data = await sent(
            served, asked(max_tokens=LONG, stream=True) + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
        )
        assert b'"status"' not in data
        await until(lambda: not len(served.gateway.feed))


@pytest.mark.parametrize("behind", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000])
async def test_nonsense_behind_a_request_is_not_put_into_its_stream(deployment: Deployment, behind: bytes) -> None:
    """What is refused while a stream is sent breaks the stream off: an answer inside it would be read as part of it."""
    async with serving(deployment) as served:
        reader, writer = await connected(served.address)
        writer.write(asked(max_tokens=LONG, stream=True))
        data = await soon(reader.readuntil(b"data: "))
        writer.write(behind)
        data += await soon(reader.read())
        assert data.count(b"HTTP/1.1 ") == 1
        assert b"[DONE]" not in data
        writer.close()
        await until(lambda: not len(served.gateway.feed))


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
    """A line's end behind a body, as some clients send it, is no request that is late."""
    async with serving(deployment, gateway__request_timeout_ms=50) as served:
        reader, writer = await connected(served.address)
        writer.write(asked(max_tokens=300, stream=True))
        data = await soon(reader.readuntil(b"data: "))
        writer.write(b"\r\n")
        data += await soon(reader.readuntil(b"0\r\n\r\n"))
        assert b"data: [DONE]" in data
        writer.close()


async def test_request_that_asks_for_another_protocol_is_answered(deployment: Deployment) -> None:
    """A request that offers HTTP/2, as each of Java's client does, keeps its body, and so do those after it."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    offering = asked(max_tokens=9).replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + upgrade)
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with serving(deployment) as served:
        for pieces in ([offering + offering + last], [offering[:-5], offering[-5:], last]):
            data = await sent(served, *pieces)
            assert data.count(b'"finish_reason":"length"') == data.count(b"HTTP/1.1 200 OK") - 1 > 0
            assert b'"object":"list"' in data
        assert (await sent(served, b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_body_that_is_not_finished_does_not_hold_its_connection(deployment: Deployment) -> None:
    """A request that is answered before its body is there has as long for the body as others, then it is closed."""
    async with alone(deployment, gateway__request_timeout_ms=100) as served:
        get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        reader, writer = await connected(served.address)
        writer.write(get)
        await soon(reader.readuntil(b"\r\n\r\n"))
        writer.write(b"{")
        await soon(reader.read())
        writer.close()


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


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nX y: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"POST /inspect HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
async def test_what_is_no_http_is_400(deployment: Deployment, data: bytes) -> None:
    async with alone(deployment) as served:
        head, _, body = (await sent(served, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert error_of(body.decode())


async def test_header_that_is_too_long_is_431(deployment: Deployment) -> None:
    async with alone(deployment, gateway__max_header_bytes=2048) as served:
        for pieces in (
            [b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n"],
            [b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n"],
            [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 500] * 5],
            [b"GET / HTTP/1.1\r\n", *[b"X-%d: 1\r\n" % number for number in range(102)], b"\r\n"],
            [b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 102],
        ):
            head, _, body = (await sent(served, *pieces)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert error_of(body.decode())["code"] == "request_header_fields_too_large"
        assert served.gateway.counts.requests["other", "431"] == 5


async def test_header_of_many_bytes_within_the_bound_is_taken(deployment: Deployment) -> None:
    async with alone(deployment, gateway__max_header_bytes=2048) as served, plainly(served.url) as client:
        assert (await client.get("/healthz", headers={"x": "a" * 1500})).status_code == 200
        answer = await client.post("/v1/completions", json={"model": "tokenbus", "prompt": "a" * 60_000, "x": 1})
        assert error_of(answer.text)["param"] == "x"
