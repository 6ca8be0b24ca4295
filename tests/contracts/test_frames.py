"""Control frames: read and written within the bounds that the schema declares."""

import math
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.other_encodings import varint
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import FRAMES, read_frame, write_frame
from tokenbus_contracts.generated import stream_pb2 as pb
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame
from tokenbus_contracts.generated.control_pb2 import ControlAnswer
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    Admitted,
    Generate,
    RequestEvent,
    SamplingParameters,
    TextPrompt,
    TokenBias,
)
from tokenbus_contracts.schema import message_bounds_in

ITEM = pb.WorkerFrame(
    epoch=7, item=pb.Item(sequence=1, payload_kind=pb.PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, payload_bytes=9)
)
PADDING_FIELD = 1000
HELLO = pb.WorkerFrame(
    epoch=7,
    hello=pb.Hello(
        schema_major=1,
        worker_id="w",
        role=pb.WorkerRole.WORKER_ROLE_MIXED,
        limits=pb.StreamLimits(max_message_bytes=1, max_rows=1, max_tokens_per_row=1),
        first_sequence=1,
        next_sequence=1,
    ),
)
GENERATE = Generate(request_id=1, text=TextPrompt(text="a"), sampling=SamplingParameters())
REQUEST = ClientFrame(generate=GENERATE)
ADMITTED = Admitted(request_id=1, worker_id="w", epoch=1)
ANSWER = ServerFrame(control_answer=ControlAnswer(control_key=1))
SMALLEST: tuple[Message, ...] = (
    pb.WorkerFrame(epoch=1, heartbeat=pb.Heartbeat(sent_at_ns=1)),
    pb.ProcessorFrame(abort=Abort(request_id=1)),
    ClientFrame(abort=Abort(request_id=1)),
    ServerFrame(admitted=ADMITTED),
    RequestEvent(sequence=1, admitted=ADMITTED),
)
MANY = [*range(1, 101)]
"""More elements than are looked at one by one."""
SAMPLING = "generate.sampling"
BOUNDS: list[tuple[Message, str, object, object, Rule, str]] = [
    # A frame, a field of it, a value just within its bound and one just beyond, the rule and the place in the field.
    (HELLO, "epoch", 1, 0, Rule.MIN, ""),
    (HELLO, "hello.schema_major", 1, 2, Rule.VERSION, ""),
    (HELLO, "hello.schema_major", 1, 0, Rule.VERSION, ""),
    (HELLO, "hello.worker_id", "w", "", Rule.REQUIRED, ""),
    (HELLO, "hello.worker_id", "w" * 64, "w" * 65, Rule.BYTES, ""),
    (HELLO, "hello.worker_id", "é" * 32, "é" * 32 + "x", Rule.BYTES, ""),
    (HELLO, "hello.proof", b"\xff" * 64, b"\xff" * 65, Rule.BYTES, ""),
    (HELLO, "hello.role", 1, 0, Rule.MIN, ""),
    (HELLO, "hello.role", max(pb.WorkerRole.values()), max(pb.WorkerRole.values()) + 1, Rule.NAMED, ""),
    (ANSWER, "control_answer.state.value_kind", 0, -1, Rule.NAMED, ""),
    (HELLO, "hello.limits", HELLO.hello.limits, None, Rule.REQUIRED, ""),
    (HELLO, "hello.limits.max_rows", 1, 0, Rule.MIN, ""),
    (HELLO, "hello.limits.max_rows", 1024, 1025, Rule.MAX, ""),
    (HELLO, "hello.next_sequence", 2**62, 2**62 + 1, Rule.MAX, ""),
    (HELLO, "hello.request_ids", [2, 1], [2, 0], Rule.MIN, "[1]"),
    (HELLO, "hello.request_ids", [5, 6], [5, 6, 5], Rule.UNIQUE, "[2]"),
    (HELLO, "hello.request_ids", [*MANY, 101], [*MANY, 0], Rule.MIN, "[100]"),
    (HELLO, "hello.request_ids", [*MANY, 2**64 - 1], [*MANY, 5], Rule.UNIQUE, "[100]"),
    (HELLO, "hello.request_ids", range(1, 2**16 + 1), range(1, 2**16 + 2), Rule.ITEMS, ""),
    (REQUEST, "generate.request_id", 1, 0, Rule.MIN, ""),
    (REQUEST, "generate.text.text", "a" * 2**22, "a" * (2**22 + 1), Rule.BYTES, ""),
    (REQUEST, "generate.tokens.token_ids", [0, 2**31 - 2], [0, 2**31 - 1], Rule.MAX, "[1]"),
    (REQUEST, "generate.tokens.token_ids", [*MANY, 5, 2**31 - 2], [*MANY, 5, 2**31 - 1], Rule.MAX, "[101]"),
    (REQUEST, SAMPLING, SamplingParameters(), None, Rule.REQUIRED, ""),
    (REQUEST, f"{SAMPLING}.max_tokens", 1, 0, Rule.MIN, ""),
    (REQUEST, f"{SAMPLING}.top_k", 2**31 - 1, 2**31, Rule.MAX, ""),
    (REQUEST, f"{SAMPLING}.temperature", 0.0, -0.25, Rule.MIN, ""),
    *((REQUEST, f"{SAMPLING}.temperature", 3e38, value, Rule.FINITE, "") for value in (math.nan, math.inf, -math.inf)),
    (REQUEST, f"{SAMPLING}.top_p", 1.0, 1.25, Rule.MAX, ""),
    (REQUEST, f"{SAMPLING}.presence_penalty", -2.0, -2.25, Rule.MIN, ""),
    (REQUEST, f"{SAMPLING}.presence_penalty", 2.0, 2.25, Rule.MAX, ""),
    (REQUEST, f"{SAMPLING}.stop", ["a"] * 16, ["a"] * 17, Rule.ITEMS, ""),
    (REQUEST, f"{SAMPLING}.stop", ["a", "b"], ["a", ""], Rule.REQUIRED, "[1]"),
    (REQUEST, f"{SAMPLING}.stop", ["s" * 4096], ["s" * 4097], Rule.BYTES, "[0]"),
    (REQUEST, f"{SAMPLING}.stop_token_ids", [1] * 1024, [1] * 1025, Rule.ITEMS, ""),
    (REQUEST, f"{SAMPLING}.logit_bias", [TokenBias(bias=100)], [TokenBias(bias=100.25)], Rule.MAX, "[0].bias"),
    (REQUEST, f"{SAMPLING}.logit_bias", [TokenBias(bias=1)], [TokenBias(bias=math.nan)], Rule.FINITE, "[0].bias"),
    (REQUEST, f"{SAMPLING}.structured_output.regex.pattern", "a", "", Rule.REQUIRED, ""),
]


