"""The sessions that a campaign asked for, compared with the sessions that are assembled from a recording of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenbus.engines.synthetic import true_tokens
from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import Branch, Session, SessionRequest, sessions_of


@dataclass(slots=True)
class AskedRequest:
    """A request of a session, and what its client received."""

    request_id: int
    label: str
    prompt: Sequence[int]
    written: Sequence[bool]
    """Whether the model wrote each token of the prompt."""
    is_scored: bool
    parent: int = 0
    output_tokens: int = 0
    is_finished: bool = False

    @property
    def output(self) -> list[int]:
        return [int(token) for token in true_tokens(self.request_id, 0, self.output_tokens).ids]


@dataclass(slots=True)
class SessionFigures:
    """What is assembled from one recording."""

    sessions: int = 0
    complete: int = 0
    requests: int = 0
    tokens: int = 0
    gaps: int = 0
    """Gaps in the recording."""
    named: Counter[str] = field(default_factory=Counter)
    """What is missing, without the numbers in it."""
    wrong: list[str] = field(default_factory=list)
    """Requests that differ from the truth."""
    silent: list[str] = field(default_factory=list)
    """Finished requests that are not in their session, and nothing says so."""

    def __str__(self) -> str:
        return (
            f"{self.sessions} sessions, {self.complete} complete, {self.requests} requests, {self.tokens} tokens, "
            f"{self.gaps} gaps, missing: {dict(self.named)}; {len(self.wrong)} wrong, {len(self.silent)} silent"
        )


class AskedSessions:
    """All requests of a campaign's sessions, by id, in the order in which they were asked."""

    def __init__(self) -> None:
        self._requests: dict[int, AskedRequest] = {}

    def add(self, request: AskedRequest) -> None:
        self._requests[request.request_id] = request

    def compared(self, items: Iterable[StreamItem]) -> SessionFigures:
        """Assemble the sessions of a recording, and compare them with all requests."""
        figures, found = SessionFigures(), dict[str, Session]()
        with TurnReader() as reader:
            for item in items:
                reader.add(item)
            figures.gaps = len(reader.gaps)
            for session in sessions_of(reader):
                found[session.name.label] = session
                self._compare(session, figures)
        for asked in self._requests.values():
            session_of_it = found.get(asked.label)
            is_there = session_of_it and any(each.request_id == asked.request_id for each in session_of_it.requests)
            is_named = session_of_it.missing if session_of_it else reader.gaps
            if asked.is_finished and not is_there and not is_named:
                figures.silent.append(f"{asked.label}: {asked.request_id:016x}")
        return figures

    def _compare(self, session: Session, figures: SessionFigures) -> None:
        figures.sessions += 1
        figures.complete += session.is_complete
        figures.named.update(_without_numbers(each) for each in session.missing)
        ids = [each.request_id for each in session.requests]
        if ids != [request_id for request_id in self._requests if request_id in ids]:
            figures.wrong.append(f"{session.name.label}: the order of its requests")
        for request in session.requests:
            figures.requests += 1
            figures.tokens += request.output_tokens
            asked = self._requests.get(request.request_id)
            fault = "nobody asked for it" if asked is None else _fault(session, request, asked)
            if fault:
                figures.wrong.append(f"{session.name.label}: {request.request_id:016x}: {fault}")


def _without_numbers(fault: str) -> str:
    words = fault.partition(": ")[2] if fault.startswith("request ") else fault
    return " ".join(word for word in words.split() if not any(character.isdigit() for character in word))


def _fault(session: Session, request: SessionRequest, asked: AskedRequest) -> str:
    """Return the first difference between an assembled request and the truth; empty if there is none."""
    is_short = request.branch < 0 or request.output_tokens < asked.output_tokens
    checks = (
        (session.name.label == asked.label, "another session's"),
        (request.parent == asked.parent, "parent"),
        (not is_short or not session.is_complete, f"{asked.output_tokens} tokens, and no loss is named"),
    )
    of_session = next((name for is_right, name in checks if not is_right), "")
    if of_session or request.branch < 0:
        return of_session
    return _branch_fault(session.branches[request.branch], request, asked, is_complete=session.is_complete)


def _branch_fault(branch: Branch, request: SessionRequest, asked: AskedRequest, *, is_complete: bool) -> str:
    prompt = slice(0, request.begin)
    output = slice(request.begin, request.begin + request.output_tokens)
    true = true_tokens(asked.request_id, 0, request.output_tokens)
    unknown = np.full(request.output_tokens, np.nan, np.float32)
    checks = (
        (np.array_equal(branch.token_ids[prompt], asked.prompt), "prompt"),
        (np.array_equal(branch.token_ids[output], true.ids), "token ids"),
        (bool(branch.is_output[output].all()), "mask of the output"),
        (not is_complete or np.array_equal(branch.is_output[prompt], asked.written), "mask of the prompt"),
        (
            np.array_equal(branch.logprobs[output], true.logprobs if asked.is_scored else unknown, equal_nan=True),
            "logprobs",
        ),
        (np.array_equal(branch.ranks[output], true.ranks if asked.is_scored else 0 * true.ranks), "ranks"),
    )
    return next((name for is_right, name in checks if not is_right), "")
