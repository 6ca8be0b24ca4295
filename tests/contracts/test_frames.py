"""Control frames: read and written within the bounds that the schema declares, all of them, one by one."""

from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.frame_cases import Case, cases_of, fields_below, put_nothing, put_value, with_field
from tests.contracts.other_encodings import varint
from tokenbus_contracts import ContractError, Rule
from tokenbus_contracts.frames import FRAMES, read_frame, write_frame
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Abort, Generate, SamplingParameters, TextPrompt
from tokenbus_contracts.generated.stream_pb2 import (
    Goodbye,
    GoodbyeReason,
    Hello,
    Item,
    PayloadKind,
    ProcessorFrame,
    Refusal,
    WorkerFrame,
)
from tokenbus_contracts.schema import bounds_in, message_bounds_in

ITEM = WorkerFrame(epoch=7, item=Item(sequence=1, payload_kind=PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH, payload_bytes=9))
PADDING_FIELD = 1000
KINDS = {"min", "max", "least", "max_items", "max_bytes", "min_bytes", "finite", "unique", "named", "required"}


CASES = [case for frame in FRAMES for case in cases_of(frame)]


def assert_bound(case: Case) -> None:
    message = case.message
    data = message.SerializeToString(deterministic=True)
    if case.rule is None:
        assert read_frame(case.frame, data) == message, case
        assert write_frame(message) == data, case
        return
    for use in (lambda: read_frame(case.frame, data), lambda: write_frame(message)):
        with pytest.raises(ContractError) as refused:
            use()
        assert (refused.value.field, refused.value.rule) == (case.field, case.rule), case


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.__name__)
def test_every_bound_of_every_field(frame: type[Message]) -> None:
    """Each field of a frame, in nested messages too; of the longest lists that several frames hold, one holds all."""
    for case in CASES:
        if case.frame is frame and (frame is ClientFrame or not case.is_long):
            assert_bound(case)


@pytest.mark.nightly
def test_bounds_of_the_longest_lists_in_every_frame() -> None:
    for case in CASES:
        if case.is_long:
            assert_bound(case)


def test_cases_cover_the_bounds() -> None:
    """The cases above hold every bound that a frame's field has, one broken and, but for two, one just kept."""
    declared = {
        (frame.__name__, ".".join(path), bound.name)
        for frame in FRAMES
        for path, field in fields_below(cast("Descriptor", frame.DESCRIPTOR), ())
        for bound, value in bounds_in(field.GetOptions()).ListFields()
        if not bound.name.startswith("default_") and (value or bound.name == "max")
    }
    broken = {(case.frame.__name__, ".".join(case.path), case.kind) for case in CASES if case.rule}
    kept = {(case.frame.__name__, ".".join(case.path), case.kind) for case in CASES if not case.rule}
    assert declared <= broken
    assert {bound for bound in declared if bound[2] not in ("finite", "unique", "required")} <= kept
    assert {kind for _, _, kind in declared} == KINDS


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.__name__)
def test_size_of_a_frame(frame: type[Message]) -> None:
    """A frame as large as its bound is read and written, one byte more is neither, and it is not even parsed."""
    descriptor = cast("Descriptor", frame.DESCRIPTOR)
    most = message_bounds_in(descriptor.GetOptions()).max_bytes
    data = with_field(descriptor, ("",), put_nothing).SerializeToString()
    full = data + _padding(most - len(data))
    assert len(full) == most
    assert len(write_frame(read_frame(frame, full))) == most
    message = frame.FromString(data + _padding(most - len(data) + 1))
    for use in (lambda: read_frame(frame, b"\xff" * (most + 1)), lambda: write_frame(message)):
        with pytest.raises(ContractError, match=rf"^message: at most {most} bytes, got {most + 1}$") as refused:
            use()
        assert refused.value.rule == Rule.BYTES


