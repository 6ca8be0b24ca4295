"""A hand-off as messages: what a prefill worker sends, and what it is answered."""

import hmac
from zlib import crc32

from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import read_frame, write_frame
from tokenbus_contracts.generated.handoff_pb2 import DecodeFrame, Handoff, HandoffReply, PrefillFrame
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_contracts.schema import MAJOR
from tokenbus_services.settings import Settings

_MOST_REFUSAL = 1000


def handoff_of(generate: Generate, state: bytes, number: int, settings: Settings) -> list[bytes]:
    """Return the message that hands a request off, with the ticket that it was given; sent again, it is the same."""
    handoff = Handoff(
        schema_major=MAJOR,
        ticket=generate.handoff_ticket,
        worker_id=settings.worker.id,
        generate=generate,
        state_bytes=len(state),
        state_crc32=crc32(state),
        number=number,
    )
    return [write_frame(PrefillFrame(handoff=handoff)), state]


def read_handoff(parts: list[bytes], ticket: bytes) -> Handoff | None:
    """Return the hand-off in a message that shows the decode worker's ticket, or None: only a newer minor knows it."""
    if len(parts) != 2:  # noqa: PLR2004 - a frame, and the state
        raise ContractError("message", "a frame and a state", f"{len(parts)} parts", rule=Rule.LENGTH)
    frame = read_frame(PrefillFrame, parts[0])
    if not frame.HasField("handoff"):
        return None
    handoff, state = frame.handoff, parts[1]
    if not hmac.compare_digest(handoff.ticket, ticket):
        raise ContractError("handoff.ticket", "the decode worker's", "another")
    if handoff.state_bytes != len(state):
        raise ContractError("handoff.state_bytes", f"{len(state)}, as it has", handoff.state_bytes)
    if handoff.state_crc32 != crc32(state):
        raise ContractError("handoff.state_crc32", f"{crc32(state)}, as it has", handoff.state_crc32)
    return handoff


def reply_of(handoff: Handoff, refusal: str) -> list[bytes]:
    """Return the answer to a hand-off; an empty refusal: it was taken over."""
    fitting = refusal.encode()[:_MOST_REFUSAL].decode(errors="ignore")
    reply = HandoffReply(request_key=handoff.generate.request_key, number=handoff.number, refusal=fitting)
    return [write_frame(DecodeFrame(reply=reply))]


def read_reply(parts: list[bytes]) -> HandoffReply | None:
    """Return the answer in a message, or None: it says what only a newer minor knows."""
    if len(parts) != 1:
        raise ContractError("message", "one part", len(parts), rule=Rule.LENGTH)
    frame = read_frame(DecodeFrame, parts[0])
    return frame.reply if frame.HasField("reply") else None
