"""Operators' commands, from who gives them to the engine and back: each done once, in order, whatever breaks."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tokenbus.testing
from tests.support.campaigns import many
from tests.support.disturbance import disturb
from tokenbus.client import ControlError, Operator
from tokenbus.client.tokens import Generation
from tokenbus.engines.synthetic import SyntheticEngine, true_tokens
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.control_pb2 import WeightTransferStage

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


@pytest.fixture
async def bus() -> AsyncIterator[tokenbus.testing.Bus]:
    async with tokenbus.testing.bus(SyntheticEngine, workers=2, step_seconds=0.02) as made:
        yield made


async def _all(generation: Generation) -> list[tokenbus.Token]:
    return [token async for token in generation]


async def _read(generation: Generation) -> list[int]:
    return [token.id for token in await _all(generation)]


async def test_engines_say_how_they_are(bus: tokenbus.testing.Bus) -> None:
    states = await bus.until(Operator(bus.client).describe())
    assert sorted(states) == ["worker-0", "worker-1"]
    assert all((each.weight_version, each.is_paused, each.world_size) == (0, False, 1) for each in states.values())


class Calling(SyntheticEngine):
    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[Any]:
        if method != "tell":
            raise AttributeError(f"no method {method}")
        return [[timeout, *args], kwargs]


async def test_processes_of_all_engines_are_called() -> None:
    async with tokenbus.testing.bus(Calling, workers=2) as bus:
        operator = Operator(bus.client)
        results = await bus.until(operator.collective_rpc("tell", [1, "a"], {"b": None}, timeout_seconds=1.5))
        assert results == [[1.5, 1, "a"], {"b": None}] * 2
        assert await bus.until(operator.collective_rpc("tell")) == [[None], {}] * 2
        with pytest.raises(ControlError, match="worker worker-1: AttributeError: no method other"):
            await bus.until(operator.collective_rpc("other"))
        with pytest.raises(ControlError, match=r"results of at most 8192 bytes as JSON, got 90.., though it was done"):
            await bus.until(operator.collective_rpc("tell", ["a" * 9000]))
        assert await bus.until(operator.collective_rpc("tell")) == [[None], {}] * 2


async def test_engine_without_such_calls_says_so(bus: tokenbus.testing.Bus) -> None:
    with pytest.raises(ControlError, match="worker-0: collective_rpc: none with this engine"):
        await bus.until(Operator(bus.client).collective_rpc("tell"))


async def test_paused_engine_computes_nothing(bus: tokenbus.testing.Bus) -> None:
    operator = Operator(bus.client)
    generation = bus.client.generate([1], max_tokens=600)
    first = await bus.until(anext(generation))
    states = await bus.until(operator.pause("keep"))
    assert all(each.is_paused for each in states.values())
    late = bus.client.generate([1], max_tokens=3)
    reading = asyncio.gather(_read(generation), _read(late))
    await bus.settle(50)
    assert not reading.done()
    await bus.until(operator.resume())
    rest, ids = await bus.until(reading)
    assert [first.id, *rest] == true_tokens(generation.request_id, 0, 600).ids.tolist()
    assert ids == true_tokens(late.request_id, 0, 3).ids.tolist()


async def paused(bus: tokenbus.testing.Bus) -> set[tuple[str, bool]]:
    await bus.advance(0.2)  # until a status is made anew
    status = await bus.until(bus.client.status())
    return {(each.paused_by, each.paused_since_unix_ms > 0) for each in status.workers}


async def test_pause_with_a_lease_ends_by_itself_unless_it_is_renewed(bus: tokenbus.testing.Bus) -> None:
    operator = Operator(bus.client, on_behalf_of="trainer")
    await bus.until(operator.pause(lease_seconds=3))
    waiting = asyncio.create_task(_read(bus.client.generate([1], max_tokens=3)))
    assert await paused(bus) == {("client: trainer", True)}
    await bus.advance(2)
    await bus.until(operator.pause(lease_seconds=3))
    await bus.advance(2)
    assert not waiting.done()
    await bus.advance(2)
    assert len(await bus.until(waiting)) == 3
    assert await paused(bus) == {("", False)}


async def test_lease_shortens_no_pause_of_another(bus: tokenbus.testing.Bus) -> None:
    """A processor that comes anew hears of it, too."""
    await bus.until(Operator(bus.client).pause())
    await bus.until(Operator(bus.client).pause(lease_seconds=1))
    await bus.advance(3)
    assert await paused(bus) == {("client", True)}
    await bus.restart_processor()
    await bus.advance(3)
    assert await paused(bus) == {("client", True)}
    await bus.until(Operator(bus.client).resume())
    assert await paused(bus) == {("", False)}


async def test_aborted_requests_end_with_what_they_have(bus: tokenbus.testing.Bus) -> None:
    generation = bus.client.generate([1], max_tokens=100_000)
    first = await bus.until(anext(generation))
    await bus.until(Operator(bus.client).pause("abort"))
    rest = await bus.until(_read(generation))
    assert generation.status is RowStatus.ABORTED
    assert [first.id, *rest] == true_tokens(generation.request_id, 0, 1 + len(rest)).ids.tolist()


async def waiting_pause(bus: tokenbus.testing.Bus, tokens: int) -> tuple[Operator, Generation, asyncio.Task[Any]]:
    """Return a pause that waits for a request of so many tokens, of which one has come."""
    operator = Operator(bus.client)
    generation = bus.client.generate([1], max_tokens=tokens)
    await bus.until(anext(generation))
    pausing = asyncio.create_task(operator.pause("wait"))
    await bus.settle(20)
    return operator, generation, pausing


async def test_waiting_pause_lets_requests_end_and_begins_none(bus: tokenbus.testing.Bus) -> None:
    operator, generation, pausing = await waiting_pause(bus, 300)
    late = asyncio.create_task(_read(bus.client.generate([1], max_tokens=3)))
    await bus.until(pausing)
    assert len(await bus.until(_read(generation))) == 299
    await bus.settle(50)
    assert not late.done()
    await bus.until(operator.resume())
    assert len(await bus.until(late)) == 3


@pytest.mark.parametrize("command", ["resume", "pause"])
async def test_pause_that_waits_can_be_overtaken(bus: tokenbus.testing.Bus, command: str) -> None:
    operator, generation, pausing = await waiting_pause(bus, 1_000_000)
    await bus.until(operator.resume() if command == "resume" else operator.pause("abort"))
    with pytest.raises(ControlError, match=f"worker worker-[01]: {command} came before the engine had halted"):
        await bus.until(pausing)
    await generation.aclose()


async def test_pause_that_waits_holds_up_no_question(bus: tokenbus.testing.Bus) -> None:
    """How an engine is can be asked all the while, and a resume goes before a question that came first."""
    operator, generation, pausing = await waiting_pause(bus, 1_000_000)
    assert sorted(await bus.until(operator.describe())) == ["worker-0", "worker-1"]
    assert not pausing.done()
    await bus.until(asyncio.gather(operator.describe(), operator.resume()))
    with pytest.raises(ControlError, match="resume came before the engine had halted"):
        await bus.until(pausing)
    await generation.aclose()


async def test_request_lives_through_an_update(bus: tokenbus.testing.Bus, weights: str) -> None:
    operator = Operator(bus.client)
    generation = bus.client.generate([1], max_tokens=600)
    tokens = [await bus.until(anext(generation))]
    states = await bus.until(operator.update_weights(weights))
    assert [(each.weight_version, each.is_paused) for each in states.values()] == [(1, False)] * 2
    await bus.until(operator.update_weights(weights, 70))
    tokens += await bus.until(_all(generation))
    versions = [token.weight_version for token in tokens]
    assert versions == sorted(versions)
    assert {0, 70} <= set(versions) <= {0, 1, 70}
    assert [span.weight_version for span in generation.weight_spans] == sorted(set(versions))
    for version, begin, end in generation.weight_spans:
        assert versions[begin:end] == [version] * (end - begin)
    for version in set(versions):
        begin, end = versions.index(version), versions.index(version) + versions.count(version)
        ids = [token.id for token in tokens[begin:end]]
        assert ids == true_tokens(generation.request_id, begin, end, version).ids.tolist()


async def test_version_that_is_too_large_is_refused_before_weights_are_loaded(
    bus: tokenbus.testing.Bus, weights: str
) -> None:
    """The versions after it stay free, and the engines as they are."""
    operator = Operator(bus.client)
    for asked in (
        operator.set_weight_version(2**63),
        operator.transfer_weights("start", weight_version=2**64 - 2),
        operator.update_weights(weights, 2**63),
    ):
        with pytest.raises((ControlError, ValueError), match=r"weight_version: below 9223372036854775808, got"):
            await bus.until(asked)
    states = await bus.until(operator.describe())
    assert {(each.weight_version, each.is_paused) for each in states.values()} == {(0, False)}
    await bus.until(operator.set_weight_version(2**63 - 1))
    for version in (2**63, 2**63 + 1):
        states = await bus.until(operator.update_weights(weights))
        assert {each.weight_version for each in states.values()} == {version}


async def test_update_that_fails_leaves_all_paused_and_names_who(bus: tokenbus.testing.Bus, tmp_path: Path) -> None:
    operator = Operator(bus.client)
    with pytest.raises(ControlError) as refused:
        await bus.until(operator.update_weights(str(tmp_path), 5))
    assert sorted(refused.value.failed) == ["worker-0", "worker-1"]
    assert "load_weights.folder: a folder with *.safetensors" in str(refused.value)
    assert all((each.weight_version, each.is_paused) == (0, True) for each in refused.value.states.values())
    await bus.until(operator.resume())
    assert len(await bus.until(_read(bus.client.generate([1], max_tokens=3)))) == 3


async def test_half_an_update_leaves_damaged_weights_that_are_not_used(bus: tokenbus.testing.Bus, weights: str) -> None:
    operator = Operator(bus.client)
    generation = bus.client.generate([1], max_tokens=60)
    await bus.until(operator.transfer_weights("start"))
    with pytest.raises(ControlError, match="RuntimeError: the transfer broke at WEIGHT_TRANSFER_STAGE_UPDATE"):
        await bus.until(operator.transfer_weights("update", {"fails": True}))
    states = await bus.until(operator.describe())
    assert all(
        (each.weights_are_damaged, each.is_paused, each.weight_version) == (True, True, 0) for each in states.values()
    )
    with pytest.raises(ControlError, match="but its last update failed half-way"):
        await bus.until(operator.resume())
    await bus.until(operator.update_weights(weights, 3))
    tokens = await bus.until(_all(generation))
    assert (len(tokens), tokens[-1].weight_version) == (60, 3)


async def test_update_that_is_given_up_leaves_damaged_weights(bus: tokenbus.testing.Bus, weights: str) -> None:
    """Whoever began it is gone: the transfer ends, and a folder's weights are taken as any others."""
    operator = Operator(bus.client)
    await bus.until(operator.transfer_weights("start"))
    states = await bus.until(operator.transfer_weights("shutdown"))
    assert all(each.weights_are_damaged for each in states.values())
    states = await bus.until(operator.update_weights(weights))
    assert not any(each.weights_are_damaged or each.is_paused for each in states.values())
    await bus.until(operator.transfer_weights("start"))
    states = await bus.until(operator.update_weights(weights))
    assert not any(each.weights_are_damaged for each in states.values())
    await bus.until(operator.resume())
    assert len(await bus.until(_read(bus.client.generate([1], max_tokens=3)))) == 3


