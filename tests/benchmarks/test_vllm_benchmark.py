"""The benchmark beside vLLM's own server: its arithmetic, its client and its page, without vLLM."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.errors import WrongDeliveryError
from benchmarks.processes import MODEL, seconds, spent
from benchmarks.vllm import __main__ as command
from benchmarks.vllm.answers import compare
from benchmarks.vllm.cells import CHAT, COMPLETIONS, Cell, bodies, cells
from benchmarks.vllm.clients import Answer, RefusedError, answered
from benchmarks.vllm.document import page
from benchmarks.vllm.goals import goals_of
from benchmarks.vllm.measure import figures_of
from benchmarks.vllm.plot import plot
from benchmarks.vllm.samples import Sample, between_tokens, median, percentile, ratio, sample
from benchmarks.vllm.systems import TOKENBUS, VLLM, System, environment_of

SAME = {"asked": 12, "same_tokens": 12, "same_texts": 12, "same_logprobs": 11, "tokens": 288, "worst": 2e-7}
HEADLINE = Cell(COMPLETIONS, 20, 256)


def a_sample(rate: float, outside: float | None = 50.0, first: float = 10.0) -> Sample:
    """Return a round's figures."""
    cpu = {"gateway": 30.0, "worker": 20.0} | ({} if outside is None else {MODEL: 90.0})
    return Sample(rate, first, first * 2, 5.0, 6.0, 1.0, 600.0, 12.0, cpu, outside)


def test_figures_of_a_round() -> None:
    """Tokens count by the round's whole time; the first token and those between are medians of the requests."""
    answers = [
        Answer(written=0.0, first=0.25, ended=1.0, tokens=4, events=4, bytes=400),
        Answer(written=0.0, first=0.5, ended=2.0, tokens=4, events=2, bytes=300),
        Answer(written=0.5, first=0.8, ended=1.1, tokens=4, events=2, bytes=500),
    ]
    cpu = {"API server": 0.6, "core": 0.3, MODEL: 1.2}
    found = sample(answers, cpu, client_cpu=0.012, tokens_of_each=4)
    assert found.tokens_per_second == 12 / 2.0
    assert (found.first_ms, found.first_p99_ms) == pytest.approx((300, 500))
    assert (found.between_ms, found.between_p99_ms) == pytest.approx((250, 500))
    assert (found.tokens_per_event, found.bytes_per_token) == (1.5, 100)
    assert found.client_us == pytest.approx(1000)
    assert found.cpu_us == pytest.approx({"API server": 50_000, "core": 25_000, MODEL: 100_000})
    assert found.outside_us == pytest.approx(75_000)


def test_outside_of_the_model_is_known_only_where_a_process_runs_it() -> None:
    """Where the core computes the model itself, as on one card, nothing is said of what is outside."""
    answers = [Answer(0.0, 0.1, 1.0, 4, 4, 400)]
    assert sample(answers, {"API server": 0.6, "core": 0.3}, 0.0, 4).outside_us is None


def test_answers_of_another_length_are_refused() -> None:
    """A server that stopped early makes the round worthless, and is named by what it sent."""
    with pytest.raises(WrongDeliveryError, match="an answer has 3 tokens, of 4 that were asked for"):
        sample([Answer(0, 0.1, 1, 4, 4, 400), Answer(0, 0.1, 1, 3, 3, 300)], {}, 0.0, 4)


def test_time_between_tokens_of_one() -> None:
    """An answer of one token has no time between tokens."""
    assert between_tokens(Answer(0.0, 0.5, 0.6, 1, 1, 100)) == 0


def test_percentile_is_a_value_that_was_seen() -> None:
    """It is the least value that so many of a hundred do not exceed."""
    assert percentile([5.0, 1.0, 3.0], 50) == 3
    assert percentile([float(each) for each in range(1, 201)], 99) == 198
    assert percentile([7.0], 99) == 7


def test_medians_and_ratios_of_rounds() -> None:
    """Medians are taken figure by figure, role by role; a ratio is the median of the rounds' own."""
    ours, theirs = [a_sample(rate) for rate in (100, 300, 90)], [a_sample(rate) for rate in (50, 100, 90)]
    assert median(ours).tokens_per_second == 100
    assert median(ours).cpu_us == {"gateway": 30, "worker": 20, MODEL: 90}
    assert ratio(ours, theirs, lambda each: each.tokens_per_second) == 2.0
    assert ratio([a_sample(1, outside=None)], [a_sample(1)], lambda each: each.outside_us) is None


