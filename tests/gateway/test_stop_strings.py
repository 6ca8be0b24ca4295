"""Text that runs: characters that are split over tokens, and stops that are."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.gateway.stop_strings import RunningText, Stopping


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


def _all(pieces: list[bytes], stops: tuple[str, ...] = ()) -> str:
    text = RunningText(Stopping(stops))
    return "".join([*map(text.add, pieces), text.end()])


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_text_does_not_depend_on_where_it_is_cut(text: str, cuts: list[int]) -> None:
    """Whichever bytes a token has, the text is the same: characters wait for their last byte."""
    assert _all(_cut(text.encode(), cuts)) == text.rstrip("\ufffd")


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes, cuts: list[int]) -> None:
    assert _all(_cut(data, cuts)) == data.decode(errors="replace").rstrip("\ufffd")


@given(
    st.text("ab\u00e4", max_size=30),
    st.lists(st.text("ab\u00e4", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 99)),
)
def test_text_ends_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    found = _all(_cut(text.encode(), cuts), tuple(stops))
    if not ends:
        assert found == text
    else:
        begins = {text.find(stop) for stop in stops} - {-1}
        assert found in {text[:begin] for begin in begins}
        assert not any(stop in found for stop in stops)


def test_a_beginning_of_a_stop_is_held_back() -> None:
    text = RunningText(Stopping(("\nUser:",)))
    assert text.add(b"yes\nUs") == "yes"
    assert text.add(b"ed") == "\nUsed"
    assert text.add(b"\nUser") == ""
    assert text.stop is None
    assert text.add(b": no") == ""
    assert text.stop is not None
    assert (text.add(b"more"), text.end()) == ("", "")


def test_stop_may_belong_to_the_text() -> None:
    text = RunningText(Stopping(("stop", "no"), is_included=True))
    assert text.add_until_stop([b"go s", b"t", b"op now", b"never"]) == ("go stop", 3)
    assert text.stop == "stop"


def test_of_several_stops_the_one_that_ends_first_counts() -> None:
    for stops, found in ((("stop", "to"), "to"), (("top", "op", "p n"), "top"), (("op", "top"), "op")):
        text = RunningText(Stopping(stops))
        assert text.add_until_stop([b"go s", b"top now"]) == ("go stop"[: -len(found) - (found == "to")], 2)
        assert text.stop == found


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_stop_counts_behind_the_least_tokens(pieces: list[str], stops: list[str], least: int) -> None:
    text = RunningText(Stopping(tuple(stops), min_tokens=least))
    found, taken = text.add_until_stop(piece.encode() for piece in pieces)
    whole = ""
    for number, piece in enumerate(pieces, 1):
        before, whole = len(whole), whole + piece
        ends = [stop for stop in stops if whole.find(stop, max(0, before + 1 - len(stop))) >= 0]
        if number > least and ends:
            assert (taken, text.stop in ends) == (number, True)
            assert whole.startswith(found + str(text.stop))
            return
    assert (found + text.end(), taken, text.stop) == (whole, len(pieces), None)


def test_character_that_is_cut_off_has_no_text() -> None:
    pieces = [b"a\xf0\x9f", b"", b"\xff", b"b", b"\xf0", b"\x9f\xa6"]
    text = RunningText()
    assert [*map(text.add, pieces), text.end()] == ["a", "", "", "\ufffd\ufffdb", "", "", ""]
    whole = RunningText()
    assert [whole.add("\ufffd".encode()), whole.add(b"c"), whole.end()] == ["", "\ufffdc", ""]
