"""OpenRequest: a request that has not ended, with its turns and its processor."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenbus.client.progress import NO_SENDER, Progress
from tokenbus.client.received_scores import ReceivedScores
from tokenbus.client.session import ClientSession
from tokenbus.client.tokens import RequestTokens, Turn
from tokenbus.delivery.errors import CODE_NAMES, NOT_HERE, NOT_TAKEN, request_error
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Resume
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, ErrorCode, Generate, RequestError, TokenPrompt
from tokenbus_contracts.schema import bounds_in

_CONTINUED = frozenset(
    {
        ErrorCode.ERROR_CODE_WORKER_LOST,
        ErrorCode.ERROR_CODE_ENGINE,
        ErrorCode.ERROR_CODE_UNKNOWN_REQUEST,
        ErrorCode.ERROR_CODE_GAP,
    }
)
"""Errors after which another worker may continue the request."""
_MOST_LOSSES = 3
"""A request fails after it lost this number of workers without a new token, because it may crash its workers."""
_MOST_TOKENS = bounds_in(TokenPrompt.DESCRIPTOR.fields_by_name["token_ids"].GetOptions()).max_items
"""Maximum number of tokens in a prompt and its continuation together."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended, with its state at the client."""

    tokens: RequestTokens
    progress: Progress
    """Table with the next position of every request."""
    generate: Generate | None
    """Message of the current turn, or None once a processor is known to have received it."""
    include_drafts: bool
    origin: Generate = field(default_factory=Generate)
    """The original request of the application, or an empty message for a resumed request."""
    is_resumed: bool = False
    """Whether the request came from `resume`; it cannot be continued, because its prompt is unknown."""
    scoring: ReceivedScores | None = None
    """Received prompt scores, or None if the request asked for none."""
    deadline_unix_ms: int = 0
    """Deadline in milliseconds since 1970-01-01 UTC, or 0 if unknown."""
    home: ClientSession | None = None
    """Session of the processor to which the request was sent, or None while it waits for a processor."""
    sent_to: str = ""
    """Id of the processor incarnation that may have received the request, or empty if there is none."""
    is_answered: bool = False
    """Whether the current processor has answered the last Generate or Resume."""
    turn: int = 0
    """Number of the current turn, counted from 0."""
    losses: int = 0
    """Number of workers that the request has lost since its last new token."""
    loss: RequestError | None = None
    """Error that ended the last turn."""
    is_aborted: bool = False
    is_submitted: bool = False
    """Whether the request was submitted for the output stream, and so has no iterator."""
    refused_by: set[ClientSession] = field(default_factory=set)
    refusal: RequestError | None = None
    """Error of the last processor that refused the request."""
    waits_since: float | None = None
    """Time since which the request has been waiting for a processor, or None if it is not waiting."""
    closed_at: int | None = None
    """Next position while the request is not in the table; otherwise None, because `progress` has the position."""

    @property
    def request_id(self) -> int:
        """Id of the first turn, which the application uses for the request."""
        return self.tokens.request_id

    @property
    def turn_id(self) -> int:
        return self.tokens.turns[-1].request_id

    @property
    def next_position(self) -> int:
        """Position of the next expected token."""
        return self.progress.next_position(self.request_id) if self.closed_at is None else self.closed_at

    @property
    def was_never_sent(self) -> bool:
        """Whether no processor can have received the request."""
        return self.generate is not None and not self.sent_to

    def error(self, code: ErrorCode, message: str) -> RequestError:
        return request_error(self.request_id, code, message)

    def frame(self) -> ClientFrame:
        """Return a Generate frame, or a Resume frame once a processor has received the request."""
        return self.resume_frame() if self.generate is None else ClientFrame(generate=self.generate)

    def resume_frame(self) -> ClientFrame:
        """Return the frame that asks for the rows from the next position on."""
        resume = Resume(
            request_id=self.turn_id,
            next_position=self.next_position,
            include_draft_logprobs=self.include_drafts,
            deadline_unix_ms=self.deadline_unix_ms,
        )
        return ClientFrame(resume=resume)

    def answered_by(self, session: ClientSession) -> None:
        """Record that a processor has the request, so that its rows are accepted."""
        if self.is_answered:
            return
        self.generate, self.is_answered = None, True
        self.refusal = self.waits_since = None
        self.refused_by.clear()
        if self.closed_at is None:
            self.progress.set_sender(self.request_id, session.ordinal)

    def forget_answer(self) -> None:
        """Reject rows of the request until a processor answers again."""
        self.is_answered = False
        if self.closed_at is None:
            self.progress.set_sender(self.request_id, NO_SENDER)

    def may_go_elsewhere(self, code: ErrorCode, *, has_several: bool) -> bool:
        """Return True if the failing processor never had the request, so that another processor may take it."""
        if self.generate is not None:
            return code in NOT_TAKEN and (has_several or self.loss is not None)
        is_searched = self.is_resumed and not self.is_answered
        return has_several and is_searched and code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST

    def may_continue(self, code: ErrorCode) -> bool:
        """Count the loss of a turn that ended with an error, and return whether another turn may follow."""
        if self.is_resumed:
            return False
        is_unanswered = self.generate is not None
        if self.is_aborted:
            return is_unanswered and code in NOT_HERE  # no worker has the turn, so the request ends as aborted
        is_off = self.origin.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_OFF
        if code not in _CONTINUED or (is_off and not (is_unanswered and code in NOT_HERE)):
            return False
        if self.next_position > self.tokens.turns[-1].begin:
            self.losses = 0
        self.losses += code != ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
        size = len(self.origin.tokens.token_ids) + self.next_position
        return self.losses < _MOST_LOSSES and size <= _MOST_TOKENS

    def begin_turn(self, turn_id: int, reason: ErrorCode, accepted: Iterable[int], weight_version: int) -> None:
        """Create the message of the next turn, which continues after the accepted tokens."""
        self.turn += 1
        generate = Generate()
        generate.CopyFrom(self.origin)
        generate.request_id, generate.first_request_id = turn_id, self.request_id
        if self.deadline_unix_ms:
            generate.deadline_unix_ms = self.deadline_unix_ms
            generate.ClearField("deadline_ms")
        generate.continuation.turn, generate.continuation.reason = self.turn, reason
        if self.next_position:
            generate.ClearField("prompt_scoring")
            generate.continuation.token_ids.extend(accepted)
            generate.continuation.weight_version = weight_version
        elif self.scoring is not None:
            self.scoring, self.tokens.prompt_scores = ReceivedScores(generate), None
        self.tokens.begin_turn(Turn(self.next_position, turn_id, CODE_NAMES[reason]))
        self.generate, self.home, self.sent_to = generate, None, ""
        self.refused_by.clear()
        self.refusal = self.waits_since = None
