"""Writers of the JSON members of a choice except its text: logprobs in each API's format, token ids and columns."""

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
import orjson

from tokenbus.delivery.step import TokenExtras as Extras
from tokenbus.delivery.step import extras_by_token
from tokenbus.gateway.buffers import Collected
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.rendered_step import VALUE_BYTES, RenderedStep, numbers_as_json
from tokenbus.gateway.vocabulary import Tables, Vocabulary
from tokenbus_contracts import PromptScores

Piece = tuple[bytes | memoryview, ...]
"""The elements that a row, or a part of a prompt, adds to each list of a JSON member. An empty piece adds none."""
_NULL = b"null"
_EMPTY, _EMPTY_KEY = b'""', b',"":'
_ID_ENTRY = b'{"token_id":%d,"logprob":%b,"rank":%b}'
_MOST_VALUES, _VALUES_OF_POSITION = 4096, 4
"""Number of values of a prompt that are written before other tasks run.

A position counts as 4 values, and each alternative as one value.
"""
_COLUMNS = (b"top_ks", b"token_ids", b"logprobs", b"ranks", b"top_token_ids", b"top_logprobs")


Written = bytes | bytearray
"""A part of an answer. If the part is a bytearray, it is the buffer in which the part was collected."""


class MemberWriter(Protocol):
    """Writes one JSON member of a choice from the pieces of its rows. The member has one list or several lists."""

    name: bytes
    form: bytes = b"[%b]"
    """A template of the member's JSON value, with a `%b` for each list."""
    separator: bytes = b","
    is_empty: bool = False

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:  # noqa: ARG002
        """Return the piece for the first `count` tokens of a row."""
        return ()

    def echo(self, prompt: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary) -> Iterable[Piece]:  # noqa: ARG002
        """Return the pieces of an echoed prompt, computed when they are read. The default has no pieces."""
        return ()

    def joined(self, piece: Piece) -> bytes:
        return self.form % (piece or (b"",) * self.form.count(b"%b"))

    def lists(self) -> list[Collected]:
        return [Collected(self.separator) for _ in range(self.form.count(b"%b"))]

    def written(self, lists: Sequence[Collected]) -> Iterator[Written]:
        """Yield the member's JSON value from the lists, and empty the lists."""
        first, *others = self.form.split(b"%b")
        yield first
        for list_, text in zip(lists, others, strict=True):
            yield from list_.taken()
            yield text


class NoLogprobs(MemberWriter):
    """Writes `logprobs` as null."""

    name = b'"logprobs":'
    is_empty = True
    form = _NULL


class Drafted(MemberWriter):
    """Applies another writer to the draft model's proposals. Rows without proposals give null."""

    def __init__(self, writer: MemberWriter) -> None:
        self.name, self.form, self.separator = writer.name, writer.form, writer.separator
        self._writer = writer

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:  # noqa: ARG002 - all proposals
        found = step.drafted(row)
        if found is None:
            return ()
        draft, proposed = found
        return self._writer.take(draft, proposed, draft.counts[proposed])

    def joined(self, piece: Piece) -> bytes:
        return self._writer.joined(piece) if piece else _NULL

    def written(self, lists: Sequence[Collected]) -> Iterator[Written]:
        return self._writer.written(lists) if lists[0] else iter((_NULL,))


class TokenIds(MemberWriter):
    """Writes `token_ids` as a list."""

    name = b'"token_ids":'

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        return (b",".join([b"%d" % token_id for token_id in step.row_ids(row)[:count]]),)


