"""LastTurns: the finished turns that a session's next request may continue. TurnRecorder: records one turn."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from tokenbus.gateway.bridging import IDS, Turn, digest_with
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.tool_calls import call_writer
from tokenbus.gateway.vocabulary import Vocabulary

_TURN_BYTES = 512
"""Number of bytes of memory that a kept turn takes besides its ids."""
_ID_BYTES = array(IDS).itemsize


class LastTurns:
    """Turns by tenant, session and conversation digest. Above a bound, the least recently used turns are dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        """Number of bytes of kept turns, and of turns that are being recorded."""
        self.dropped = 0
        self._turns: OrderedDict[tuple[int, str, bytes], Turn] = OrderedDict()

    def find(self, tenant: int, session: str, digest: bytes) -> Turn | None:
        turn = self._turns.get((tenant, session, digest))
        if turn is not None:
            self._turns.move_to_end((tenant, session, digest))
        return turn

    def keep(self, tenant: int, session: str, digest: bytes, turn: Turn) -> None:
        """Keep a turn, whose bytes `hold` has already counted."""
        before = self._turns.pop((tenant, session, digest), None)
        self.size -= 0 if before is None else size_of(before)
        self._turns[tenant, session, digest] = turn

    def hold(self, count: int) -> bool:
        """Count bytes, and drop turns to make room. Return False if there is no room."""
        while self._turns and self.size + count > self.most:
            self.size -= size_of(self._turns.popitem(last=False)[1])
            self.dropped += 1
        if self.size + count > self.most:
            return False
        self.size += count
        return True


class TurnRecorder:
    """Records the output of a session's turn, and keeps the turn if the model's end token ended it."""

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
        """Keep the turn under the digest of the conversation including the answer."""
        if not self._is_open or ending.reason != "stop" or ending.stop is not None or not self._output:
            return
        request, pieces = self._request, self._pieces
        # Omit the last token, the model's end token, which answers do not show.
        text = b"".join(pieces[each] for each in self._output[:-1]).decode(errors="replace")
        calls = call_writer(request.forced, request.auto)
        message = {"role": "assistant", **({"content": text} if calls is None else calls.message(text))}
        turn = Turn(self._prompt, self._output.tobytes())
        self._turns.keep(self._tenant, request.session, digest_with(request.conversation, message), turn)
        self._held, self._is_open = 0, False

    def close(self) -> None:
        """Stop counting the bytes of a turn that was not kept."""
        self._turns.size -= self._held
        self._held, self._is_open = 0, False

    def _hold(self, count: int) -> bool:
        is_held = self._turns.hold(count)
        self._held += count if is_held else 0
        return is_held


def size_of(turn: Turn) -> int:
    return _TURN_BYTES + len(turn.prompt) + len(turn.output)