def changed(frame: Message, path: str, value: object) -> Message:
    made = type(frame)()
    made.CopyFrom(frame)
    *outer, name = path.split(".")
    inner: Any = made
    for each in outer:
        inner = getattr(inner, each)
    inner.SetInParent()
    inner.ClearField(name)
    if isinstance(value, Message):
        getattr(inner, name).CopyFrom(value)
        getattr(inner, name).SetInParent()
    elif isinstance(value, list | range):
        getattr(inner, name).extend(value)
    elif value is not None:
        setattr(inner, name, value)
    return made


def assert_refused(frame: Message, field: str, rule: Rule) -> None:
    data = frame.SerializeToString(deterministic=True)
    for use in (lambda: read_frame(type(frame), data), lambda: write_frame(frame)):
        with pytest.raises(ContractError) as refused:
            use()
        assert (refused.value.field, refused.value.rule) == (field, rule)


def test_bounds_hold_to_the_value() -> None:
    """Each kind of bound, of each kind of field: the checks are made from what the schema declares of any field."""
    for frame, path, kept, broken, rule, place in BOUNDS:
        within = changed(frame, path, kept)
        data = within.SerializeToString(deterministic=True)
        assert read_frame(type(frame), data) == within, path
        assert write_frame(within) == data, path
        assert_refused(changed(frame, path, broken), path + place, rule)


@pytest.mark.parametrize("smallest", SMALLEST, ids=lambda frame: type(frame).__name__)
def test_size_of_a_frame(smallest: Message) -> None:
    """A frame as large as its bound is read and written, one byte more is neither, and it is not even parsed."""
    frame = type(smallest)
    most = message_bounds_in(cast("Descriptor", frame.DESCRIPTOR).GetOptions()).max_bytes
    data = write_frame(smallest)
    full = data + _padding(most - len(data))
    assert len(full) == most
    assert len(write_frame(read_frame(frame, full))) == most
    message = frame.FromString(data + _padding(most - len(data) + 1))
    for use in (lambda: read_frame(frame, b"\xff" * (most + 1)), lambda: write_frame(message)):
        with pytest.raises(ContractError, match=rf"^message: at most {most} bytes, got {most + 1}$") as refused:
            use()
        assert refused.value.rule == Rule.BYTES


def test_every_frame_has_a_size() -> None:
    assert tuple(map(type, SMALLEST)) == FRAMES