def _padding(size: int) -> bytes:
    """Return a field that no frame knows, of so many bytes in all."""
    return varint(PADDING_FIELD << 3 | 2, 2) + varint(size - 6, 4) + bytes(size - 6)


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (WorkerFrame(epoch=1), "body: one of hello, item, gap, heartbeat, goodbye, got none"),
        (
            ClientFrame(generate=Generate(request_key=1, sampling=SamplingParameters())),
            "generate.prompt: one of text, tokens, got none",
        ),
        (
            WorkerFrame(epoch=1, hello=Hello(schema_major=2)),
            "hello.schema_major: schema version 1 of package tokenbus.v1, got 2",
        ),
        (ProcessorFrame(refusal=Refusal(reason=99)), "refusal.message: text, got empty text"),  # type: ignore[arg-type]
        (ProcessorFrame(abort=Abort()), "abort.request_key: at least 1, got 0"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_a_refusal_says(frame: Message, line: str) -> None:
    """The error is one line with the field's whole path, the limit and the value, both ways."""
    for use in (lambda: read_frame(type(frame), frame.SerializeToString()), lambda: write_frame(frame)):
        with pytest.raises(ContractError) as refused:
            use()
        assert str(refused.value) == line


def test_body_of_a_newer_minor() -> None:
    newer = varint(31 << 3 | 2, 2) + b"\x02hi"
    read = read_frame(WorkerFrame, WorkerFrame(epoch=1).SerializeToString() + newer)
    assert (read.epoch, read.WhichOneof("body")) == (1, None)
    assert read_frame(ServerFrame, newer + b"\x08\x05").number == 5
    for start in (b"\x15\x00\x00\x00\x00", b"\x19" + bytes(8), b"\x08\x81\x01"):  # unknown to an empty ProcessorFrame
        assert read_frame(ProcessorFrame, newer + start).WhichOneof("body") is None
    with pytest.raises(ContractError, match=r"^epoch: at least 1, got 0$"):
        read_frame(WorkerFrame, newer)


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
        read_frame(ProcessorFrame, data)
    assert refused.value.rule == Rule.REQUIRED


def test_nested_choice_is_not_ignored() -> None:
    """A request whose prompt is of a newer minor's kind cannot be worked on, and is refused, not ignored."""
    generate = Generate(request_key=1, sampling=SamplingParameters())
    generate.MergeFromString(varint(31 << 3 | 2, 2) + b"\x00")
    with pytest.raises(ContractError, match=r"^generate\.prompt: "):
        read_frame(ClientFrame, ClientFrame(generate=generate).SerializeToString())


def test_newer_fields_and_names_pass() -> None:
    """What a minor 1 adds to an answer or to a request passes through a peer of minor 0."""
    newer = varint(31 << 3 | 2, 2) + b"\x02hi"
    answer = ProcessorFrame(refusal=Refusal(reason=99, message="new"))  # type: ignore[arg-type]
    answer.refusal.MergeFromString(newer)
    request = ClientFrame(generate=Generate(request_key=1, text=TextPrompt(text="a"), sampling=SamplingParameters()))
    request.generate.sampling.MergeFromString(newer)
    for frame in (answer, request):
        data = frame.SerializeToString(deterministic=True)
        assert write_frame(read_frame(type(frame), data)) == data


def test_cut_frames() -> None:
    prompt = Generate(request_key=1, text=TextPrompt(text="é"), sampling=SamplingParameters(stop=["a", "b"], seed=0))
    data = write_frame(ClientFrame(generate=prompt))
    for end in range(len(data)):
        with pytest.raises(ContractError) as refused:
            read_frame(ClientFrame, data[:end])
        assert refused.value.rule == (Rule.MALFORMED if end else Rule.REQUIRED)


def test_malformed_frame_is_explained() -> None:
    """The error of bytes that are no frame names the place, in nested messages too."""
    data = WorkerFrame(
        epoch=1, goodbye=Goodbye(reason=GoodbyeReason.GOODBYE_REASON_STOPPED, message="ab")
    ).SerializeToString()
    with pytest.raises(ContractError, match=r"^goodbye\.message: text in UTF-8, got 0xff at its byte 1$"):
        read_frame(WorkerFrame, data.replace(b"ab", b"a\xff"))
    with pytest.raises(ContractError, match=r"^item: at most the 1 bytes that are left, got a length of 9$"):
        read_frame(WorkerFrame, b"\x1a\x09\x08")


@given(st.integers(0, 200), st.integers(0, 255))
def test_any_damage(place: int, value: int) -> None:
    """A frame with any one byte changed is a frame, a newer minor's, or a ContractError, and nothing else."""
    hello = with_field(cast("Descriptor", WorkerFrame.DESCRIPTOR), ("hello", "model"), put_value("model", "m" * 20))
    data = bytearray(hello.SerializeToString())
    data[place % len(data)] = value
    try:
        message = read_frame(WorkerFrame, bytes(data))
    except ContractError:
        return
    assert message.epoch > 0


def test_what_is_no_frame() -> None:
    for use in (
        lambda: read_frame(Item, b""),
        lambda: write_frame(Item()),
        lambda: read_frame(WorkerFrame, bytearray(ITEM.SerializeToString())),  # type: ignore[arg-type]
    ):
        with pytest.raises(ContractError, match=r"^message: ") as refused:
            use()
        assert refused.value.rule == Rule.TYPE
