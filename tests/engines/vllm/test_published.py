"""What the scheduler of a deployed vLLM adds to its steps, with arrays as vLLM's in the place of vLLM."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from enum import IntEnum
from importlib import import_module
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.test_columns import lists, mask_lists
from tests.pages import blocks, module_of
from tests.support.settings import publishing_in
from tests.support.waiting import soon, until
from tokenbus.delivery import Step
from tokenbus.engines.vllm import published
from tokenbus.engines.vllm.compatibility import OF_MASKS, VersionError
from tokenbus.engines.vllm.published import Published, settings_for
from tokenbus.engines.vllm.request_ids import ARGUMENT
from tokenbus.engines.vllm.sessions import PARENT, SESSION, Sessions
from tokenbus.engines.vllm.weight_versions import follow_weight_versions
from tokenbus.processor import Processor
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, TokenPrompt

TOP_K = 3
VOCABULARY = 64


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


VLLM = SimpleNamespace(FinishReason=FinishReason)


def scheduled_of(tokens: dict[str, int], **changes: object) -> Any:  # noqa: ANN401 - as vLLM's SchedulerOutput
    nothing: dict[str, Any] = {
        "scheduled_spec_decode_tokens": {},
        "preempted_req_ids": set(),
        "num_invalid_spec_tokens": None,
    }
    return SimpleNamespace(num_scheduled_tokens=tokens, **nothing | changes)


def output_of(name: str, tokens: list[int], reason: object = None, stop: object = None, **more: object) -> Any:  # noqa: ANN401
    others = {"new_logprobs": None, "prefill_stats": None, "routed_experts": None, **more}
    return SimpleNamespace(request_id=name, new_token_ids=tokens, finish_reason=reason, stop_reason=stop, **others)


def prefilled(prompt: int, cached: int) -> SimpleNamespace:
    return SimpleNamespace(num_prompt_tokens=prompt, num_cached_tokens=cached)


def configuration(**model: object) -> Any:  # noqa: ANN401 - as vLLM's VllmConfig
    described = {
        "served_model_name": "tiny",
        "tokenizer": "nowhere",
        "max_model_len": 256,
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "is_diffusion": False,
        "get_vocab_size": lambda: VOCABULARY,
        **model,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**described),
        speculative_config=None,
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )


def sampling(**given: object) -> SimpleNamespace:
    made: dict[str, Any] = {"logprobs": None, "logprob_token_ids": None, "stop": None, "extra_args": None}
    made |= {"prompt_logprobs": None, "skip_reading_prefix_cache": None, **given}
    return SimpleNamespace(**made, num_logprobs=made["logprobs"])


class Core:
    """A scheduler whose steps a test makes up, and what vLLM's core does with it."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.given: list[Any] = []
        """What the model was given of each new request, in the last step."""
        self.computed: dict[str, Any] = {}
        """Further members of the model's outputs."""
        self.prefill_stats: Any = None
        """What the next output says of its prompt."""
        self.more: dict[str, dict[str, Any]] = {}
        """Further members of the next output of a request."""
        self.prompt: list[int] | None = [1]
        """The prompt of new requests; None: embeddings."""
        self._new: list[str] = []
        self._finished: set[str] = set()
        self._outputs: list[Any] = []

    def add(self, name: str, **given: object) -> None:
        self.requests[name] = SimpleNamespace(request_id=name, sampling_params=sampling(**given))
        self._new.append(name)

    def drop(self, name: str) -> None:
        del self.requests[name]
        self._finished.add(name)

    def schedule(self) -> Any:  # noqa: ANN401 - as vLLM's
        new = [
            SimpleNamespace(
                req_id=name,
                sampling_params=self.requests[name].sampling_params,
                prompt_token_ids=self.prompt,
                prompt_embeds=None if self.prompt else object(),
            )
            for name in self._new
        ]
        finished, self._finished, self._new = self._finished, set(), []
        tokens = dict.fromkeys(self.requests, 1)
        return scheduled_of(tokens, scheduled_new_reqs=new, finished_req_ids=finished)

    def update_from_output(self, scheduled: Any, computed: Any) -> dict[int, Any]:  # noqa: ANN401 - as vLLM's
        outputs = []
        for name in filter(self.requests.__contains__, scheduled.num_scheduled_tokens):
            index, wants = computed.req_id_to_index[name], self.requests[name].sampling_params.num_logprobs is not None
            all_scores = computed.logprobs
            scores = all_scores._replace(
                logprob_token_ids=all_scores.logprob_token_ids[index : index + 1],
                logprobs=all_scores.logprobs[index : index + 1],
            )
            tokens = [int(computed.logprobs.logprob_token_ids[index, 0])]
            stats, self.prefill_stats = self.prefill_stats, None
            more = self.more.pop(name, {})
            outputs.append(output_of(name, tokens, new_logprobs=scores if wants else None, prefill_stats=stats, **more))
        return {0: SimpleNamespace(outputs=outputs)}

    def shutdown(self) -> None:
        """End."""

    def step(self, logprobs: Any = None) -> tuple[Any, list[Any]]:  # noqa: ANN401 - as vLLM's
        return self.finish(self.launch(), logprobs)

    def launch(self) -> Any:  # noqa: ANN401 - as vLLM's
        scheduled = self.schedule()
        self.given = [new.sampling_params.logprobs for new in scheduled.scheduled_new_reqs]
        return scheduled

    def finish(self, scheduled: Any, logprobs: Any = None) -> tuple[Any, list[Any]]:  # noqa: ANN401 - as vLLM's
        names = list(scheduled.num_scheduled_tokens)
        scores = logprobs or lists(TOP_K + 2, max(1, len(names)), seed=len(names))
        indices = {name: place for place, name in enumerate(names)}
        computed = {"logprobs": scores, "req_id_to_index": indices, "prompt_logprobs_dict": {}, **self.computed}
        outputs = self.update_from_output(scheduled, SimpleNamespace(**computed))
        return scores, outputs[0].outputs


