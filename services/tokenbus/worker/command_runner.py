"""CommandRunner: runs operators' commands on an engine, between its steps."""

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, cast

from tokenbus.delivery.errors import brief
from tokenbus.logs import logger
from tokenbus.worker.engine import Engine, EngineBrokenError, FullEngine
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer, EngineState, PauseMode, WeightTransferStage
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestEvent
from tokenbus_contracts.schema import bounds_in

_log = logger("worker")
_MAX_KNOWN = 256  # number of remembered answers, because a client repeats a command until it gets the answer
_MAX_WAITING = 64
_END_OF_VERSIONS = 2**63
"""Operators may choose only versions below this number. Updates without a chosen version may exceed it."""
_MAX_ADAPTERS = 200  # maximum number of adapters, whose names must fit into an answer and into a hello
_MAX_RESULT_BYTES = bounds_in(ControlAnswer.DESCRIPTOR.fields_by_name["results"].GetOptions()).max_bytes
_DROPS_WEIGHTS = 2  # the level of sleep that drops the weights
_NEEDS_HALT = frozenset({"pause", "load_weights", "transfer_weights", "sleep"})
_CHANGES = (WeightTransferStage.WEIGHT_TRANSFER_STAGE_UPDATE, WeightTransferStage.WEIGHT_TRANSFER_STAGE_FINISH)