@dataclass
class Lists(MemberWriter):
    """Writes logprobs in the format of completions: parallel lists, and an object of alternatives for each token."""

    form = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}'
    progress: EventStream
    name: bytes = b'"logprobs":'
    has_alternatives: bool = True
    shows_special: bool = False
    names_ids: bool = False
    are_given: bool = False

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        begin = step.begins[row]
        end = begin + count
        characters = step.special_character_begins if self.shows_special else step.character_begins
        before = self.progress.characters - characters[begin]
        self.progress.characters = before + characters[end]
        offsets = b",".join([b"%d" % (before + offset) for offset in characters[begin:end]])
        if self.has_alternatives and not self.names_ids and count == step.counts[row]:
            rendered = step.rendered(row, step.vocabulary.key_fragments)
            if rendered is not None:
                return (*rendered, offsets)
        logprobs = _logprobs(step, row, count)
        ids, tables = step.ids[begin:end], _tables(step, names_ids=self.names_ids)
        names = [tables.texts[token_id] for token_id in ids]
        if self.are_given:
            tops = [
                _NULL if given is None else b"{%b}" % b"".join(chain((name, b":", logprob), *given))
                for name, logprob, given in zip(names, logprobs, _given(step, row, count, tables.keys), strict=True)
            ]
        elif self.has_alternatives:
            tops = self._tops(step, row, ids, logprobs, tables)
        elif step.scored[row]:  # as in vLLM, the sampled token is always an alternative
            tops = [b"{%b:%b}" % pair for pair in zip(names, logprobs, strict=True)]
        else:
            tops = [_NULL] * count
        return b",".join(names), b",".join(logprobs), b",".join(tops), offsets

    def echo(self, prompt: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary) -> Iterable[Piece]:
        tables = vocabulary.id_tables if self.names_ids else vocabulary.tables
        return () if scores is None else _echoed(prompt, scores, vocabulary, tables)

    @staticmethod
    def _tops(step: RenderedStep, row: int, ids: list[int], logprobs: list[bytes], tables: Tables) -> list[bytes]:
        top_k = step.top_ks[row]
        if not top_k:  # the worker dropped the alternatives, or the row is not scored
            return [_NULL] * len(ids)
        at, keys, texts = 0, tables.keys, tables.texts
        pairs = step.alternatives(row, keys)
        tops = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            key, others = keys[token_id], pairs[at : at + 2 * top_k]
            # Name the token here as in the list of tokens.
            members = [_EMPTY_KEY if texts[token_id] == _EMPTY else key, logprob]
            for other, value in zip(others[0::2], others[1::2], strict=True):
                if other != key:
                    members += (other, value)
            tops.append(b"{%b}" % b"".join(members)[1:])
            at += 2 * top_k
        return tops


@dataclass
class Entries(MemberWriter):
    """Writes logprobs in the format of chats: an object for each token, which contains its alternatives."""

    name: bytes = b'"logprobs":'
    form: bytes = b'{"content":[%b],"refusal":null}'
    names_ids: bool = False
    are_given: bool = False

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        if not count:
            return ()
        is_special = self.names_ids or self.are_given or count != step.counts[row]
        rendered = None if is_special else step.rendered(row, step.vocabulary.entry_fragments)
        if rendered is not None:
            return rendered
        table, top_k = _tables(step, names_ids=self.names_ids).entries, step.top_ks[row]
        own = list(zip(map(table.__getitem__, step.row_ids(row)), _logprobs(step, row, count), strict=False))
        tops = [b""] * count
        if self.are_given:
            given = zip(own, _given(step, row, count, table), strict=True)
            tops = [b"" if others is None else b"".join(chain(token, *others)) for token, others in given]
        elif top_k:
            entries, size = step.alternatives(row, table), 2 * top_k
            tops = [b"".join(entries[size * token : size * (token + 1)]) for token in range(count)]
        written = [
            b'%b%b,"top_logprobs":[%b]' % (*token, top and top[2:] + b"}") for token, top in zip(own, tops, strict=True)
        ]
        return (b"".join(written)[2:] + b"}",)


