"""Answers as columns where something is missing: pyarrow, or the rest of the answer."""

import sys

import pytest

from tests.services.builders import settings
from tests.services.gateway.rendering import said, spelled
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus, decode
from tokenbus_services.gateway.buffers import Buffers
from tokenbus_services.gateway.columns_format import (
    ARROW,
    PROTOBUF,
    ArrowFormat,
    ProtobufFormat,
    StreamedColumns,
    WholeColumns,
    wanted_columns,
)
from tokenbus_services.gateway.completion_request import CompletionRequest, Reader
from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.vocabulary import vocabulary_of

READER = Reader(settings(), vocabulary_of("bytes"))


def asked() -> CompletionRequest:
    return READER.generation({"token_ids": [1], "sampling_params": {}})


@pytest.mark.parametrize("form", [ProtobufFormat, ArrowFormat])
def test_stream_that_fails_is_cut_off_before_its_end(form: type[ProtobufFormat]) -> None:
    """No client may take what came for all: neither protobuf nor Arrow says that a stream has ended."""
    answer = StreamedColumns(asked(), form(asked()), settings().gateway, Buffers(2**20))
    answer.begin(lambda: None)
    answer.has_begun = True
    answer.end(ApiError(502, "its worker is gone"))
    assert (answer.outbox.is_broken, answer.outbox.is_closed) == (True, True)


@pytest.mark.parametrize("form", [ProtobufFormat, ArrowFormat])
def test_whole_answer_that_fails_has_a_status(form: type[ProtobufFormat]) -> None:
    answer = WholeColumns(asked(), form(asked()), settings().gateway, Buffers(2**20))
    answer.begin(lambda: None)
    answer.end(ApiError(502, "its worker is gone"))
    assert (answer.error is not None, answer.has_begun, answer.outbox.is_broken) == (True, False, False)


async def test_rows_keep_what_their_step_says() -> None:
    """A message is the row as the bus brought it, under its step's header, as a selection."""
    step = batch([RowShape(3, tokens=2, top_k=1, status=RowStatus.FINISHED_STOP, stop=1), RowShape(4)])
    data = await said(
        asked(), [(step, None)], spelled("abc", [(step, None)]), lambda request, _: ProtobufFormat(request)
    )
    (message,) = [data[1:]] if data[0] < 0x80 else [data[2:]]
    found = decode(message)
    assert isinstance(found, LogprobBatch)
    assert found == step.select([0])


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ApiError, match=f"accept: {ARROW} needs the extra arrow at the gateway") as caught:
        ArrowFormat(asked())
    assert caught.value.status == 406


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (ARROW, ArrowFormat),
        (f" {PROTOBUF.upper()} ;q=1, */*", ProtobufFormat),
        (f"application/json, {ARROW}", None),
        ("*/*", None),
        ("", None),
    ],
)
def test_which_form_a_client_gets(accept: str, form: type[ProtobufFormat] | None) -> None:
    assert wanted_columns(accept) is form
