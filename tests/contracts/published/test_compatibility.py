"""What a change of the schema breaks: each kind of change, and for whom."""

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

from tokenbus_contracts.generated import bounds_pb2
from tokenbus_contracts.published.compatibility import Change, changes
from tokenbus_contracts.published.descriptors import Schema
from tokenbus_contracts.schema import bounds_in, message_bounds_in, status_rule_in

INSTALLED = Schema.installed()
Edit = Callable[["Edited"], object]


class Edited:
    def __init__(self) -> None:
        self.files = FileDescriptorSet.FromString(INSTALLED.descriptor_set().SerializeToString())

    def message(self, name: str) -> DescriptorProto:
        return next(each for file in self.files.file for each in file.message_type if each.name == name)

    def enum(self, name: str) -> EnumDescriptorProto:
        return next(each for file in self.files.file for each in file.enum_type if each.name == name)

    def field(self, name: str) -> FieldDescriptorProto:
        message, _, field = name.partition(".")
        return next(each for each in self.message(message).field if each.name == field)

    def bounds(self, name: str) -> bounds_pb2.FieldBounds:
        return bounds_in(self.field(name).options)

    def remove(self, name: str) -> None:
        message = self.message(name.partition(".")[0])
        message.field.remove(self.field(name))

    def add(self, name: str, **bounds: int | bool) -> None:
        message, _, field = name.partition(".")
        added = self.message(message).field.add(
            name=field,
            number=99,
            type=FieldDescriptorProto.TYPE_UINT32,
            label=FieldDescriptorProto.LABEL_OPTIONAL,
            json_name=field,
        )
        for bound, value in bounds.items():
            setattr(bounds_in(added.options), bound, value)


def found_by(edit: Edit) -> list[Change]:
    edited = Edited()
    edit(edited)
    return changes(INSTALLED, Schema(edited.files))


def test_same_schema_changes_nothing() -> None:
    assert found_by(lambda _: None) == []


def with_field(path: str, /, **changed: object) -> Edit:
    def edit(edited: Edited) -> None:
        for name, value in changed.items():
            setattr(edited.field(path), name, value)

    return edit


def with_bound(path: str, **changed: int) -> Edit:
    def edit(edited: Edited) -> None:
        for name, value in changed.items():
            setattr(edited.bounds(path), name, value)

    return edit


READERS = "processors and clients with the"
BREAKING: list[tuple[str, Edit, str]] = [
    ("Ack.through_sequence", lambda edited: edited.remove("Ack.through_sequence"), "the field is gone: workers with the new schema do not read what processors with the old one say in it"),  # noqa: E501
    ("Ack.through_sequence", with_field("Ack.through_sequence", name="last"), "is called last now: the bytes are the same; JSON and code that name it break"),  # noqa: E501
    ("BatchHeader.step", with_field("BatchHeader.step", json_name="number"), "is called number in JSON now"),
    ("Credit.bytes", with_field("Credit.bytes", type=FieldDescriptorProto.TYPE_FIXED32), "is fixed32 instead of"),
    ("LogprobBatch.request_ids", with_bound("LogprobBatch.request_ids", max_items=512), f"max_items: 512 instead of 1,024: {READERS} new schema refuse what"),  # noqa: E501
    ("LogprobBatch.request_ids", with_bound("LogprobBatch.request_ids", max_items=2048), f"max_items: 2,048 instead of 1,024: {READERS} old schema refuse what"),  # noqa: E501
    ("BatchHeader.step", with_bound("BatchHeader.step", min=5), f"min: 5 instead of 1: {READERS} new schema refuse"),
    ("LogprobBatch.logprobs", with_bound("LogprobBatch.logprobs", finite=False), f"finite: demanded no longer: {READERS} old schema refuse"),  # noqa: E501
    ("LogprobBatch.token_counts", with_bound("LogprobBatch.token_counts", default_max=5), f"default_max: 5 instead of 8: {READERS} new schema that set no limit"),  # noqa: E501
    (
        "LogprobBatch.token_counts",
        lambda edited: edited.bounds("LogprobBatch.token_counts").ClearField("default_max"),
        f"default_max: 16 instead of 8: {READERS} old schema that set no limit",
    ),
    ("ClientFrame.abort", lambda edited: edited.field("ClientFrame.abort").ClearField("oneof_index"), "is in no oneof instead of body"),  # noqa: E501
    ("RowStatus.ROW_STATUS_", lambda edited: edited.enum("RowStatus").value.pop(), f"is gone: {READERS} new schema refuse or misread it"),  # noqa: E501
    ("RowStatus.ROW_STATUS_NEW", lambda edited: edited.enum("RowStatus").value.add(name="ROW_STATUS_NEW", number=99), f"the value 99 is new: {READERS} old schema refuse it"),  # noqa: E501
    ("BatchKind.BATCH_KIND_TARGET", lambda edited: setattr(edited.enum("BatchKind").value[1], "name", "BATCH_KIND_MAIN"), "is called BATCH_KIND_MAIN now"),  # noqa: E501
    ("RowStatus.ROW_STATUS_", lambda edited: setattr(status_rule_in(edited.enum("RowStatus").value[2].options), "proposals", True), "rows of this status may carry other things than before"),  # noqa: E501
    (
        "ClientFrame",
        lambda edited: setattr(message_bounds_in(edited.message("ClientFrame").options), "max_bytes", 1000),
        "max_bytes: 1,000 instead of 8,388,608: processors with the new schema refuse what clients",
    ),
]  # fmt: skip
HARMLESS: list[tuple[str, Edit, str]] = [
    (
        "Heartbeat.load",
        lambda edited: edited.add("Heartbeat.load"),
        "the field is new: processors, workers and clients with the old schema ignore it",
    ),
    (
        "SpeculativeMethod.SPECULATIVE_METHOD_NEW",
        lambda edited: edited.enum("SpeculativeMethod").value.add(name="SPECULATIVE_METHOD_NEW", number=99),
        "take it for a value that they do not know",
    ),
]


