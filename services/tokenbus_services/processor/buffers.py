"""The requests whose rows wait in this process: for who iterates over one, or for who will ask for it."""

from collections.abc import Callable

from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import RequestError
from tokenbus_services.delivery import RequestTokens, Step
from tokenbus_services.processor.requests import Request, RequestTable, Slots
from tokenbus_services.processor.router import Rows


class Buffers:
    """Gives each row to its own request's RequestTokens."""

    def __init__(self, table: RequestTable, max_rows: int) -> None:
        """Let at most so many rows of one request wait."""
        self._table = table
        self._max_rows = max_rows
        self._over: set[RequestTokens] = set()
        self.on_taken: Callable[[], None] = _nothing

    @property
    def is_over_full(self) -> bool:
        """Whether some request's rows are more than may wait."""
        return bool(self._over)

    def open(self, request: Request, position: int = 0) -> RequestTokens:
        """Let a request's rows wait from now on, and return where."""
        tokens = RequestTokens(request.key, position)
        tokens.on_taken = self._taken
        self._table.contexts[request.slot] = tokens
        return tokens

    def tokens_of(self, request: Request) -> RequestTokens:
        """Return where a request's rows wait."""
        tokens = self._table.contexts[request.slot]
        if not isinstance(tokens, RequestTokens):
            raise TypeError(f"request {request.key:016x} has no buffer")
        return tokens

    def give(self, step: Step, slots: Slots, rows: Rows | None) -> None:
        """Take some rows of a step, or all."""
        contexts, most = self._table.contexts, self._max_rows
        places = range(slots.size) if rows is None else rows.tolist()
        step.hold.keep(len(places))
        for slot, row in zip(slots.tolist(), places, strict=True):
            if contexts[slot].put(step, row) > most:
                self._over.add(contexts[slot])

    def finish(self, request: Request, status: RowStatus) -> None:
        """Learn that a request has had its last row."""
        self.tokens_of(request).finish(status)

    def fail(self, request: Request, error: RequestError) -> None:
        """Learn that a request ended with an error."""
        self.tokens_of(request).fail(error)

    def over_full(self) -> list[int]:
        """Return the keys of the requests whose rows are more than may wait."""
        return [tokens.key for tokens in self._over]

    def forget(self, tokens: RequestTokens) -> None:
        """Let go of the rows that nobody will take."""
        self._over.discard(tokens)
        for step, _ in tokens.give_up():
            step.hold.release()

    def _taken(self, tokens: RequestTokens, _step: Step) -> None:
        if tokens in self._over and len(tokens) <= self._max_rows:
            self._over.discard(tokens)
            self.on_taken()


def _nothing() -> None:
    """Nobody waits for room."""