def _padding(size: int) -> bytes:
    return varint(PADDING_FIELD << 3 | 2, 2) + varint(size - 6, 4) + bytes(size - 6)


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (pb.WorkerFrame(epoch=1), "body: one of hello, item, gap, heartbeat, goodbye, got none"),
        (ClientFrame(generate=Generate(request_id=1, sampling=SamplingParameters())), "generate.prompt: one of text, tokens, got none"),  # noqa: E501
        (pb.WorkerFrame(epoch=1, hello=pb.Hello(schema_major=2)), "hello.schema_major: schema version 1 of package tokenbus.v1, got 2"),  # noqa: E501
        (pb.ProcessorFrame(refusal=pb.Refusal(reason=99)), "refusal.message: text, got empty text"),  # type: ignore[arg-type]
        (pb.ProcessorFrame(abort=Abort()), "abort.request_id: at least 1, got 0"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_refusal_says(frame: Message, line: str) -> None:
    """The error is one line with the field's whole path, the limit and the value, both ways."""
    for use in (lambda: read_frame(type(frame), frame.SerializeToString()), lambda: write_frame(frame)):
        with pytest.raises(ContractError) as refused:
            use()
        assert str(refused.value) == line


def test_body_of_a_newer_minor() -> None:
    newer = varint(31 << 3 | 2, 2) + b"\x02hi"
    read = read_frame(pb.WorkerFrame, pb.WorkerFrame(epoch=1).SerializeToString() + newer)
    assert (read.epoch, read.WhichOneof("body")) == (1, None)
    assert read_frame(ServerFrame, newer + b"\x08\x05").number == 5
    for start in (b"\x15\x00\x00\x00\x00", b"\x19" + bytes(8), b"\x08\x81\x01"):  # unknown to an empty ProcessorFrame
        assert read_frame(pb.ProcessorFrame, newer + start).WhichOneof("body") is None
    with pytest.raises(ContractError, match=r"^epoch: at least 1, got 0$"):
        read_frame(pb.WorkerFrame, newer)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08\x01",  # the welcome's number, as a varint
        b"\x15\x00\x00\x00\x00",  # the refusal's, as 4 bytes
        b"\x19" + bytes(8),  # the credit's, as 8 bytes
        b"\x0b\x0c",  # the welcome's, as a group
        b"\x08\x01" * 5000 + varint(31 << 3 | 2, 2) + b"\x00",  # the newer field lies behind more than is looked at
    ],
    ids=["empty", "varint", "fixed32", "fixed64", "group", "many"],
)
def test_damaged_body_is_no_newer_one(data: bytes) -> None:
    """A body that we know, encoded as none of its type, is absent, not a newer minor's."""
    with pytest.raises(ContractError, match=r"^body: one of ") as refused:
        read_frame(pb.ProcessorFrame, data)
    assert refused.value.rule == Rule.REQUIRED


def test_nested_choice_is_not_ignored() -> None:
    """A request whose prompt is of a newer minor's kind cannot be worked on, and is refused, not ignored."""
    generate = Generate(request_id=1, sampling=SamplingParameters())
    generate.MergeFromString(varint(31 << 3 | 2, 2) + b"\x00")
    with pytest.raises(ContractError, match=r"^generate\.prompt: "):
        read_frame(ClientFrame, ClientFrame(generate=generate).SerializeToString())


def test_newer_fields_and_names_pass() -> None:
    newer = varint(31 << 3 | 2, 2) + b"\x02hi"
    answer = pb.ProcessorFrame(refusal=pb.Refusal(reason=99, message="new"))  # type: ignore[arg-type]
    answer.refusal.MergeFromString(newer)
    request = ClientFrame(generate=Generate(request_id=1, text=TextPrompt(text="a"), sampling=SamplingParameters()))
    request.generate.sampling.MergeFromString(newer)
    for frame in (answer, request):
        data = frame.SerializeToString(deterministic=True)
        assert write_frame(read_frame(type(frame), data)) == data


def test_cut_frames() -> None:
    prompt = Generate(request_id=1, text=TextPrompt(text="é"), sampling=SamplingParameters(stop=["a", "b"], seed=0))
    data = write_frame(ClientFrame(generate=prompt))
    for end in range(len(data)):
        with pytest.raises(ContractError) as refused:
            read_frame(ClientFrame, data[:end])
        assert refused.value.rule == (Rule.MALFORMED if end else Rule.REQUIRED)


def test_malformed_frame_is_explained() -> None:
    data = pb.WorkerFrame(
        epoch=1, goodbye=pb.Goodbye(reason=pb.GoodbyeReason.GOODBYE_REASON_STOPPED, message="ab")
    ).SerializeToString()
    with pytest.raises(ContractError, match=r"^goodbye\.message: text in UTF-8, got 0xff at its byte 1$"):
        read_frame(pb.WorkerFrame, data.replace(b"ab", b"a\xff"))
    with pytest.raises(ContractError, match=r"^item: at most the 1 bytes that are left, got a length of 9$"):
        read_frame(pb.WorkerFrame, b"\x1a\x09\x08")


@given(st.integers(0, 200), st.integers(0, 255))
def test_any_damage(place: int, value: int) -> None:
    """A frame with any one byte changed is a frame, a newer minor's, or a ContractError, and nothing else."""
    data = bytearray(changed(HELLO, "hello.model", "m" * 20).SerializeToString())
    data[place % len(data)] = value
    try:
        message = read_frame(pb.WorkerFrame, bytes(data))
    except ContractError:
        return
    assert message.epoch > 0


def test_what_is_no_frame() -> None:
    for use in (
        lambda: read_frame(pb.Item, b""),
        lambda: write_frame(pb.Item()),
        lambda: read_frame(pb.WorkerFrame, bytearray(ITEM.SerializeToString())),  # type: ignore[arg-type]
    ):
        with pytest.raises(ContractError, match=r"^message: ") as refused:
            use()
        assert refused.value.rule == Rule.TYPE