def test_change_that_breaks_says_for_whom() -> None:
    for subject, edit, sentence in BREAKING:
        (change,) = found_by(edit)
        assert change.breaks, subject
        assert change.subject.startswith(subject)
        assert sentence in change.sentence


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ("UINT32", "UINT64", 2**32 - 1),
        ("UINT32", "INT32", 2**31 - 1),
        ("FIXED64", "SFIXED64", 2**63 - 1),
        ("BOOL", "UINT32", 1),
    ],
)
def test_other_type_breaks_only_what_it_reads_otherwise(before: str, after: str, most: int) -> None:
    """A number of another type has the same bytes where both have it; beyond, it is misread."""

    def with_type(kind: str, most: int) -> Schema:
        edited = Edited()
        edited.add("Heartbeat.load", min=0, max=most)
        edited.field("Heartbeat.load").type = getattr(FieldDescriptorProto, f"TYPE_{kind}")
        return Schema(edited.files)

    for limit, breaks in ((most, False), (most + 1, True)):
        (change,) = changes(with_type(before, limit), with_type(after, limit))
        assert (change.subject, change.breaks) == ("Heartbeat.load", breaks)


def test_what_is_added_breaks_nothing() -> None:
    for subject, edit, sentence in HARMLESS:
        (change,) = found_by(edit)
        assert not change.breaks, subject
        assert change.subject == subject
        assert sentence in change.sentence


@pytest.mark.parametrize(
    ("edit", "how", "refusing"),
    [
        (lambda edited: edited.add("BatchHeader.load", min=1), "new", "new"),
        (lambda edited: edited.remove("BatchHeader.step"), "gone", "old"),
        (lambda edited: edited.add("LogprobBatch.loads", length=bounds_pb2.COLUMN_LENGTH_ROWS), "new", "new"),
    ],
)
def test_field_that_must_be_set_breaks_the_other_side(edit: Edit, how: str, refusing: str) -> None:
    found = [change.sentence for change in found_by(edit) if "must be set" in change.sentence]
    (sentence,) = found
    assert sentence.startswith(
        f"the field is {how} and must be set: processors and clients with the {refusing} schema refuse what"
    )


def test_number_that_was_reserved_breaks() -> None:
    (reserved,) = {span.start for span in INSTALLED.messages["ClientHello"].proto.reserved_range}

    def edit(edited: Edited) -> None:
        edited.add("ClientHello.load")
        edited.field("ClientHello.load").number = reserved

    assert f"the number {reserved} was reserved" in " ".join(change.sentence for change in found_by(edit))


def test_enum_deep_inside_is_compared() -> None:
    def nest(edited: Edited) -> EnumDescriptorProto:
        inner = edited.message("Heartbeat").nested_type.add(name="Outer").nested_type.add(name="Inner")
        enum = inner.enum_type.add(name="Kind")
        for number in range(3):
            enum.value.add(name=f"KIND_{number}", number=number)
        return enum

    old, new = Edited(), Edited()
    nest(old)
    nest(new).value.pop()
    (change,) = changes(Schema(old.files), Schema(new.files))
    assert change.subject == "Heartbeat.Outer.Inner.Kind.KIND_2"
    assert change.breaks


def test_message_that_is_gone_breaks_its_readers() -> None:
    def remove(edited: Edited) -> None:
        edited.remove("ProcessorFrame.control")
        for file in edited.files.file:
            if any(each.name == "Control" for each in file.message_type):
                file.message_type.remove(edited.message("Control"))

    assert {change.subject for change in found_by(remove) if change.breaks} == {"ProcessorFrame.control", "Control"}
