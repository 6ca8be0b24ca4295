"""The messages of a log: each is a recording of a run of one life's items, under the subject of that life."""

from io import BytesIO

from tokenbus_contracts.generated.stream_pb2 import WorkerFrame
from tokenbus_services.durable_log.stream import LogStream
from tokenbus_services.recording import Entry, RecordingError, entries


def read_message(stream: LogStream, subject: str, data: bytes) -> tuple[WorkerFrame, list[Entry]]:
    """Return the hello of a message, and its gaps and items.

    Raises a RecordingError for a message that is damaged, or whose subject is not that of the life in its hello.
    """
    begin, *run = entries(BytesIO(data))
    own = stream.subject(begin.frame.hello.worker_id, begin.frame.epoch)
    if subject != own:
        raise RecordingError(0, f"a hello of the life that its subject names, {subject}, got that of {own}")
    return begin.frame, run


def last_sequence(stream: LogStream, subject: str, data: bytes) -> int:
    """Return the sequence of the last item that a message has or names as missing; raises a RecordingError."""
    hello, run = read_message(stream, subject, data)
    if not run:
        return hello.hello.next_sequence - 1
    last = run[-1].frame
    return last.gap.last_sequence if last.WhichOneof("body") == "gap" else last.item.sequence