class _SleepingEngine(SyntheticEngine):
    def sleep(self, level: int) -> None:
        """Free nothing."""

    def wake_up(self, tags: Sequence[str]) -> bool:
        return not tags

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        if stage == WeightTransferStage.WEIGHT_TRANSFER_STAGE_UPDATE:
            raise ValueError(f"arguments.names: those of the model, got {arguments}")


async def test_weights_that_are_gone_are_not_used(weights: str) -> None:
    """After a sleep that drops them, and after a refusal in the middle of a transfer."""
    async with tokenbus.testing.bus(_SleepingEngine) as bus:
        operator = Operator(bus.client)
        await bus.until(operator.sleep(1))
        states = await bus.until(operator.wake_up())
        assert not any(each.is_paused for each in states.values())
        await bus.until(operator.sleep(2))
        assert all(each.is_sleeping for each in (await bus.until(operator.wake_up(["weights"]))).values())
        await bus.until(operator.update_weights(weights, 4))
        states = await bus.until(operator.wake_up())
        assert [(each.weight_version, each.is_paused) for each in states.values()] == [(4, False)]
        await bus.until(operator.sleep(2))
        states = await bus.until(operator.wake_up())
        assert all(each.is_paused and each.weights_are_damaged for each in states.values())
        states = await bus.until(operator.update_weights(weights, 5))
        assert [(each.weight_version, each.is_paused) for each in states.values()] == [(5, False)]
        await bus.until(operator.transfer_weights("start"))
        with pytest.raises(ControlError, match=r"arguments.names: those of the model"):
            await bus.until(operator.transfer_weights("update", {}))
        states = await bus.until(operator.describe())
        assert all(each.weights_are_damaged for each in states.values())