class EngineCore:
    """What vLLM's core has of weight versions."""

    def __init__(self, scheduler: object) -> None:
        self.scheduler = scheduler
        self.weight_version = "default"

    def set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version


class Bus:
    """A folder's bus, and a scheduler's steps on it."""

    def __init__(self, folder: Path, model: Mapping[str, object] = MappingProxyType({}), **overrides: object) -> None:
        usual = {"worker.policy": "fail", "worker.top_logprobs": TOP_K}
        self.settings = publishing_in(folder, usual, overrides)
        self.core = Core()
        self.published = Published(VLLM, configuration(**model), self.settings, None)
        self.published.observe(self.core)


@pytest.fixture
def bus(folder: Path) -> Iterator[Bus]:
    made = Bus(folder)
    yield made
    made.core.shutdown()


async def rows_until(steps: AsyncIterator[Step], last: tuple[int, RowStatus]) -> list[Any]:
    rows: list[Any] = []
    async for step in steps:
        rows += step.rows.rows()
        if last in {(row.request_id, row.status) for row in rows}:
            break
    return rows


async def items_of(bus: Bus, count: int) -> list[Any]:
    async with Processor(bus.settings) as processor:
        items: list[Any] = []
        processor.intake.log_item = lambda item, _ack: items.append(item.batch or item.event)
        await until(lambda: len(items) == count)
    return items


async def test_columns_are_published_and_the_front_end_gets_its_own(bus: Bus) -> None:
    """The model computes logprobs for all, the bus has them all, and the front end those that it asked for."""
    bus.core.add("plain", extra_args={ARGUMENT: 1})
    bus.core.add("two", logprobs=2, extra_args={ARGUMENT: 2})
    bus.core.add("five", logprobs=5, extra_args={ARGUMENT: 3})
    bus.core.add("every", logprobs=-1, extra_args={ARGUMENT: 4})
    scores, outputs = bus.core.step()
    assert bus.core.given == [TOP_K, TOP_K, 5, -1]
    assert [request.sampling_params.logprobs for request in bus.core.requests.values()] == [None, 2, 5, -1]
    assert [each.new_logprobs and each.new_logprobs.logprobs.shape[1] for each in outputs] == [None, 3, 6, 6]
    bus.core.step()
    bus.core.drop("plain")
    bus.core.step()
    async with Processor(bus.settings) as processor:
        rows = await soon(rows_until(processor.steps(), (1, RowStatus.ABORTED)))
    first = rows[:4]
    assert [row.request_id for row in first] == [1, 2, 3, 4]
    assert [row.logprobs.tolist() for row in first] == scores.logprobs[:, :1].tolist()
    assert [row.alternative_logprobs[0].tolist() for row in first] == scores.logprobs[:, 1 : 1 + TOP_K].tolist()
    (ended,) = (row for row in rows if row.status is RowStatus.ABORTED)
    assert (ended.request_id, ended.position, ended.token_ids.size) == (1, 2, 0)


