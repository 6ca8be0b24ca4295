"""Operator: runs a command on all workers of a model, and names the workers that failed."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import Any

from tokenbus.client.client import Client
from tokenbus.client.ids import random_id
from tokenbus_contracts import ContractError
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, WorkerStatus
from tokenbus_contracts.generated.control_pb2 import (
    CollectiveRpc,
    Control,
    ControlAnswer,
    DescribeEngine,
    EngineState,
    LoadAdapter,
    LoadWeights,
    PauseEngine,
    PauseMode,
    ResetPrefixCache,
    ResumeEngine,
    SetWeightVersion,
    SleepEngine,
    TransferWeights,
    UnloadAdapter,
    WakeEngine,
)

States = dict[str, EngineState]
"""State of each worker's engine, by worker id."""
MODES = {"abort": PauseMode.PAUSE_MODE_ABORT, "wait": PauseMode.PAUSE_MODE_WAIT, "keep": PauseMode.PAUSE_MODE_KEEP}
_END_OF_VERSIONS = 2**63
_MOST_LEASE_SECONDS = 86_400
_MOST_NAME_BYTES = 128
STAGES = ("init", "start", "update", "finish", "shutdown")


class ControlError(Exception):
    """Some workers did not execute a command.

    Example:
        async with tokenbus.connect(address) as client:
            try:
                await tokenbus.Operator(client).update_weights("/models/step-8", 8)
            except tokenbus.ControlError as error:
                print(error.failed, {name: state.weight_version for name, state in error.states.items()})
    """

    def __init__(self, command: str, failed: Mapping[str, str], states: States) -> None:
        self.failed = dict(failed)
        """Reason of each worker's failure, by worker id."""
        self.states = states
        """States of the engines that answered, by worker id."""
        reasons = "; ".join(f"worker {name}: {reason}" for name, reason in self.failed.items())
        versions = ", ".join(f"{name} {state.weight_version}" for name, state in sorted(states.items()))
        super().__init__(f"{command}: {reasons}" + (f" (weights: {versions})" if versions else ""))


