"""LastTurns: the finished turns that a session's next request may continue. TurnRecorder: collects one of them."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from tokenbus.gateway.bridging import IDS, Turn, digest_with
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.tool_calls import call_writer
from tokenbus.gateway.vocabulary import Vocabulary

_TURN_BYTES = 512
"""Memory of a kept turn besides its ids."""
_ID_BYTES = array(IDS).itemsize


class LastTurns:
    """Turns by tenant, session and digest of the conversation. Above a bound the least recently used are dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        """Bytes of kept turns, and of turns that are being recorded."""
        self.dropped = 0
        self._turns: OrderedDict[tuple[int, str, bytes], Turn] = OrderedDict()

    def find(self, tenant: int, session: str, digest: bytes) -> Turn | None:
        turn = self._turns.get((tenant, session, digest))
        if turn is not None:
            self._turns.move_to_end((tenant, session, digest))
        return turn

    def keep(self, tenant: int, session: str, digest: bytes, turn: Turn) -> None:
        """Keep a turn, whose bytes are already held."""
        before = self._turns.pop((tenant, session, digest), None)
        self.size -= 0 if before is None else size_of(before)
        self._turns[tenant, session, digest] = turn

    def hold(self, count: int) -> bool:
        """Count bytes, and drop turns to make room for them; return False if there is no room."""
        while self._turns and self.size + count > self.most:
            self.size -= size_of(self._turns.popitem(last=False)[1])
            self.dropped += 1
        if self.size + count > self.most:
            return False
        self.size += count
        return True


class TurnRecorder:
    """Collects the output of a session's turn. Keeps the turn if the model's end token has ended it."""

    def __init__(self, turns: LastTurns, tenant: int, request: CompletionRequest, vocabulary: Vocabulary) -> None:
        self._turns = turns
        self._tenant = tenant
        self._request = request
        self._pieces = vocabulary.special_pieces if request.stopping.shows_special else vocabulary.pieces
        self._prompt = array(IDS, request.prompts[0]).tobytes()
        self._output = array(IDS)
        self._held = 0
        self._is_open = self._hold(_TURN_BYTES + len(self._prompt))

    def add(self, ids: Iterable[int]) -> None:
        before = len(self._output)
        if self._is_open:
            self._output.extend(ids)
            self._is_open = self._hold(_ID_BYTES * (len(self._output) - before))

    def end(self, ending: Ending) -> None:
        """Keep the turn with the digest of the conversation that its answer is part of."""
        if not self._is_open or ending.reason != "stop" or ending.stop is not None or not self._output:
            return
        request, pieces = self._request, self._pieces
        # The last token is the model's end token, which an answer does not show.
        text = b"".join(pieces[each] for each in self._output[:-1]).decode(errors="replace")
        calls = call_writer(request.forced, request.auto)
        message = {"role": "assistant", **({"content": text} if calls is None else calls.message(text))}
        turn = Turn(self._prompt, self._output.tobytes())
        self._turns.keep(self._tenant, request.session, digest_with(request.conversation, message), turn)
        self._held, self._is_open = 0, False

    def close(self) -> None:
        """Free the bytes of a turn that was not kept."""
        self._turns.size -= self._held
        self._held, self._is_open = 0, False

    def _hold(self, count: int) -> bool:
        is_held = self._turns.hold(count)
        self._held += count if is_held else 0
        return is_held


def size_of(turn: Turn) -> int:
    return _TURN_BYTES + len(turn.prompt) + len(turn.output)