class _CountingEngine(SyntheticEngine):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:
        super().load_adapter(name, folder, replace=replace)
        self.told.append(name)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(many(150, 4)))
async def test_each_command_is_done_once_and_answered(seed: int, tmp_path: Path) -> None:
    """Processors are restarted, connections cut, and messages lost and repeated while commands are on their way."""
    random = Random(seed)  # noqa: S311 - the same each time, and no secret
    engines = [_CountingEngine(), _CountingEngine()]
    made = iter(engines)
    async with tokenbus.testing.bus(lambda: next(made), workers=2, step_seconds=0.01) as bus:
        operator, line, asked = Operator(bus.client), bus.line(bus.client), []
        generation = bus.client.generate([1], max_tokens=400)
        reading = asyncio.create_task(_read(generation))
        for number in range(6):
            asked.append(asyncio.create_task(operator.load_adapter(f"adapter-{number}", str(tmp_path))))
            await bus.settle(random.randrange(12))
            await disturb(bus, line, random, turns=20)
        outcomes = await bus.until(asyncio.gather(*asked, return_exceptions=True))
        names = []
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, dict):
                names.append(f"adapter-{number}")
                assert all(f"adapter-{number}" in state.lora_adapters for state in outcome.values())
            else:  # it was asked for while no worker had come back yet
                assert isinstance(outcome, ControlError)
        for engine in engines:
            assert set(names) <= set(engine.told)
            assert len(engine.told) == len(set(engine.told))
        assert await bus.until(reading) == true_tokens(generation.request_id, 0, 400).ids.tolist()


