"""OpenCommands: operators' commands on their way to workers, and what became of them on the way back."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tokenbus.delivery.errors import brief
from tokenbus.logs import logger
from tokenbus.processor.client_frames import Frame
from tokenbus.processor.session import Session
from tokenbus.processor.workers import Worker, Workers
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame

_log = logger("processor")
_MOST_OPEN = 64
"""How many commands may wait for one worker's answers."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that is not answered yet."""

    session: Session
    worker: Worker | None
    control: Control


class OpenCommands:
    """The commands that workers have not answered.

    Each is sent again after a worker's handshake, as it may have been lost: the worker knows those that it had.
    """

    def __init__(self, workers: Workers, *, on_adapters: Callable[[], None]) -> None:
        self._workers = workers
        self._on_adapters = on_adapters
        self._open: dict[int, _Command] = {}
        self.answers: Counter[tuple[str, str]] = Counter()
        """How many answers were given, by the command and whether it was done, refused or lost."""

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, session: Session, control: Control) -> None:
        """Pass a command on to its worker, or say why not."""
        key, worker = control.control_key, self._workers.by_id.get(control.worker_id)
        known = self._open.get(key)
        if known is not None and known.session is session:
            return  # asked again, because the connection broke before the answer came
        waiting = sum(each.worker is worker for each in self._open.values())
        if known is not None:
            refusal = "control_key: one that is not in use, got another client's"
        elif worker is None:
            refusal = f"worker_id: a worker that is here, got {control.worker_id!r}"
        elif not worker.stream.hello.takes_control:
            refusal = f"worker {control.worker_id}: one whose engine takes commands, got one that takes none"
        elif waiting >= _MOST_OPEN:
            refusal = f"commands that worker {control.worker_id} has not answered: at most {_MOST_OPEN}, got one more"
        else:
            self._open[key] = _Command(session, worker, control)
            name = control.WhichOneof("command")
            _log.info("command", client=session.name, worker=control.worker_id, command=name)
            self._workers.send(worker, ProcessorFrame(control=control))
            return
        self._answer(_Command(session, None, control), _refused(key, refusal), "refused")

    def resend(self, worker: Worker) -> None:
        """Send a worker that has said hello again what it has not answered."""
        for each in self._open.values():
            if each.worker is worker:
                self._workers.send(worker, ProcessorFrame(control=each.control))

    def answered(self, worker: Worker, answer: ControlAnswer) -> None:
        """Pass a worker's answer on to who asked, if they are still here, and learn which adapters it has."""
        known_adapters = worker.stream.hello.lora_adapters
        if answer.HasField("state") and known_adapters != answer.state.lora_adapters:
            del known_adapters[:]
            known_adapters.extend(answer.state.lora_adapters)
            self._on_adapters()
        known = self._open.get(answer.control_key)
        if known is not None and known.worker is worker:
            del self._open[answer.control_key]
            self._answer(known, answer, "refused" if answer.error else "done")

    def lost(self, worker: Worker, why: str) -> None:
        """Answer for a worker that is gone."""
        for key, each in list(self._open.items()):
            if each.worker is worker:
                del self._open[key]
                reason = f"worker {worker.stream.worker_id} is gone, and may have done it or not: {why}"
                self._answer(each, _refused(key, reason), "lost")

    def forget(self, session: Session) -> None:
        """Answer a client that is gone no more."""
        for key in [key for key, each in self._open.items() if each.session is session]:
            del self._open[key]

    def _answer(self, asked: _Command, answer: ControlAnswer, outcome: str) -> None:
        self.answers[asked.control.WhichOneof("command") or "unknown", outcome] += 1
        asked.session.put(Frame(write_frame(ServerFrame(control_answer=answer))))


def _refused(key: int, reason: str) -> ControlAnswer:
    return ControlAnswer(control_key=key, error=brief(reason, ErrorCode.ERROR_CODE_INTERNAL))
