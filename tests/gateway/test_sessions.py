"""The label of a session, from a request's header or body to the bus; and sessions that are read from a log."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.gateway.answering import App, answering
from tests.gateway.reading import VALID, read, reading
from tests.recordings.test_routed_experts import answered, place_of
from tests.recordings.test_sessions import Worker
from tests.support.waiting import until
from tests.system.serving import error_of
from tokenbus.bus import AddressError
from tokenbus.client import Client
from tokenbus.engines.ngram import NgramEngine
from tokenbus.gateway import session_reader
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus.gateway.completion_request import BodyHeaders, Reader, unpacked
from tokenbus.gateway.encoder_process import RESULT, Job, Reply, answer
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.session_reader import SessionReader
from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus.settings import Settings
from tokenbus_contracts.generated.request_pb2 import Generate

ROUTES = ("completion", "chat", "chat_batch", "messages", "responses", "generation", "inspection")
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": VALID["completion"],
    "/v1/chat/completions": VALID["chat"],
    "/v1/chat/completions/batch": VALID["chat_batch"],
    "/invocations": VALID["chat"],
    "/v1/messages": VALID["messages"],
    "/v1/responses": VALID["responses"],
    "/inference/v1/generate": VALID["generation"],
    "/inspect": VALID["inspection"],
}
COMPLETION: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1}
LONGEST = "é" * 64
ADDRESS = "nats://127.0.0.1:4222/log"


def _with_header(session: str) -> Reader:
    reader = reading()
    reader.headers = BodyHeaders(session=session)
    return reader


def _sent(app: App, monkeypatch: pytest.MonkeyPatch) -> list[Generate]:
    """Return the list to which all requests on the bus are added."""
    sent, submit = [], app.gateway.client.submit

    def submitting(generate: Generate) -> int:
        sent.append(generate)
        return submit(generate)

    monkeypatch.setattr(app.gateway.client, "submit", submitting)
    return sent


@pytest.mark.parametrize("route", ROUTES)
def test_label_comes_from_the_body_or_the_header(route: str) -> None:
    for request in (
        read(reading(), route, session_id="run 1"),
        read(_with_header("run 1"), route),
        read(_with_header("run 1"), route, session_id="run 1"),
        read(_with_header("run 1"), route, session_id=""),
    ):
        assert [(each.session, each.tenant) for each in request.generates(7)] == [("run 1", 7)]


@pytest.mark.parametrize("route", ROUTES)
def test_requests_without_a_label_do_not_change(route: str) -> None:
    plain = [each.SerializeToString() for each in read(reading(), route).generates()]
    for fields in ({}, {"session_id": None}, {"session_id": ""}):
        assert [each.SerializeToString() for each in read(reading(), route, **fields).generates(7)] == plain


def test_each_choice_has_the_label() -> None:
    request = read(reading(), "completion", prompt=["a", "b"], n=2, session_id=LONGEST)
    assert [(each.session, each.tenant) for each in request.generates(7)] == [(LONGEST, 7)] * 4


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("label", "line"),
    [
        (LONGEST + "a", "session_id: at most 128 bytes, got 129: 'éé"),
        ("a\nb", "session_id: printable text, got 'a\\nb'"),
        ("\x00", "session_id: printable text, got '\\x00'"),
        (7, "session_id: expected str | null, got 7"),
    ],
)
def test_wrong_label_is_refused(route: str, label: object, line: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(reading(), route, session_id=label)
    assert raised.value.message.startswith(line)
    assert (raised.value.status, raised.value.param) == (400, "session_id")


@pytest.mark.parametrize("route", ROUTES)
def test_header_and_body_must_agree(route: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(_with_header("a"), route, session_id="b")
    assert raised.value.message == "session_id: the same as x-session-id, 'a', or absent, got 'b'"


def test_label_of_a_long_body_passes_through_an_encoder() -> None:
    job = Job("completion", {"m": 0}, {}, BodyHeaders(session=LONGEST))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)
    data = answer(reading(), told, orjson.dumps(VALID["completion"]))
    reply = msgspec.msgpack.decode(data[len(RESULT) :], type=Reply)
    assert unpacked(reply.data).session == LONGEST


def test_rendered_body_keeps_the_label() -> None:
    body = VALID["completion"] | {"session_id": "a"}
    assert b'"session_id":"a"' in reading().completion_rendering(body)
    assert b"session_id" not in reading().completion_rendering(VALID["completion"])


async def test_every_route_takes_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(NgramEngine(), gateway__tokenizer="ngram") as app, app.client() as client:
        sent = _sent(app, monkeypatch)
        for path, body in PATHS.items():
            asked = {name: value for name, value in body.items() if name != "model"}
            await client.post(path, json=asked, headers={b"x-session-id": "é".encode()})
            assert [(each.session, each.tenant) for each in sent] == [("é", 0)], path
            sent.clear()


async def test_wrong_header_is_refused() -> None:
    async with answering(workers=0) as app, app.client() as client:
        for label, line in (
            (b"a" * 129, "x-session-id: at most 128 bytes, got 129: 'aaa"),
            (b"a\tb", "x-session-id: printable text, got 'a\\tb'"),
            (b"\xff", "x-session-id: printable text, got '\\udcff'"),
        ):
            refused = await client.post("/v1/completions", json=COMPLETION, headers={b"x-session-id": label})
            assert refused.status_code == 400
            error = error_of(refused.text)
            assert error["message"].startswith(line)
            assert error["param"] == "x-session-id"


async def test_keys_are_different_tenants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clear, keys = zip(*map(made, ("alice", "bob")), strict=True)
    write_keys(tmp_path / "keys.json", keys)
    async with answering(gateway__keys_file=str(tmp_path / "keys.json")) as app, app.client() as client:
        sent = _sent(app, monkeypatch)
        for key in clear:
            headers = {"authorization": f"Bearer {key}", "x-session-id": "run"}
            for _ in range(2):
                await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert [each.session for each in sent] == ["run"] * 4
    tenants = [each.tenant for each in sent]
    assert tenants[:1] * 2 + tenants[2:3] * 2 == tenants
    assert len({0, *tenants}) == 3


# GET /sessions/{id}.


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> "Log":
    made = Log()
    monkeypatch.setattr("tokenbus.recordings.durable_log.reader.read_log", made.read)
    return made


class Log:
    """A durable log without a server."""

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    async def read(self, *, settings: Settings) -> AsyncGenerator[StreamItem, None]:
        assert settings.durable_log.address
        if self.error is not None:
            raise self.error
        for item in self.items:
            yield item
        while not self.may_end.is_set():  # noqa: ASYNC110 - it is set in another thread
            await asyncio.sleep(0.001)

    async def keep(self, app: App, *sessions: str) -> None:
        """Ask for one answer in each session, and keep all items."""
        async with self.keeping(app), app.client() as client:
            for session in sessions:
                body = COMPLETION | {"session_id": session, "logprobs": 0}
                assert (await client.post("/v1/completions", json=body)).status_code == 200

    @asynccontextmanager
    async def keeping(self, app: App) -> AsyncIterator[None]:
        """Keep all items that the workers publish during the block."""
        async with app.bus.client.watch() as watched:
            collecting = asyncio.create_task(self._collect(watched))
            yield
            await app.bus.settle()
            collecting.cancel()

    async def _collect(self, watched: AsyncIterator[StreamItem]) -> None:
        async for item in watched:
            self.items.append(item)


async def _get(app: App, label: str = "a") -> tuple[int, str]:
    """Return the status of an answer, and its error or its tokens."""
    async with app.client() as client:
        answer = await client.get(f"/sessions/{label}")
    if answer.status_code != 200:
        return answer.status_code, str(error_of(answer.text)["message"])
    return 200, str([branch["token_ids"] for branch in answer.json()["branches"]])


async def test_sessions_need_a_durable_log() -> None:
    async with answering(workers=0) as app:
        assert await _get(app) == (404, "sessions: a gateway with durable_log.address, the log to read, got none")


async def test_sessions_are_read_by_their_labels(log: Log) -> None:
    async with answering(durable_log__address=ADDRESS) as app:
        await log.keep(app, "a", "b")
        status, tokens = await _get(app)
        assert (status, tokens[:7]) == (200, "[[1, 2,")
        assert await _get(app, "c") == (404, "there is no session 'c'")


async def test_another_owners_session_is_not_read(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(durable_log__address=ADDRESS) as app:
        await log.keep(app, "a")
        monkeypatch.setattr(Client, "owner", 5)
        assert await _get(app) == (404, "there is no session 'a'")
        monkeypatch.setattr(Client, "owner", 0)
        assert await _get(app) == (503, "sessions: a connected processor, got none yet")


async def test_one_session_is_read_at_a_time(log: Log) -> None:
    async with answering(durable_log__address=ADDRESS) as app:
        await log.keep(app, "a")
        log.may_end.clear()
        first = asyncio.create_task(_get(app))
        try:
            await until(lambda: app.gateway.sessions._reading is not None)
            assert await _get(app) == (503, "sessions: one read of the durable log at a time, got one more")
        finally:
            log.may_end.set()
        assert (await first)[0] == 200
        assert (await _get(app))[0] == 200


async def test_read_has_a_time_limit(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reader, "MOST_SECONDS", 0.05)
    async with answering(durable_log__address=ADDRESS) as app:
        log.may_end.clear()
        assert await _get(app) == (503, "sessions: read within 0.05 s, got no end of the durable log")


async def test_session_that_is_too_large_is_refused(log: Log) -> None:
    async with answering(durable_log__address=ADDRESS) as app:
        await log.keep(app, *["a"] * 8)
        settings = replace(app.gateway.settings, gateway=replace(app.gateway.settings.gateway, answer_bytes=1024))
        app.gateway.sessions = SessionReader(settings, app.gateway.repeated_log)
        status, line = await _get(app)
        assert status == 400
        assert line.startswith("sessions: a session of at most 1024 bytes, got ")


async def test_log_that_cannot_be_read_is_logged(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.error = AddressError(ADDRESS, "no server answers within 1 s")
    async with answering(workers=0, durable_log__address=ADDRESS) as app:
        line = "sessions: a durable log that can be read, got an error; the gateway's log says more"
        assert await _get(app) == (503, line)
    assert "no server answers" in caplog.text


async def test_sessions_of_clients_without_a_key_are_for_this_machine(log: Log) -> None:
    async with answering(durable_log__address=ADDRESS, gateway__hosts="*") as app, app.client("10.1.2.3") as client:
        await log.keep(app, "a")
        assert (await client.get("/sessions/a")).status_code == 403


@pytest.mark.usefixtures("log")
async def test_reads_count_towards_the_rate_of_a_key(tmp_path: Path) -> None:
    clear, key = made("alice", requests_per_minute=2)
    write_keys(tmp_path / "keys.json", [key])
    given: dict[str, Any] = {"gateway__keys_file": str(tmp_path / "keys.json"), "durable_log__address": ADDRESS}
    async with answering(**given) as app, app.client() as client:
        headers = {"authorization": f"Bearer {clear}"}
        answers = [await client.get("/sessions/a", headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [404, 404, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert error_of(answers[2].text)["code"] == "rate_limit_exceeded"
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 429


async def test_request_has_the_place_of_its_routed_experts(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.items = answered(answered(Worker(), 1, place_of()), 2).items
    monkeypatch.setattr(Client, "owner", 5)
    async with answering(workers=0, durable_log__address=ADDRESS) as app, app.client() as client:
        first, second = (await client.get("/sessions/s")).json()["requests"]
    place = asdict(RoutedExperts.of(place_of()))
    assert first["routed_experts"] == place | {"shape": list(place["shape"])}
    assert second["routed_experts"] is None


class EngineWithoutStops(NgramEngine):
    """An engine that ignores stop texts, so that only the gateway sees them."""

    def admit(self, generate: Generate) -> int:
        ignoring = Generate()
        ignoring.CopyFrom(generate)
        del ignoring.sampling.stop[:]
        return super().admit(ignoring)


async def test_stop_that_only_the_gateway_saw_is_an_abort(log: Log) -> None:
    """The worker's last row does not say why the client aborted, and tokens after the stop are in the session."""
    given: dict[str, Any] = {"gateway__tokenizer": "ngram", "durable_log__address": ADDRESS}
    async with answering(EngineWithoutStops(), **given) as app, app.client() as client:
        app.bus.workers[0].step_seconds = 0.1  # so that the abort comes before the last token
        body = {"prompt": "In the evening", "max_tokens": 500, "stop": " ", "session_id": "a", "return_token_ids": True}
        async with log.keeping(app):
            answer = await app.bus.until(client.post("/v1/completions", json=body))
            await app.bus.advance(20)
        session = (await client.get("/sessions/a")).json()
    (choice,) = answer.json()["choices"]
    (request,), (branch,) = session["requests"], session["branches"]
    assert choice["finish_reason"] == "stop"
    assert request["status"] == "ABORTED"
    assert session["missing"] == [f"request {request['request_id']}: it was aborted"]
    output = branch["token_ids"][request["prompt_tokens"] :]
    assert len(choice["token_ids"]) <= len(output) < 500
    assert output[: len(choice["token_ids"])] == choice["token_ids"]