def test_goals_are_compared_with_what_was_found() -> None:
    """Each goal is judged by its own cells, and only where they were measured."""
    none, one = Cell(COMPLETIONS, None, 256), Cell(COMPLETIONS, None, 1)
    found = {
        none: {VLLM: [a_sample(6000, 150)], TOKENBUS: [a_sample(6000, 160)]},
        HEADLINE: {VLLM: [a_sample(1600, 680)], TOKENBUS: [a_sample(5000, 160)]},
        one: {VLLM: [a_sample(150, 1000, 9.0)], TOKENBUS: [a_sample(150, 900, 8.0)]},
    }
    goals = {goal["goal"]: (goal["measured"], goal["met"]) for goal in goals_of(found, SAME, on_card=False)}
    assert goals == {
        "the same tokens at temperature 0, answers": (12, True),
        "256 streams, k = 20: tokens/s, times vLLM's": (3.125, True),
        "256 streams, k = 20: tokens/s, of our own without logprobs": (0.833, False),
        "256 streams, k = none: processor time outside the model, of vLLM's": (1.067, False),
        "256 streams, k = 20: processor time outside the model, of vLLM's": (0.235, True),
        "1 stream, k = none: time to first token, of vLLM's": (0.889, True),
    }
    on_card = {goal["goal"]: goal["wanted"] for goal in goals_of(found, SAME, on_card=True)}
    assert on_card["256 streams, k = 20: tokens/s, times vLLM's"] == "at least 5"


def test_cells_and_bodies() -> None:
    """Chats are asked with the most streams alone; each body of a run is another, and the same for both systems."""
    chosen = list(cells([COMPLETIONS, CHAT], [None, 5, 20], [1, 64]))
    assert [cell for cell in chosen if cell.endpoint == CHAT] == [Cell(CHAT, None, 64), Cell(CHAT, 20, 64)]
    assert len(chosen) == 8
    alone = bodies(Cell(COMPLETIONS, None, 1), "m", 64, 0)
    assert len(alone) == 1
    assert len({json.dumps(body) for body in alone[0]}) == len(alone[0]) == 8
    many = bodies(Cell(CHAT, 20, 64), "m", 64, 0)
    assert many == bodies(Cell(CHAT, 20, 64), "m", 64, 0) != bodies(Cell(CHAT, 20, 64), "m", 64, 1)
    assert len({json.dumps(body) for (body,) in many}) == 64
    assert (many[0][0]["top_logprobs"], many[0][0]["max_tokens"]) == (20, 64)
    assert "logprobs" not in alone[0][0]


STREAM = (
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    '{0}data: {{"choices": [{{"text": "a"}}]}}\n\n',
    '{0}data: {{"choices": [], "usage": {{"prompt_tokens": 3, "completion_tokens": 7}}}}\n\ndata: [DONE]\n\n',
)


@asynccontextmanager
async def serving(*parts: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve these parts, each as a chunk of its own, to every request; yield the address and the bodies that came."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client leaves."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asked.append(await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0])))
                for part in parts:
                    chunk = part.format("").encode()
                    sized = part.startswith("{0}")
                    writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" if sized else chunk)
                    await writer.drain()
                if parts[-1].startswith("{0}"):
                    writer.write(b"0\r\n\r\n")
                else:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_client_counts_what_comes() -> None:
    """Each stream asks its bodies one after the other; tokens are the usage's, events and bytes those that came."""
    async with serving(*STREAM) as (address, asked):
        wanted = [[{"n": 1}, {"n": 2}], [{"n": 3}]]
        streams = await answered({"addresses": [address], "path": "/v1/completions", "bodies": wanted})
    assert [len(stream) for stream in streams] == [2, 1]
    assert sorted(json.loads(body)["n"] for body in asked) == [1, 2, 3]
    for answer in (answer for stream in streams for answer in stream):
        assert answer.written <= answer.first <= answer.ended
        assert (answer.tokens, answer.events) == (7, 2)
        assert answer.bytes == sum(len(part.format("")) for part in STREAM) + len("23\r\n\r\n5b\r\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (["HTTP/1.1 400 Bad Request\r\n\r\nno such model"], "400 Bad Request no such model"),
        (STREAM[:2], "a stream without its end"),
        (STREAM[:1], "the server closed the connection"),
    ],
)
async def test_client_refuses_what_is_no_whole_stream(parts: list[str], why: str) -> None:
    """An error, a stream without usage and [DONE], and a connection that ends make the round fail by name."""
    async with serving(*parts) as (address, _asked):
        with pytest.raises(RefusedError, match=why):
            await answered({"addresses": [address], "path": "/", "bodies": [[{}]]})


def test_processor_time_is_that_of_a_role_and_all_below_it() -> None:
    """What a process's child spends counts for the process's role, to within the system's clock ticks."""
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        before = {"worker": 0.0}
        assert process.stdout is not None
        process.stdout.readline()
        found = spent(before, seconds({"worker": [process.pid], "gone": [2**22 + 1]}))
        process.communicate("\n")
    assert found["worker"] >= 0.3
    assert found["gone"] == 0


class _Answering:
    """A system that answers with what it is given."""

    def __init__(self, choice: dict[str, Any]) -> None:
        self._choice = choice

    def get(self, _path: str, _body: dict[str, Any]) -> dict[str, Any]:
        """Answer."""
        return {"choices": [self._choice]}


