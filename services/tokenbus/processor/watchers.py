"""Watchers: clients that observe worker streams, item by item."""

from collections.abc import Mapping
from zlib import crc32

from tokenbus.bus import Role
from tokenbus.processor.client_frames import Frame
from tokenbus.processor.session import Session
from tokenbus.processor.stream import ReceivedItem, Stream
from tokenbus.processor.workers import Worker
from tokenbus.recordings.items import public_hello
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.client_pb2 import ServerFrame, WatchedStream
from tokenbus_contracts.generated.request_pb2 import PromptScoresChunk, RequestEvent
from tokenbus_contracts.generated.stream_pb2 import Item

_WITH_PROMPTS = frozenset({"session_prompt", "prompt_scores"})
"""Names of the events that contain prompt ids or prompt scores."""


class Watchers:
    """Sessions that observe the stream of one worker or of all workers."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._watched: dict[Session, str] = {}
        self._shown: dict[Session, Stream] = {}
        """Last stream that was announced to each session, because an item's frame does not name its stream."""
        self.skipped_items = 0

    def __len__(self) -> int:
        return len(self._watched)

    def __contains__(self, session: Session) -> bool:
        return session in self._watched

    def add(self, session: Session, worker_id: str) -> None:
        """Show a session all further items of a worker, or of all workers if the worker id is empty."""
        if self._watched.get(session) == worker_id:
            return
        self._watched[session] = worker_id
        for worker in self._workers.values():
            if worker_id in ("", worker.stream.worker_id):
                self._announce(session, worker.stream)

    def remove(self, session: Session) -> None:
        self._watched.pop(session, None)
        self._shown.pop(session, None)

    def show_stream(self, worker: Worker) -> None:
        """Announce a stream to its watchers when it begins, and again when its worker reconnects."""
        for session in self._watching(worker):
            self._announce(session, worker.stream)

    def show_item(self, worker: Worker, entry: ReceivedItem) -> None:
        """Show an item to the watchers of its stream; a watcher whose window is full misses the item."""
        if not self._watched:
            return
        whole = _frame_of(entry, entry.payload)
        without_prompt = whole
        if isinstance(entry.contents, RequestEvent) and entry.contents.WhichOneof("event") in _WITH_PROMPTS:
            without_prompt = _frame_of(entry, _without_prompt(entry.contents))
        for session in self._watching(worker):
            if not session.send_queue.has_room_in_window:
                self.skipped_items += 1
                continue
            if self._shown.get(session) is not worker.stream:
                self._announce(session, worker.stream)
            session.put(whole if Role.PROMPTS in session.roles else without_prompt)

    def _watching(self, worker: Worker) -> list[Session]:
        return [session for session, watched in self._watched.items() if watched in ("", worker.stream.worker_id)]

    def _announce(self, session: Session, stream: Stream) -> None:
        watched = WatchedStream(epoch=stream.epoch, hello=public_hello(stream.hello))
        self._shown[session] = stream
        session.put(Frame(write_frame(ServerFrame(watched_stream=watched))))


def _frame_of(entry: ReceivedItem, payload: bytes) -> Frame:
    item = Item(
        sequence=entry.sequence,
        payload_kind=entry.kind,
        payload_bytes=len(payload),
        payload_crc32=crc32(payload),
    )
    return Frame(write_frame(ServerFrame(watched_item=item)), [payload])


def _without_prompt(event: RequestEvent) -> bytes:
    """Return an event without the prompt's token ids, or without the prompt's scores."""
    shown = RequestEvent()
    shown.CopyFrom(event)
    if shown.HasField("session_prompt"):
        shown.session_prompt.ClearField("token_ids")
    else:
        chunk = event.prompt_scores
        shown.prompt_scores.Clear()
        shown.prompt_scores.MergeFrom(
            PromptScoresChunk(request_id=chunk.request_id, position=chunk.position, prompt_tokens=chunk.prompt_tokens)
        )
    return write_frame(shown)