@dataclass
class IdEntries(Entries):
    """Writes logprobs in the format of /inference/v1/generate, which resembles that of chats but uses token ids."""

    form: bytes = b'{"content":[%b]}'

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        top_k, begin, scored = step.top_ks[row], step.begins[row], step.scored_begins[row]
        ranks = [b"%d" % rank for rank in step.ranks[scored : scored + count]] if step.scored[row] else [_NULL] * count
        numbers = step.vocabulary.numbers
        written = step.alternatives(row, numbers) if top_k else []
        others = list(zip(map(int, written[0::2]), written[1::2], strict=True))
        given = _given(step, row, count, numbers) if self.are_given else [None] * count
        entries: list[bytes] = []
        for token_id, logprob, rank, named in zip(
            step.ids[begin : begin + count], _logprobs(step, row, count), ranks, given, strict=True
        ):
            own, at = _ID_ENTRY % (token_id, logprob, rank), top_k * len(entries)
            tops = [own]
            for number, (other, value) in enumerate(others[at : at + top_k], 1):
                if other != token_id:
                    tops.append(_ID_ENTRY % (other, value, b"%d" % number))
            # Alternatives that the request chose have no rank.
            tops = tops[: top_k or 1] + [_ID_ENTRY % (int(other), value, _NULL) for other, value in named or ()]
            entries.append(b'%b,"top_logprobs":[%b]}' % (own[:-1], b",".join(tops)))
        return (b",".join(entries),)


class TokenExtras(MemberWriter):
    """Writes `token_extras`: for each token, an object with the `Extras` from the worker, or null."""

    name = b'"token_extras":'

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        found = extras_by_token(step.batch.row(row).extras, count)
        return (b",".join([_NULL if each is None else _extras_object(each) for each in found[:count]]),)

    def echo(self, prompt: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary) -> Iterable[Piece]:  # noqa: ARG002
        return ((b",".join([_NULL] * len(prompt)),),)


def _extras_object(extras: Extras) -> bytes:
    members: dict[str, Any] = {}
    if extras.other_logprob is not None:
        members["other_logprob"] = np.float32(extras.other_logprob)
    if extras.entropy is not None:
        members["entropy"] = np.float32(extras.entropy)
    if extras.given_logprobs:
        members["logprobs"] = {str(token_id): np.float32(value) for token_id, value in extras.given_logprobs}
    if extras.mask_size is not None:
        members |= {"mask_size": extras.mask_size, "mask": extras.mask}
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)


class Columns(MemberWriter):
    """Writes the number of tokens, and six columns such as `logprobs` as little-endian arrays in base64."""

    form = b",".join([b'"%b":"%%b"' % name for name in _COLUMNS])
    separator = b""

    def __init__(self, name: bytes = b'"columns":') -> None:
        self.name = name

    def take(self, step: RenderedStep, row: int, count: int) -> Piece:
        ids, logprobs, ranks, other_ids, other_logprobs = step.column_bytes
        top_k, scored = step.top_ks[row], min(count, step.scored[row])
        begin, begin_scored, begin_other = step.begins[row], step.scored_begins[row], step.alternative_begins[row]
        own = slice(VALUE_BYTES * begin_scored, VALUE_BYTES * (begin_scored + scored))
        other = slice(VALUE_BYTES * begin_other, VALUE_BYTES * (begin_other + scored * top_k))
        return (
            bytes([top_k]) * count,
            ids[VALUE_BYTES * begin : VALUE_BYTES * (begin + count)],
            *(logprobs[own], ranks[own], other_ids[other], other_logprobs[other]),
        )

    def joined(self, piece: Piece) -> bytes:
        columns = piece or (b"",) * len(_COLUMNS)
        encoded = tuple([b2a_base64(each, newline=False) for each in columns])
        return b'{"tokens":%d,%b}' % (len(columns[0]), self.form % encoded)

    def written(self, lists: Sequence[Collected]) -> Iterator[Written]:
        yield b'{"tokens":%d' % lists[0].length
        for name, list_ in zip(_COLUMNS, lists, strict=True):
            yield b',"%b":"' % name
            yield from _in_base64(list_.taken())
            yield b'"'
        yield b"}"