def test_answers_are_compared_by_tokens_texts_and_logprobs() -> None:
    """Each of the three is counted for itself, and alternatives beyond those asked for are nobody's."""

    def choice(token: int, text: str, logprob: float) -> dict[str, Any]:
        own = {"token_logprobs": [logprob], "top_logprobs": [{"a": logprob, "b": -3.0}]}
        return {"token_ids": [token], "text": text, "logprobs": own}

    theirs, ours = _Answering(choice(1, "a", -1.0)), _Answering(choice(1, "b", -1.5))
    systems: Any = {VLLM: theirs, TOKENBUS: ours}
    found = compare(systems, [COMPLETIONS], "m")
    assert (found["asked"], found["same_tokens"], found["same_texts"], found["same_logprobs"]) == (12, 12, 0, 0)
    assert found["worst"] == 0.5
    assert compare({VLLM: theirs, TOKENBUS: theirs}, [COMPLETIONS], "m")["same_logprobs"] == 12  # type: ignore[dict-item]


@pytest.fixture
def record() -> dict[str, Any]:
    """Return a record of two cells, as a run makes it."""
    found = {
        Cell(COMPLETIONS, None, 256): {VLLM: [a_sample(6000, 150)], TOKENBUS: [a_sample(6600, 100)]},
        HEADLINE: {VLLM: [a_sample(1600, 680)], TOKENBUS: [a_sample(6000, 160)]},
    }
    head = {
        "benchmark": "vllm",
        "vllm": "0.32.0",
        "machine": {"cpu": "one", "cores": "2"},
        "engine_options": ["--dtype", "float32"],
        "gateways": 1,
        "api_servers": 1,
        "rounds": 1,
        "max_tokens": 64,
        "answers": SAME,
        "idle_cores": {VLLM: 0.02, TOKENBUS: 0.03},
    }
    made: dict[str, Any] = json.loads(json.dumps(head | figures_of(found, SAME, None)))
    return made


def test_page_says_what_was_measured(record: dict[str, Any]) -> None:
    """The page has the goals, the rates beside each other and what each process takes."""
    text = page(record, "the command")
    assert "3.75 met" in text
    assert "the same tokens in 12, texts in 12, logprobs in 11" in text
    (rates,) = [line.split() for line in text.splitlines() if line.startswith("completions") and "6,600" in line]
    assert rates[-5:] == ["6,000", "1.00", "6,600", "1.00", "1.10"]
    assert "outside: all of the system's processes but the one that runs the model." in text
    for cell in record["cells"]:
        for found in cell["medians"].values():
            found["outside_us"] = None
    assert "cannot be told apart" in page(record, "the command")


def test_earlier_run_is_drawn_again(record: dict[str, Any], tmp_path: Path) -> None:
    """--record measures nothing and writes the figures, the page and the plot of an earlier run."""
    (tmp_path / "earlier.json").write_text(json.dumps(record))
    command.main(["--record", str(tmp_path / "earlier.json"), "--write-docs", str(tmp_path)])
    assert json.loads((tmp_path / "vllm.json").read_text()) == record
    assert "vllm.svg" in (tmp_path / "vllm.md").read_text()
    drawn = (tmp_path / "vllm.svg").read_bytes()
    plot(record, tmp_path)
    assert (tmp_path / "vllm.svg").read_bytes() == drawn
    command.main(["--record", str(tmp_path / "earlier.json"), "--name", "again", "--write-docs", str(tmp_path)])
    assert (tmp_path / "again.svg").read_bytes() == drawn
    assert "(again.json)" in (tmp_path / "again.md").read_text()


def test_without_vllm_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where vLLM is not installed, the status is 2 and the only line says so."""
    monkeypatch.setattr(command, "_TESTED", tmp_path / "python")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as end:
        command.main(["--quick"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("not run: vLLM is not installed; --python names an interpreter that has it")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--streams", "1,0"], "argument --streams: numbers of at least 1, got '0'"),
        (["--k", "none,21"], "argument --k: none, or 0 to 20, got '21'"),
        (["--endpoints", "chats"], "argument --endpoints: of completions, chat, got 'chats'"),
        (["--rounds", "x"], "argument --rounds: numbers of at least 1, got 'x'"),
    ],
)
def test_wrong_use(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be measured is refused with status 2, the option and the value."""
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_processes_have_this_checkout_also_where_none_is_installed(tmp_path: Path) -> None:
    """The environment of both systems brings the command, its engines and its version, without an installation."""
    code = (
        "from importlib.metadata import entry_points, version; import tokenbus_services; "
        "print(version('tokenbus'), [each.value for each in entry_points(group='tokenbus.engines', name='vllm')])"
    )
    environment = environment_of(tmp_path) | {"PATH": os.environ["PATH"]}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert run.stdout == "0.1.0 ['tokenbus_engines.kinds:VLLM']\n"


def test_system_answers_json() -> None:
    """A system without an address to ask is an error of the system's, not silence."""
    with pytest.raises(OSError, match="refused"):
        System(VLLM, ["127.0.0.1:1"]).get("/version")