async def test_cached_prompts_are_told_before_their_rows(bus: Bus) -> None:
    bus.core.add("first", extra_args={ARGUMENT: 1})
    bus.core.prefill_stats = prefilled(48, 32)
    bus.core.step()
    bus.core.step()
    told, first, _ = await items_of(bus, 3)
    assert (told.admitted.request_id, told.admitted.prompt_tokens, told.admitted.cached_tokens) == (1, 48, 32)
    assert first.positions.tolist() == [0]


async def test_session_is_published_before_the_first_row(bus: Bus) -> None:
    """A long prompt comes in chunks; its length and the cached part of it are known as for other requests."""
    bus.core.prompt = list(range(20_000))
    bus.core.add("labelled", extra_args={ARGUMENT: 1, SESSION: "run 7", PARENT: "00000000000000ff"})
    bus.core.prefill_stats = prefilled(20_000, 32)
    bus.core.step()
    admitted, first, second, with_cached, batch = await items_of(bus, 5)
    assert (admitted.admitted.request_id, admitted.admitted.prompt_tokens) == (1, 20_000)
    assert not admitted.admitted.HasField("cached_tokens")
    chunks = [first.session_prompt, second.session_prompt]
    assert {(each.request_id, each.session, each.parent, each.owner) for each in chunks} == {(1, "run 7", 255, 0)}
    assert np.concatenate([np.frombuffer(each.token_ids, "<u4") for each in chunks]).tolist() == bus.core.prompt
    assert with_cached.admitted.cached_tokens == 32
    assert batch.positions.tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "field", "limit", "value"),
    [
        ({SESSION: "s" * 129}, SESSION, "at most 128 bytes", '"129 bytes: sss'),
        ({SESSION: "\u00e9" * 65}, SESSION, "at most 128 bytes", '"130 bytes: '),
        ({SESSION: 7}, SESSION, "a text", '"int"'),
        ({SESSION: "\ud800"}, SESSION, "a text in UTF-8", '"'),
        ({SESSION: "run", PARENT: "ff"}, PARENT, "16 hexadecimal digits", '"ff"'),
        ({SESSION: "run", PARENT: 255}, PARENT, "16 hexadecimal digits", "255"),
    ],
)
def test_invalid_session_is_one_line(
    arguments: dict[str, object], field: str, limit: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid parent does not cost a request its session."""
    sessions = Sessions()
    found = [sessions.of(1, "chatcmpl-1", arguments, [5]) for _ in range(2)]
    kept = Generate(request_id=1, session="run", tokens=TokenPrompt(token_ids=[5]))
    assert found == [kept if field == PARENT else None] * 2
    (message,) = caplog.messages
    assert message.startswith(f'session refused field="{field}" limit="{limit}" value={value}')


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("tokenbus_session:run 7:3-0a1b2c3d", "run 7"),
        ("chatcmpl-tokenbus_session:run 7:3-0a1b2c3d", "run 7"),
        ("cmpl-tokenbus_session:run 7::-0-0a1b2c3d", "run 7"),
        ("resp_tokenbus_session:run 7:3_0-0a1b2c3d", "run 7"),
        ("generate-tokens-tokenbus_session:\u00e9\n:3-0a1b2c3d", "\u00e9\n"),
        ("12_chatcmpl-tokenbus_session:run 7:3-0a1b2c3d", "run 7"),
        ("chatcmpl-session:run 7:3-0a1b2c3d", None),
        ("chatcmpl-a:tokenbus_session:run 7:3-0a1b2c3d", None),
        ("chatcmpl-mytokenbus_session:run 7:3-0a1b2c3d", None),
        ("chatcmpl-tokenbus_session:run 7-0a1b2c3d", None),
        ("chatcmpl-tokenbus_session::3-0a1b2c3d", None),
        ("chatcmpl-a:b:c-0a1b2c3d", None),
    ],
)
def test_label_in_a_request_id(name: str, label: str | None) -> None:
    """The label survives vLLM's prefixes and suffixes, also those of one of n answers; other ids have no label."""
    found = Sessions().of(1, name, None, [5])
    assert (found and found.session) == label


def test_argument_takes_precedence_over_a_request_id(caplog: pytest.LogCaptureFixture) -> None:
    sessions = Sessions()
    labelled = "chatcmpl-tokenbus_session:id:3-0a1b2c3d"
    found = [sessions.of(1, labelled, {SESSION: given}, [5]) for given in ("argument", "", "s" * 129)]
    assert [session and session.session for session in found] == ["argument", None, None]
    (message,) = caplog.messages
    assert 'limit="at most 128 bytes" value="129 bytes: sss' in message


def test_long_label_in_a_request_id_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    sessions = Sessions()
    assert [sessions.of(1, f"cmpl-{SESSION}:{'i' * 129}:{number}", {}, [5]) for number in range(2)] == [None, None]
    (message,) = caplog.messages
    assert message.startswith(f'session refused field="{SESSION}" limit="at most 128 bytes" value="129 bytes: iii')


async def test_requests_without_a_valid_session_have_none(bus: Bus) -> None:
    bus.core.add("plain", extra_args={ARGUMENT: 1})
    bus.core.add("unlabelled", extra_args={ARGUMENT: 2, SESSION: "", PARENT: "00000000000000ff"})
    bus.core.add("long", extra_args={ARGUMENT: 3, SESSION: "s" * 129})
    bus.core.step()
    bus.core.prompt = None
    bus.core.add("embedded", extra_args={ARGUMENT: 4, SESSION: "run"})
    bus.core.step()
    items = await items_of(bus, 2)
    assert [item.positions.tolist() for item in items] == [[0, 0, 0], [1, 1, 1, 0]]


async def test_steps_have_the_version_of_their_weights(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    core = EngineCore(bus.core)
    follow_weight_versions(EngineCore)
    follow_weight_versions(EngineCore)
    bus.core.add("first", extra_args={ARGUMENT: 1})
    bus.core.step()
    for name in ("7", str(2**64 - 1), "step-8", str(2**64), "9"):
        core.set_weight_version(name)
        assert core.weight_version == name
        bus.core.step()
    EngineCore(SimpleNamespace()).set_weight_version("10")  # another scheduler's
    bus.core.step()
    batches = await items_of(bus, 7)
    assert [batch.header.weight_version for batch in batches] == [0, 7, 2**64 - 1, 0, 0, 9, 9]
    limit = f'field="weight_version" limit="a number up to {2**64 - 1}"'
    lines = [line for line in caplog.messages if line.startswith("weight version")]
    assert [limit in line for line in lines] == [True, True]
    assert "step-8" in lines[0]


async def test_admissions_have_the_version_of_their_weights(bus: Bus) -> None:
    core = EngineCore(bus.core)
    follow_weight_versions(EngineCore)
    for request_id, version in enumerate(("default", "7", "8"), 1):
        core.set_weight_version(version)
        bus.core.add(version, extra_args={ARGUMENT: request_id, SESSION: "run"})
        bus.core.prefill_stats = prefilled(48, 32)
        bus.core.step()
        bus.core.drop(version)
    admissions = [item.admitted for item in await items_of(bus, 12) if hasattr(item, "admitted")]
    versions = [(each.request_id, each.weight_version) for each in admissions if each.request_id]
    assert versions == [(1, 0), (1, 0), (2, 7), (2, 7), (3, 8), (3, 8)]


async def test_sampling_masks_are_published_if_vllm_returns_them(folder: Path) -> None:
    bus = Bus(folder, {"return_sampling_mask": True})
    bus.core.add("first", extra_args={ARGUMENT: 1})
    bus.core.add("second", extra_args={ARGUMENT: 2})
    bus.core.computed["sampling_masks"] = mask_lists([[3, 9], [1]])
    bus.core.step()
    bus.core.computed["sampling_masks"] = None
    bus.core.step()
    bus.core.computed["sampling_masks"] = mask_lists([])
    bus.core.step()
    masked, plain, *ended = await items_of(bus, 4)
    assert [[mask.tolist() for mask in row.extras.masks()] for row in masked.rows()] == [[[3, 9]], [[1]]]
    assert not plain.has_extras
    assert [each.error.message for each in ended] == ["vLLM gave 0 sampling masks, but token 1 wants one"] * 2
    bus.core.shutdown()


def test_masks_that_vllm_lacks_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(used: object) -> SimpleNamespace:
        if used is OF_MASKS:
            raise VersionError(
                "vLLM 0.40.0 is not as expected of 0.26 to 0.33: ModelRunnerOutput has no sampling_masks"
            )
        return VLLM

    monkeypatch.setattr(published, "load_vllm", load)
    with pytest.raises(SystemExit, match=r"^tokenbus: vLLM 0\.40\.0 .* has no sampling_masks$"):
        published.scheduler(vllm_config=configuration(return_sampling_mask=True))


async def test_prompt_scores_are_published(bus: Bus) -> None:
    """The most probable tokens are cut to `limits.max_top_k`; a prompt that is partly cached has no scores."""
    bus.core.add("every", prompt_logprobs=-1, skip_reading_prefix_cache=True, extra_args={ARGUMENT: 1})
    bus.core.add("own", prompt_logprobs=0, skip_reading_prefix_cache=True, extra_args={ARGUMENT: 2})
    bus.core.add("cached", prompt_logprobs=0, skip_reading_prefix_cache=False, extra_args={ARGUMENT: 3})
    bus.core.add("unasked", extra_args={ARGUMENT: 4})
    scores = {name: tensors(30, count) for count, name in enumerate(("every", "own", "cached"), 3)}
    bus.core.computed["prompt_logprobs_dict"] = {**scores, "unasked": None}
    bus.core.step()
    every, own, batch = await items_of(bus, 3)
    found = [PromptScores.of(item.prompt_scores) for item in (every, own)]
    assert [(each.request_id, each.position, each.prompt_tokens) for each in found] == [(1, 1, 4), (2, 1, 5)]
    for each, name in zip(found, ("every", "own"), strict=True):
        assert each.token_ids.tolist() == scores[name].logprob_token_ids[:, 0].tolist()
        assert each.logprobs.tolist() == scores[name].logprobs[:, 0].tolist()
        assert each.ranks.tolist() == scores[name].selected_token_ranks.tolist()
    most = bus.settings.limits.max_top_k
    assert found[0].alternative_logprobs.tolist() == scores["every"].logprobs[:, 1 : 1 + most].tolist()
    assert found[1].alternative_logprobs.size == 0
    assert batch.positions.tolist() == [0, 0, 0, 0]


async def test_scores_of_ids_by_position_are_logged(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """PromptScores cannot hold these scores. The scores of the prompt's own tokens are still published."""
    caplog.set_level(logging.WARNING)
    for request_id, name in enumerate(("first", "second"), 1):
        ids = {"prompt_logprob_token_ids": np.array([[5, 6], [7, -1]]), "skip_reading_prefix_cache": True}
        own = {"prompt_logprobs": 0} if name == "second" else {}
        bus.core.add(name, **ids, **own, extra_args={ARGUMENT: request_id})
        bus.core.more[name] = {"prompt_token_id_logprobs": np.zeros((2, 2), np.float32)}
    bus.core.computed["prompt_logprobs_dict"] = {"second": tensors(1, 2)}
    bus.core.step()
    scores, batch = await items_of(bus, 2)
    assert PromptScores.of(scores.prompt_scores).request_id == 2
    assert batch.request_ids.tolist() == [1, 2]
    lines = [line for line in caplog.messages if line.startswith("prompt scores not published")]
    assert len(lines) == 1
    assert 'field="prompt_logprob_token_ids" request_id="0000000000000001"' in lines[0]


def tensors(width: int, tokens: int) -> SimpleNamespace:
    """Return scores of a prompt, as vLLM's LogprobsTensors."""
    found = lists(width, tokens)
    return SimpleNamespace(
        logprob_token_ids=found.logprob_token_ids,
        logprobs=found.logprobs,
        selected_token_ranks=found.sampled_token_ranks,
    )


def test_vllm_without_weight_versions_stays_as_it_is() -> None:
    class Core:
        pass

    follow_weight_versions(Core)
    assert not hasattr(Core, "set_weight_version")


async def test_steps_overlap(bus: Bus) -> None:
    """Where a step begins before the one before it has ended, each request has its own tokens, and its one end."""
    bus.core.add("first", extra_args={ARGUMENT: 1})
    one = bus.core.launch()
    bus.core.add("second", extra_args={ARGUMENT: 2})
    two = bus.core.launch()
    first, _ = bus.core.finish(one)
    bus.core.drop("first")
    three = bus.core.launch()
    second, _ = bus.core.finish(two)
    third, _ = bus.core.finish(three)
    bus.core.drop("second")
    bus.core.step()
    async with Processor(bus.settings) as processor:
        rows = await soon(rows_until(processor.steps(), (2, RowStatus.ABORTED)))
    assert [(row.request_id, row.position, row.status, row.logprobs.tolist()) for row in rows] == [
        (1, 0, RowStatus.ACTIVE, first.logprobs[0, :1].tolist()),
        (1, 1, RowStatus.ABORTED, []),
        (2, 0, RowStatus.ACTIVE, second.logprobs[1, :1].tolist()),
        (2, 1, RowStatus.ACTIVE, third.logprobs[0, :1].tolist()),
        (2, 2, RowStatus.ABORTED, []),
    ]


async def test_chosen_ids_leave_no_alternatives(bus: Bus) -> None:
    bus.core.add("plain", extra_args={ARGUMENT: 1})
    bus.core.add("chosen", logprob_token_ids=[5, 6], extra_args={ARGUMENT: 2})
    scores, _ = bus.core.step(lists(2, 2))
    assert bus.core.given == [TOP_K, None]
    async with Processor(bus.settings) as processor:
        rows = await soon(rows_until(processor.steps(), (2, RowStatus.ACTIVE)))
    assert [row.logprobs.tolist() for row in rows] == scores.logprobs[:, :1].tolist()
    assert [row.alternative_token_ids.size for row in rows] == [0, 0]


async def test_arrays_that_do_not_fit_end_their_requests_alone(bus: Bus) -> None:
    bus.core.add("first", extra_args={ARGUMENT: 1})
    async with Processor(bus.settings) as processor:
        processor.steps()
        bus.core.step()
        await until(lambda: processor.registry.table.get(1))
        narrow = lists(TOP_K - 1, 1)
        _, outputs = bus.core.step(narrow)
        assert outputs[0].new_token_ids == narrow.logprob_token_ids[0, :1].tolist()
        await until(lambda: processor.registry.counts.failed == {"engine": 1})
        bus.core.step()
        bus.core.add("second", extra_args={ARGUMENT: 2})
        bus.core.step()
        await until(lambda: processor.registry.table.get(2))
        assert processor.intake.router.counts.late == 0


async def test_without_a_processor_vllm_goes_on(folder: Path) -> None:
    """What finds no room ends its requests on the bus; a processor that comes later has what was kept, and the rest."""
    bus = Bus(folder, worker__retention_items=4)
    bus.core.add("kept", extra_args={ARGUMENT: 1})
    for _ in range(20):
        assert len(bus.core.step()[1]) == 1
    bus.core.add("lost", extra_args={ARGUMENT: 2})
    assert len(bus.core.step()[1]) == 2
    async with Processor(bus.settings) as processor:
        seen: list[tuple[int, int]] = []
        steps = processor.steps()  # before anything can come

        async def read() -> None:
            async for step in steps:
                seen.extend((row.request_id, row.position) for row in step.rows.rows())

        reading = asyncio.create_task(read())
        await until(lambda: processor.registry.counts.failed == {"gap": 1})
        await until(lambda: seen == [(1, position) for position in range(3)])
        later = count(3)

        def is_shown() -> bool:
            bus.core.add(f"later-{next(later)}", extra_args={ARGUMENT: next(later)})
            bus.core.step()
            return seen[-1][0] > 2

        await until(is_shown)
    await reading
    bus.core.shutdown()


async def test_defect_of_ours_is_no_fault_of_vllms(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    bus.core.add("first", extra_args={ARGUMENT: 1})
    async with Processor(bus.settings) as processor:
        processor.steps()
        bus.core.step()
        await until(lambda: processor.registry.table.get(1))
        bus.core.add("second", extra_args=7)  # no mapping, as vLLM has it
        with caplog.at_level(logging.ERROR):
            assert len(bus.core.step()[1]) == 2
            assert len(bus.core.step()[1]) == 2
        assert caplog.text.count("publishing stopped") == 1
        await until(lambda: processor.registry.counts.failed == {"worker_lost": 1})


def test_vllm_that_cannot_be_used_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = import_module("tokenbus.engines.vllm").scheduler  # as vLLM does
    with pytest.raises(SystemExit, match=r"^tokenbus: vLLM is not installed: pip install 'vllm>="):
        found(vllm_config=configuration())
    monkeypatch.setattr(published, "load_vllm", lambda _: VLLM)
    monkeypatch.setenv("TOKENBUS_WORKER_TOP_LOGPROBS", "21")
    with pytest.raises(SystemExit, match=r"^tokenbus: worker\.top_logprobs: at most 20, as --max-logprobs, got 21$"):
        found(vllm_config=configuration())


async def test_page_has_a_reader(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("workers_address", "clients_address"):
        monkeypatch.setenv(f"TOKENBUS_BUS_{name.upper()}", getattr(bus.settings.bus, name))
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python", of="docs/vllm-scheduler.md")
    reading = asyncio.create_task(module_of(block, "reader").audit())
    bus.core.add("first", extra_args={ARGUMENT: 7})
    scores, (output,) = bus.core.step()
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return "0000000000000007 0 ACTIVE" in shown

    await until(is_shown)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert f"ACTIVE {np.array(output.new_token_ids)} {scores.logprobs[0, :1]}" in shown


def test_settings_suit_a_deployed_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOKENBUS_SETTINGS", "TOKENBUS_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    config = configuration()
    found = settings_for(config).worker
    assert (found.id, found.model, found.max_requests, found.policy, found.dp_rank) == ("vllm-0", "tiny", 0, "fail", 0)
    config.parallel_config.data_parallel_index = 2
    monkeypatch.setenv("TOKENBUS_WORKER_ID", "mine")
    monkeypatch.setenv("TOKENBUS_WORKER_MODEL", "qwen")
    found = settings_for(config).worker
    assert (found.id, found.model, found.dp_rank) == ("mine-2", "qwen", 2)


@pytest.mark.parametrize(
    ("variables", "model", "line"),
    [
        ({"worker.role": "prefill"}, {}, "worker.role: mixed for the engine vllm, got prefill"),
        ({"worker.top_logprobs": 21}, {"max_logprobs": 30}, "worker.top_logprobs: at most 20, as limits.max_top_k or "),
        ({"worker.top_logprobs": 9}, {"max_logprobs": 5}, "worker.top_logprobs: at most 5, as --max-logprobs, got 9"),
        ({}, {"is_diffusion": True}, "--scheduler-cls: tokenbus.engines.vllm.scheduler is not for diffusion models"),
        (
            {"worker.routed_experts_folder": "/spool"},
            {},
            "worker.routed_experts_folder: only with vLLM's --enable-return-routed-experts, got /spool",
        ),
    ],
)
def test_wrong_settings_are_one_line(
    variables: dict[str, object], model: dict[str, object], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"TOKENBUS_{name.replace('.', '_').upper()}", str(value))
    with pytest.raises(ValueError, match=line) as raised:
        settings_for(configuration(**model))
    assert "\n" not in str(raised.value)