def _in_base64(parts: Iterable[bytearray]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        data = rest + part
        whole = len(data) // 3 * 3
        yield b2a_base64(memoryview(data)[:whole], newline=False)
        rest = data[whole:]
    yield b2a_base64(rest, newline=False)


def prompt_logprobs(scores: PromptScores, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yield the elements of vLLM's `prompt_logprobs`, some tokens of the prompt at a time.

    An unscored token gives null. A scored token gives an object that maps token ids to logprob, rank and text.
    """
    yield b",".join([b"null"] * scores.position)
    entry = b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
    for part in _parts(scores):
        objects = []
        for token_id, own, rank, others in part:
            ranked: dict[int, tuple[bytes, int | None]] = {token_id: (own, rank)}
            for number, (other, logprob) in enumerate(others, 1):
                ranked.setdefault(other, (logprob, None if scores.are_named else number))
            entries = [
                entry % (each, logprob, orjson.dumps(number), vocabulary.texts[each])
                for each, (logprob, number) in ranked.items()
            ]
            objects.append(b"{%b}" % b",".join(entries))
        yield b",".join(objects)


def _echoed(prompt: Sequence[int], scores: PromptScores, vocabulary: Vocabulary, tables: Tables) -> Iterator[Piece]:
    """Yield the elements of the four lists of a completion, some tokens of the prompt at a time.

    The first token has no logprob. Each later token is listed among its alternatives.
    """
    texts, characters = tables.texts, vocabulary.characters
    yield texts[prompt[0]], b"null", b"null", b"0"
    offset = characters[prompt[0]]
    for part in _parts(scores):
        names = [texts[token_id] for token_id, *_ in part]
        tops = []
        for name, (_, own, _, others) in zip(names, part, strict=True):
            members = {name: own} | {texts[other]: logprob for other, logprob in others} | {name: own}
            tops.append(b"{%b}" % b",".join([b"%b:%b" % member for member in members.items()]))
        *offsets, offset = accumulate((characters[token_id] for token_id, *_ in part), initial=offset)
        logprobs = b",".join([own for _, own, *_ in part])
        yield b",".join(names), logprobs, b",".join(tops), b",".join([b"%d" % each for each in offsets])


def _parts(scores: PromptScores) -> Iterator[list[tuple[int, bytes, int, list[tuple[int, bytes]]]]]:
    """Yield lists of positions. A position is a tuple of the token, its logprob, its rank and its alternatives."""
    width = scores.alternative_logprobs.shape[1]
    at_once = max(1, _MOST_VALUES // (_VALUES_OF_POSITION + width))
    for begin in range(0, scores.token_ids.size, at_once):
        part = slice(begin, begin + at_once)
        ids, logprobs, ranks = scores.token_ids[part], numbers_as_json(scores.logprobs[part]), scores.ranks[part]
        flat = scores.alternative_token_ids[part].ravel().tolist()
        pairs = list(zip(flat, numbers_as_json(scores.alternative_logprobs[part].ravel()), strict=True))
        others = [pairs[width * number : width * (number + 1)] for number in range(ids.size)]
        yield list(zip(ids.tolist(), logprobs, ranks.tolist(), others, strict=True))


def _given(
    step: RenderedStep, row: int, count: int, table: Mapping[int, bytes]
) -> list[list[tuple[bytes, bytes]] | None]:
    """Return the logprobs of the tokens that the request chose, for each token of a row. `table` maps ids to names.

    The entry for a token of the row is None if the worker dropped the extras.
    """
    ids = step.ids[step.begins[row] :]
    found: list[list[tuple[bytes, bytes]] | None] = []
    for token_id, extras in zip(ids, extras_by_token(step.batch.row(row).extras, count)[:count], strict=False):
        if extras is None:
            found.append(None)
            continue
        # The sampled token precedes the chosen tokens.
        others = {other: logprob for other, logprob in extras.given_logprobs if other != token_id}
        values = numbers_as_json(np.array(list(others.values()), np.float32))
        found.append(list(zip(map(table.__getitem__, others), values, strict=True)))
    return found


def _tables(step: RenderedStep, *, names_ids: bool) -> Tables:
    return step.vocabulary.id_tables if names_ids else step.vocabulary.tables


def _logprobs(step: RenderedStep, row: int, count: int) -> list[bytes]:
    if not step.scored[row]:
        return [_NULL] * count
    begin = step.scored_begins[row]
    return step.logprobs[begin : begin + count]