class CommandRunner:
    """Runs operators' commands one after another, on the engine's thread.

    The engine is paused while a command changes the weights. If the change fails half-way, the engine stays paused with
    damaged weights until other weights are loaded.
    """

    def __init__(
        self,
        engine: Engine,
        end_all: Callable[[], None],
        publish: Callable[[RequestEvent], None],
        unix_ms: Callable[[], int],
    ) -> None:
        self._engine = cast("FullEngine", engine)  # the engine may lack any of the optional methods
        self._end_all = end_all
        self._publish = publish
        self._known: OrderedDict[int, ControlAnswer | None] = OrderedDict()
        """Answers of the latest commands by key, or None for a command that is not answered yet."""
        self._waiting: deque[Control] = deque()
        self._begun: Control | None = None  # the command that runs once the engine has no work left
        self._is_paused = False  # whether the engine is paused, or will be when its work is done
        self._operator_paused = False
        self._paused_by, self._paused_since = "", 0
        """Client that last paused the engine, and the time of the pause in milliseconds since 1970-01-01 UTC."""
        self._lease_ends, self._lease_key = inf, 0
        """Time at which the lease of an operator's pause ends, and the key of the pause command."""
        self._unix_ms = unix_ms
        self._is_sleeping = self._has_freed = False
        """Whether the engine sleeps, and whether its sleep has freed memory, which a sleep of level 0 does not."""
        self._is_updating = self._is_damaged = self._has_updated = False
        self._highest_version = self.weight_version
        self._results = ""  # the results of the running command, as JSON

    @property
    def weight_version(self) -> int:
        """Version of the engine's weights, or 0 if unknown."""
        return int(getattr(self._engine, "weight_version", 0))

    @property
    def is_waiting(self) -> bool:
        return self._begun is not None

    def take(self, controls: Iterable[Control]) -> None:
        """Queue new commands, and publish the answers of repeated commands again."""
        for control in controls:
            if control.control_key in self._known:
                if (answer := self._known[control.control_key]) is not None:
                    self._answer(answer)
                continue
            self._known[control.control_key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            if len(self._waiting) >= _MAX_WAITING:
                self._refuse(control, f"at most {_MAX_WAITING} waiting commands, got one more")
            else:
                self._waiting.append(control)

    def turn(self) -> None:
        """Run the commands that the engine is ready for. Raises EngineBrokenError if the engine breaks."""
        if self._operator_paused and self._unix_ms() >= self._lease_ends:
            self._end_lease()
        while True:
            for describe in [each for each in self._waiting if _name(each) == "describe"]:
                self._waiting.remove(describe)
                self._begin(describe)
            overtaking = next((each for each in self._waiting if _name(each) in {"pause", "resume"}), None)
            if self._begun is not None and _pauses(self._begun) and overtaking is not None and self._engine.has_work:
                self._refuse(self._begun, f"{_name(overtaking)} came before the engine had halted")
                self._begun = None
            if self._begun is not None and not self._engine.has_work:
                begun, self._begun = self._begun, None
                self._do_without_work(begun)
            if self._begun is not None or not self._waiting:
                return
            self._begin(self._waiting.popleft())

    def refuse_all(self, reason: str) -> None:
        if self._begun is not None:
            self._waiting.appendleft(self._begun)
            self._begun = None
        while self._waiting:
            self._refuse(self._waiting.popleft(), reason)

    def _begin(self, control: Control) -> None:
        name = _name(control)
        if not name:
            self._refuse(control, "command: a kind that this worker knows, got another")
            return
        if name not in _NEEDS_HALT:
            self._finish(control, _raised_by(getattr(self, f"_{name}"), control))
        elif error := _raised_by(self._pause_for, control):
            self._refuse(control, error)
        else:
            self._begun = control

    def _pause_for(self, control: Control) -> None:
        """Check that a command can run, and begin to halt the engine for the command."""
        name = _name(control)
        pause = self._method("pause", name)
        if name in ("load_weights", "transfer_weights"):
            self._next_version(getattr(control, name).weight_version)
        if name != "pause" and not (name == "sleep" and not control.sleep.level):
            self._method(name)
        if name == "sleep" and self._is_sleeping:
            raise ValueError("sleep: the engine must be awake, but it is asleep")
        mode = getattr(control, name).mode if _pauses(control) else PauseMode.PAUSE_MODE_KEEP
        is_renewal = self._operator_paused and bool(control.pause.lease_ms)
        pause(running=mode == PauseMode.PAUSE_MODE_KEEP)
        if not self._is_paused:
            self._paused_by, self._paused_since = control.client, self._unix_ms()
        self._is_paused = True
        if mode == PauseMode.PAUSE_MODE_ABORT and not is_renewal:
            self._end_all()

    def _method(self, name: str, asked: str = "") -> Callable[..., Any]:
        method = getattr(self._engine, name, None)
        if method is None:
            raise ValueError(f"{asked or name}: none with this engine")
        found: Callable[..., Any] = method
        return found

    def _do_without_work(self, control: Control) -> None:
        # An operator's pause may apply only to new requests, but this command needs a pause of all requests.
        error = _raised_by(self._method("pause"), running=True)
        error = error or _raised_by(getattr(self, f"_{_name(control)}"), control)
        not_resumed = _raised_by(self._resume_engine)
        self._finish(control, error or not_resumed)

    def _resume_engine(self) -> None:
        if self._is_paused and not (
            self._operator_paused or self._is_sleeping or self._is_updating or self._is_damaged
        ):
            self._method("resume")()
            self._is_paused = False

    def _describe(self, _: Control) -> None:
        """Do nothing, because every answer contains the engine's state anyway."""

    def _pause(self, control: Control) -> None:
        lease, now = control.pause.lease_ms, self._unix_ms()
        ends = now + lease if lease else inf
        self._lease_ends = max(self._lease_ends, ends) if self._operator_paused else ends
        self._lease_key = control.control_key
        self._operator_paused = True

    def _end_lease(self) -> None:
        self._operator_paused, self._lease_ends = False, inf
        error = _raised_by(self._resume_engine)
        _log.warning("pause ended: its lease was not renewed", client=self._paused_by, error=error)
        self._answer(ControlAnswer(control_key=self._lease_key, state=self.state))

    def _resume(self, _: Control) -> None:
        if self._is_damaged:
            raise ValueError("resume: the engine's weights must be known, but its last update failed half-way")
        if self._is_updating:
            raise ValueError("resume: the engine's update must be finished, but it still receives weights")
        if self._is_sleeping:
            raise ValueError("resume: the engine must be awake, but it is asleep")
        self._operator_paused = False
        self._resume_engine()

    def _load_weights(self, control: Control) -> None:
        command = control.load_weights
        load = self._method("load_weights")
        self._changing(lambda: load(Path(command.folder)), is_damage=True, harmless=ValueError)
        self._is_damaged = self._is_updating = False
        self._set_version(command.weight_version)

    def _transfer_weights(self, control: Control) -> None:
        command, stages = control.transfer_weights, WeightTransferStage
        text = command.arguments or "{}"
        arguments = _parsed("transfer_weights.arguments", text, dict | list, "an object or a list")
        is_change = command.stage in _CHANGES
        if is_change and not self._is_updating:
            raise ValueError("transfer_weights.stage: START must come before UPDATE and FINISH, but it did not")
        transfer = self._method("transfer_weights")
        self._changing(lambda: transfer(command.stage, arguments), is_damage=is_change)
        if command.stage == stages.WEIGHT_TRANSFER_STAGE_START:
            self._is_updating, self._has_updated = True, False
        elif command.stage == stages.WEIGHT_TRANSFER_STAGE_UPDATE:
            self._has_updated = True
        elif command.stage == stages.WEIGHT_TRANSFER_STAGE_FINISH:
            self._is_updating = False
            self._is_damaged &= not self._has_updated
            self._set_version(command.weight_version)
        elif command.stage == stages.WEIGHT_TRANSFER_STAGE_SHUTDOWN and self._is_updating:
            self._damage()

    def _changing(
        self, change: Callable[[], object], *, is_damage: bool, harmless: type[Exception] = EngineBrokenError
    ) -> None:
        """Change the weights. If `is_damage`, an exception damages the weights, unless its type is `harmless`."""
        try:
            change()
        except (EngineBrokenError, harmless):
            raise
        except Exception:
            if is_damage:
                self._damage()
            raise

    def _damage(self) -> None:
        self._is_damaged, self._is_updating = True, False
        self._engine.weight_version = 0

    def _set_weight_version(self, control: Control) -> None:
        self._set_version(control.set_weight_version.weight_version)

    def _next_version(self, version: int) -> int:
        """Return the version of the weights after an update, or raise ValueError if the version is too large."""
        found = version or self._highest_version + 1
        if found >= _END_OF_VERSIONS and found > self._highest_version + 1:
            raise ValueError(f"weight_version: below {_END_OF_VERSIONS}, got {found}")
        return found

    def _set_version(self, version: int) -> None:
        if not hasattr(self._engine, "weight_version"):
            raise ValueError("weight_version: none with this engine")
        self._engine.weight_version = self._next_version(version)
        self._highest_version = max(self._highest_version, self.weight_version)
        _log.info("weights changed", weight_version=self.weight_version)

    def _sleep(self, control: Control) -> None:
        if control.sleep.level:
            self._method("sleep")(control.sleep.level)
            self._has_freed = True
        if control.sleep.level >= _DROPS_WEIGHTS:
            self._damage()
        self._is_sleeping = True

    def _wake(self, control: Control) -> None:
        if not self._is_sleeping:
            return
        if self._has_freed and not self._method("wake_up", "wake")(list(control.wake.tags)):
            return  # some parts of the engine still sleep
        self._is_sleeping = self._has_freed = self._operator_paused = False
        self._resume_engine()

    def _reset_prefix_cache(self, control: Control) -> None:
        reset = self._method("reset_prefix_cache")
        reset(also_running=control.reset_prefix_cache.also_running)

    def _collective_rpc(self, control: Control) -> None:
        command = control.collective_rpc
        args = _parsed("collective_rpc.args", command.args or "[]", list, "a list")
        kwargs = _parsed("collective_rpc.kwargs", command.kwargs or "{}", dict, "an object")
        call = self._method("collective_rpc")
        results = json.dumps(call(command.method, command.timeout_ms / 1000 or None, args, kwargs))
        if len(results) > _MAX_RESULT_BYTES:
            limit = f"results of at most {_MAX_RESULT_BYTES} bytes as JSON"
            raise ValueError(f"collective_rpc: {limit}, got {len(results)}, though it was done")
        self._results = results

    def _load_adapter(self, control: Control) -> None:
        command = control.load_adapter
        names = getattr(self._engine, "lora_adapters", ())
        if len(names) >= _MAX_ADAPTERS and command.name not in names:
            raise ValueError(f"load_adapter.name: one of at most {_MAX_ADAPTERS} adapters, got one more")
        self._method("load_adapter")(command.name, Path(command.folder), replace=command.replace)

    def _unload_adapter(self, control: Control) -> None:
        self._method("unload_adapter")(control.unload_adapter.name)

    @property
    def state(self) -> EngineState:
        return EngineState(
            weight_version=self.weight_version,
            is_paused=self._is_paused,
            paused_since_unix_ms=self._paused_since if self._is_paused else 0,
            paused_by=self._paused_by if self._is_paused else "",
            is_sleeping=self._is_sleeping,
            weights_are_damaged=self._is_damaged,
            highest_weight_version=self._highest_version,
            world_size=getattr(self._engine, "world_size", 0),
            lora_adapters=getattr(self._engine, "lora_adapters", ()),
            **getattr(self._engine, "facts", {}),
        )

    def _finish(self, control: Control, error: Exception | None) -> None:
        results, self._results = self._results, ""
        if error is not None:
            self._refuse(control, error)
        else:
            self._remember(ControlAnswer(control_key=control.control_key, state=self.state, results=results))

    def _refuse(self, control: Control, error: object) -> None:
        reason = str(error) if isinstance(error, ValueError | str) else f"{type(error).__name__}: {error}"
        _log.warning("command refused", command=_name(control), reason=reason)
        error = brief(" ".join(reason.split()), ErrorCode.ERROR_CODE_INTERNAL)
        self._remember(ControlAnswer(control_key=control.control_key, error=error, state=self.state))

    def _remember(self, answer: ControlAnswer) -> None:
        if answer.control_key in self._known:
            self._known[answer.control_key] = answer
        self._answer(answer)

    def _answer(self, answer: ControlAnswer) -> None:
        self._publish(RequestEvent(control_answer=answer))


def _raised_by(call: Callable[..., object], *arguments: object, **named: object) -> Exception | None:
    """Return the exception that a call raises, or None. An EngineBrokenError is raised, not returned."""
    try:
        call(*arguments, **named)
    except EngineBrokenError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the engine raised
        return error
    return None


def _parsed(name: str, text: str, kind: type | UnionType, meaning: str) -> Any:  # noqa: ANN401 - JSON
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: JSON, got an error: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name}: {meaning}, got {text[:64]}")  # noqa: TRY004
    return value


def _name(control: Control) -> str:
    return control.WhichOneof("command") or ""


def _pauses(control: Control) -> bool:
    return _name(control) in ("pause", "sleep")
