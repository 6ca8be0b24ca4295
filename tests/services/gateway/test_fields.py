"""What fields of a request may hold: what is taken, what is refused in which words, and what the schema says of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from tests.services.builders import settings
from tokenbus_services.gateway.fields import (
    Either,
    Field,
    FieldError,
    Ids,
    Kind,
    Many,
    Number,
    Only,
    Table,
    Text,
    Truth,
    Whole,
)
from tokenbus_services.gateway.tables import tables_of

PROMPTS = Either((Text(1, 3), Ids(3, 9), Many(Text(1, 3), 1, 2), Many(Ids(3, 9), 1, 2)))
STOPS = Either((Text(1, 3), Many(Text(1, 3), 0, 2)))
KINDS: list[Kind] = [
    Whole(1, 5),
    Number(0, 1, above=True),
    Number(0, 2),
    Truth(),
    Text(1, 3),
    Only((0,)),
    Only((None,)),
    Only(("system", "user")),
    Many(Whole(0, 1), 1, 2),
    Ids(3, 9),
    STOPS,
    PROMPTS,
    Table((Field("a", Whole(0, 3), "."), Field("b", Text(0, 2), ".", required=True))),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 11)
    | st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0])
    | st.text("ab", max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(KINDS), JSON)
def test_what_is_taken_is_what_the_schema_says(kind: Kind, value: Any) -> None:  # noqa: ANN401 - JSON
    """A value is refused if and only if the kind's JSON Schema refuses it."""
    valid = Draft202012Validator(kind.schema()).is_valid(value)
    try:
        kind.read(value, "x")
    except FieldError:
        assert not valid
    else:
        assert valid


def test_schemas_of_the_requests_are_schemas() -> None:
    """The tables' schemas hold by JSON Schema's own."""
    tables = tables_of(settings())
    for table in (tables.completion, tables.chat, tables.inspection):
        Draft202012Validator(table.schema())


@pytest.mark.parametrize(
    ("kind", "value", "line"),
    [
        (Whole(1, 5), 6, "x: a whole number from 1 to 5, got 6"),
        (Whole(1, 5), True, "x: a whole number from 1 to 5, got True"),
        (Number(0, 1, above=True), 0, "x: a number above 0 and at most 1, got 0"),
        (Text(1, 3), "", "x: text of 1 to 3 characters, got 0 characters"),
        (Only((0,)), 0.5, "x: one of 0, got 0.5"),
        (Many(Whole(0, 1), 0, 2), [0, 7], "x[1]: a whole number from 0 to 1, got 7"),
        (Ids(3, 9), [1, -1], "x[1]: a whole number from 0 to 9, got -1"),
        (STOPS, ["a", ""], "x[1]: text of 1 to 3 characters, got 0 characters"),
        (PROMPTS, [4294967296], "x[0]: a whole number from 0 to 9, got 4294967296"),
        (PROMPTS, [1, 2, 3, 4], "x: a list of 1 to 3 token ids, got 4 token ids"),
        (PROMPTS, [[1], [2, 10]], "x[1][1]: a whole number from 0 to 9, got 10"),
        (PROMPTS, ["a", "abcd"], "x[1]: text of 1 to 3 characters, got 4 characters"),
        (PROMPTS, ["a", "b", "c"], "x: a list of 1 to 2 elements, got 3 elements"),
        (STOPS, 5, "x: text, got 5"),
        (Table((Field("a", Truth(), "."),)), {"b": 1}, "x.b: no such field, got 1"),
        (Table((Field("a", Truth(), ".", required=True),)), {}, "x.a: it must be given, got nothing"),
    ],
)
def test_refusals_name_the_field_the_limit_and_the_value(kind: Kind, value: Any, line: str) -> None:  # noqa: ANN401
    """One line says where, what may be there, and what was."""
    with pytest.raises(FieldError) as raised:
        kind.read(value, "x")
    assert str(raised.value) == line


def test_null_stands_for_a_field_that_is_left_out() -> None:
    """What is null, as clients write of options that were not given, has its default."""
    table = Table((Field("n", Whole(1, 5), ".", default=1), Field("stop", Text(1, 3), ".")))
    assert table.read({"n": None, "stop": None}, "") == table.read({}, "") == {"n": 1, "stop": None}
