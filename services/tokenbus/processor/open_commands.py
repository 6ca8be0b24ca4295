"""OpenCommands: the commands of operators to workers, and the answers to these commands."""

from collections import Counter
from collections.abc import Callable

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
"""Maximum number of unanswered commands of one worker."""
_MOST_CLIENT_BYTES = 256


class OpenCommands:
    """The unanswered commands, which are resent after a handshake and executed only once by each worker."""

    def __init__(self, workers: Workers, *, on_adapters: Callable[[], None]) -> None:
        self._workers = workers
        self._on_adapters = on_adapters
        self._open: dict[int, tuple[Session, Worker, Control]] = {}
        self.answers: Counter[tuple[str, str]] = Counter()
        """Number of answers by command and outcome; an outcome is `done`, `refused` or `lost`."""

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, session: Session, control: Control) -> None:
        key, worker = control.control_key, self._workers.by_id.get(control.worker_id)
        known = self._open.get(key)
        if known is not None and known[0] is session:
            return  # the operator repeats the command, because the connection broke before the answer arrived
        waiting = sum(each is worker for _, each, _ in self._open.values())
        if known is not None:
            refusal = "control_key: one that is not in use, got another client's"
        elif worker is None:
            refusal = f"worker_id: a worker of this processor, got {control.worker_id!r}"
        elif not worker.stream.hello.takes_control:
            refusal = f"worker {control.worker_id}: its engine must take commands, but it takes none"
        elif waiting >= _MOST_OPEN:
            refusal = f"commands that worker {control.worker_id} has not answered: at most {_MOST_OPEN}, got one more"
        else:
            self._open[key] = session, worker, control
            name = control.WhichOneof("command")
            asking = f"{session.name}: {control.client}" if control.client else session.name
            control.client = asking.encode()[:_MOST_CLIENT_BYTES].decode(errors="ignore")
            _log.info("command", client=control.client, worker=control.worker_id, command=name)
            self._workers.send(worker, ProcessorFrame(control=control))
            return
        self.refuse(session, control, refusal)

    def refuse(self, session: Session, control: Control, reason: str) -> None:
        self._answer(session, control, _refused(control.control_key, reason), "refused")

    def resend(self, worker: Worker) -> None:
        for _, asked, control in self._open.values():
            if asked is worker:
                self._workers.send(worker, ProcessorFrame(control=control))

    def answered(self, worker: Worker, answer: ControlAnswer) -> None:
        """Forward a worker's answer to the operator, and record the state of the worker's engine."""
        if answer.HasField("state"):
            known_adapters = worker.stream.hello.lora_adapters
            if known_adapters != answer.state.lora_adapters:
                known_adapters[:] = answer.state.lora_adapters
                self._on_adapters()
            worker.stream.hello.paused_since_unix_ms = answer.state.paused_since_unix_ms
            worker.stream.hello.paused_by = answer.state.paused_by
            worker.stream.hello.weight_version = answer.state.weight_version
        known = self._open.get(answer.control_key)
        if known is not None and known[1] is worker:
            session, _, control = self._open.pop(answer.control_key)
            self._answer(session, control, answer, "refused" if answer.error else "done")

    def lost(self, worker: Worker, why: str) -> None:
        for key, (session, asked, control) in list(self._open.items()):
            if asked is worker:
                del self._open[key]
                reason = f"worker {worker.stream.worker_id} is gone, and may or may not have executed it: {why}"
                self._answer(session, control, _refused(key, reason), "lost")

    def forget(self, session: Session) -> None:
        self._open = {key: each for key, each in self._open.items() if each[0] is not session}

    def _answer(self, session: Session, control: Control, answer: ControlAnswer, outcome: str) -> None:
        self.answers[control.WhichOneof("command") or "unknown", outcome] += 1
        session.put(Frame(write_frame(ServerFrame(control_answer=answer))))


def _refused(key: int, reason: str) -> ControlAnswer:
    return ControlAnswer(control_key=key, error=brief(reason, ErrorCode.ERROR_CODE_INTERNAL))
