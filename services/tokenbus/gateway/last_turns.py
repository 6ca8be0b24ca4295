"""LastTurns: the finished turns that a session's next request may continue. TurnRecorder: records one turn."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from tokenbus.gateway.bridging import ID_BYTES, IDS, Turn, digest_with
from tokenbus.gateway.completion_request import CompletionRequest, Ending
from tokenbus.gateway.tool_calls import call_writer
from tokenbus.gateway.vocabulary import Vocabulary

_TURN_BYTES = 512
"""Number of bytes of memory that a kept turn takes besides its ids."""


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
        self._place = tenant, request.session
        self._conversation = request.conversation
        self._calls = call_writer(request.forced, request.auto)
        self._pieces = vocabulary.special_pieces if request.stopping.shows_special else vocabulary.pieces
        self._prompt = array(IDS, request.prompts[0])
        self._output = array(IDS)
        self._held = 0
        self._is_open = True
        self._hold(_TURN_BYTES + ID_BYTES * len(self._prompt))

    def add(self, ids: Iterable[int]) -> None:
        if self._is_open:
            before = len(self._output)
            self._output.extend(ids)
            self._hold(ID_BYTES * (len(self._output) - before))

    def end(self, ending: Ending) -> None:
        """Keep the turn under the digest of the conversation, which includes the new answer."""
        if not self._is_open or ending.reason != "stop" or ending.stop is not None or not self._output:
            return
        # Omit the last token, the model's end token, which answers do not show.
        text = b"".join(self._pieces[each] for each in self._output[:-1]).decode(errors="replace")
        shown = {"content": text} if self._calls is None else self._calls.message(text)
        digest = digest_with(self._conversation, {"role": "assistant", **shown})
        self._turns.keep(*self._place, digest, Turn(self._prompt.tobytes(), self._output.tobytes()))
        self._held = 0
        self.close()

    def close(self) -> None:
        """Stop recording, and stop counting the bytes of a turn that was not kept."""
        self._turns.size -= self._held
        self._held, self._is_open = 0, False
        self._prompt = self._output = array(IDS)

    def _hold(self, count: int) -> None:
        if self._turns.hold(count):
            self._held += count
        else:
            self.close()


def size_of(turn: Turn) -> int:
    return _TURN_BYTES + len(turn.prompt) + len(turn.output)