class _TransferringEngine(SyntheticEngine):
    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2
        self.got: list[Any] = []

    def transfer_weights(self, stage: WeightTransferStage, arguments: Mapping[str, Any] | Sequence[Any]) -> None:
        super().transfer_weights(stage, arguments)
        self.got.append(arguments)


async def test_each_process_gets_its_own_of_a_transfer() -> None:
    engines = [_TransferringEngine(), _TransferringEngine()]
    made = iter(engines)
    async with tokenbus.testing.bus(lambda: next(made), workers=2) as bus:
        operator = Operator(bus.client)
        await bus.until(operator.transfer_weights("init", {"rank_offset": 1, "port": 7}))
        await bus.until(operator.transfer_weights("start"))
        await bus.until(operator.transfer_weights("update", ["a", "b", "c", "d"]))
        await bus.until(operator.transfer_weights("update", {"names": []}))
        states = await bus.until(operator.transfer_weights("finish", weight_version=4))
        assert [each.weight_version for each in states.values()] == [4, 4]
        with pytest.raises(
            ValueError, match="arguments: an object, or as many as the workers have processes, 4, got 3"
        ):
            await bus.until(operator.transfer_weights("update", ["a", "b", "c"]))
        with pytest.raises(ValueError, match="stage: one of init, start, update, finish, shutdown, got 'go'"):
            await bus.until(operator.transfer_weights("go"))
        with pytest.raises(ControlError, match="START must come before UPDATE and FINISH, but it did not"):
            await bus.until(operator.transfer_weights("update", {}))
    first, second = (engine.got for engine in engines)
    assert first == [{"rank_offset": 1, "port": 7}, {}, ["a", "b"], {"names": []}, {}]
    assert second == [{"rank_offset": 3, "port": 7}, {}, ["c", "d"], {"names": []}, {}]