class Operator:
    """Sends a command to all workers of a model at once, and waits for all answers.

    The methods return the state of each worker's engine after the command. A `ControlError` names the workers that
    failed. If keys are used, the client's key needs the role `operator`.

    Example:
        async with tokenbus.connect(address) as client:
            operator = tokenbus.Operator(client, timeout_seconds=600)
            for worker_id, state in (await operator.describe()).items():
                print(worker_id, state.weight_version, state.is_paused)
    """

    def __init__(
        self, client: Client, model: str = "", *, timeout_seconds: float = 600.0, on_behalf_of: str = ""
    ) -> None:
        """Create an operator for a model's workers; `on_behalf_of` names the caller in the workers' logs."""
        self._client = client
        self._model = model
        self._seconds = timeout_seconds
        self._on_behalf_of = on_behalf_of.encode()[:_MOST_NAME_BYTES].decode(errors="ignore")

    async def workers(self) -> list[str]:
        """Return the sorted ids of the model's workers; raises ControlError if there is none."""
        return [worker.worker_id for worker in await self._workers("workers")]

    async def _workers(self, command: str) -> list[WorkerStatus]:
        status = await self._client.status(timeout_seconds=self._seconds)
        found = [each for each in status.workers if self._model in ("", each.model)]
        if not found:
            raise ControlError(command, {"*": f"none is connected{f' for {self._model}' if self._model else ''}"}, {})
        if away := [each.worker_id for each in found if not each.is_connected]:
            raise ControlError(command, dict.fromkeys(away, "is away now"), {})
        return sorted(found, key=lambda worker: worker.worker_id)

    async def describe(self) -> States:
        """Return the state of each engine."""
        return await self._tell("describe", DescribeEngine())

    async def pause(self, mode: str = "abort", *, lease_seconds: float = 0) -> States:
        """Pause each engine, after aborting its requests (`abort`), after finishing them (`wait`), or at once (`keep`).

        New requests wait until the engines are resumed. With a lease, the engines resume automatically after
        `lease_seconds`; another pause with a lease extends the lease without ending requests.
        """
        if not 0 <= lease_seconds <= _MOST_LEASE_SECONDS:
            raise ValueError(f"lease_seconds: 0 to {_MOST_LEASE_SECONDS}, got {lease_seconds}")
        return await self._tell("pause", PauseEngine(mode=_mode(mode), lease_ms=ceil(1000 * lease_seconds)))

    async def resume(self) -> States:
        """Resume each engine."""
        return await self._tell("resume", ResumeEngine())

    async def update_weights(self, folder: str, weight_version: int = 0) -> States:
        """Pause the engines, load the weights in a folder, and resume the engines that ran before.

        A `weight_version` of 0 means the next version. If a worker fails, the ControlError names it, and all engines
        stay paused, so that no engine computes tokens with weights that another engine lacks.
        """
        if weight_version >= _END_OF_VERSIONS:
            raise ValueError(f"weight_version: below {_END_OF_VERSIONS}, got {weight_version}")
        workers = await self._workers("update_weights")
        before = await self._tell("describe", DescribeEngine(), workers)
        target = weight_version or 1 + max(state.highest_weight_version for state in before.values())
        command = LoadWeights(folder=folder, weight_version=target)
        for worker in workers:  # validated first, because an invalid command must not pause any engine
            write_frame(ClientFrame(control=Control(control_key=1, worker_id=worker.worker_id, load_weights=command)))
        # Paused engines are not paused again, so that their leases stay as they are.
        running = [each for each in workers if not before[each.worker_id].is_paused]
        await self._tell("pause", PauseEngine(mode=_mode("keep")), running)
        states = await self._tell("load_weights", command, workers)
        ran = {
            name
            for name, state in before.items()
            if not state.is_sleeping and (state.weights_are_damaged or not state.is_paused)
        }
        return states | await self._tell("resume", ResumeEngine(), [each for each in workers if each.worker_id in ran])

    async def transfer_weights(
        self, stage: str, arguments: Mapping[str, Any] | Sequence[Any] = (), weight_version: int = 0
    ) -> States:
        """Run one stage (`init`, `start`, `update`, `finish`, `shutdown`) of the engines' own weight transfer.

        The arguments are a mapping for all engine processes, or a list with one entry per process, in the order of
        `workers`. A mapping's `rank_offset` is the first engine's; each further engine gets `rank_offset` plus the
        number of preceding processes.
        """
        if stage not in STAGES:
            raise ValueError(f"stage: one of {', '.join(STAGES)}, got {stage!r}")
        workers = await self._workers("transfer_weights")
        arguments_by_worker = _divided(arguments, await self._tell("describe", DescribeEngine(), workers))

        def command(worker_id: str) -> TransferWeights:
            own = arguments_by_worker.get(worker_id)
            return TransferWeights(
                stage=f"WEIGHT_TRANSFER_STAGE_{stage.upper()}",
                arguments=json.dumps(own) if own else "",
                weight_version=weight_version,
            )

        return await self._tell("transfer_weights", command, workers)

    async def set_weight_version(self, weight_version: int) -> States:
        """Set the version number of the weights in each engine."""
        return await self._tell("set_weight_version", SetWeightVersion(weight_version=weight_version))

    async def sleep(self, level: int = 1, mode: str = "abort") -> States:
        """Free the device memory of each engine."""
        return await self._tell("sleep", SleepEngine(level=level, mode=_mode(mode)))

    async def wake_up(self, tags: Sequence[str] = ()) -> States:
        """Restore each engine's memory, or only the parts in `tags`, and resume computing."""
        return await self._tell("wake", WakeEngine(tags=tags))

    async def reset_prefix_cache(self, *, also_running: bool = False) -> States:
        """Empty each engine's prefix cache; this fails while requests run, unless `also_running` is set."""
        return await self._tell("reset_prefix_cache", ResetPrefixCache(also_running=also_running))

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> States:
        """Load a LoRA adapter into each engine."""
        return await self._tell("load_adapter", LoadAdapter(name=name, folder=folder, replace=replace))

    async def unload_adapter(self, name: str) -> States:
        """Unload a LoRA adapter from each engine."""
        return await self._tell("unload_adapter", UnloadAdapter(name=name))

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float = 0,
    ) -> list[Any]:
        """Call a method of all engine processes, and return the results in the order of `workers`.

        After a method that changes weights, call `set_weight_version`. A timeout of 0 means no timeout.
        """
        command = CollectiveRpc(
            method=method,
            args=json.dumps(list(args)) if args else "",
            kwargs=json.dumps(dict(kwargs)) if kwargs else "",
            timeout_ms=ceil(1000 * timeout_seconds),
        )
        answers = await self._ask("collective_rpc", command)
        return [result for worker in sorted(answers) for result in json.loads(answers[worker].results)]

    async def _tell(self, name: str, command: Any, to: Sequence[WorkerStatus] | None = None) -> States:  # noqa: ANN401
        answers = await self._ask(name, command, to)
        return {worker: answer.state for worker, answer in answers.items() if answer.HasField("state")}

    async def _ask(self, name: str, command: Any, to: Sequence[WorkerStatus] | None = None) -> dict[str, ControlAnswer]:  # noqa: ANN401
        make: Callable[[str], Any] = command if callable(command) else lambda _: command
        workers = await self._workers(name) if to is None else to
        asked = []
        for each in workers:
            fields = {name: make(each.worker_id), "worker_id": each.worker_id, "client": self._on_behalf_of}
            control = Control(control_key=random_id(), **fields)
            asked.append(self._client.control(control, each.processor_id, timeout_seconds=self._seconds))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        done, states, failed = {}, {}, {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, TimeoutError):
                failed[worker.worker_id] = str(answer) or f"no answer within {self._seconds:g} s: it may still do it"
            elif isinstance(answer, ContractError):
                failed[worker.worker_id] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done[worker.worker_id] = answer
                if answer.HasField("state"):
                    states[worker.worker_id] = answer.state
                if answer.error:
                    failed[worker.worker_id] = answer.error
        if failed:
            raise ControlError(name, failed, states)
        return done


def _mode(mode: str) -> PauseMode:
    if mode not in MODES:
        raise ValueError(f"mode: one of {', '.join(MODES)}, got {mode!r}")
    return MODES[mode]


def _divided(arguments: Mapping[str, Any] | Sequence[Any], states: States) -> dict[str, Any]:
    """Return each worker's arguments; raises ValueError unless a list has one entry per engine process."""
    names = sorted(states)
    ends = list(accumulate(max(1, states[name].world_size) for name in names))
    begins = [0, *ends[:-1]]
    if not isinstance(arguments, Mapping):
        if arguments and len(arguments) != ends[-1]:
            limit = f"an object, or as many as the workers have processes, {ends[-1]}"
            raise ValueError(f"arguments: {limit}, got {len(arguments)}")
        return {name: list(arguments[begin:end]) for name, begin, end in zip(names, begins, ends, strict=True)}
    offset = arguments.get("rank_offset")
    if offset is None:
        return dict.fromkeys(names, arguments)
    if type(offset) is not int:
        raise ValueError(f"arguments.rank_offset: a whole number, got {offset!r}")
    return {name: {**arguments, "rank_offset": offset + begin} for name, begin in zip(names, begins, strict=True)}
