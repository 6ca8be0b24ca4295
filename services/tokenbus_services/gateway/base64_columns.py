"""Columns: a choice's tokens as base64 of little-endian arrays, for those who want no numbers in JSON."""

from binascii import b2a_base64
from collections.abc import Sequence

import numpy as np

from tokenbus_services.gateway.rendered_step import RenderedStep

_TYPES = ("<u4", "<f4", "<u4", "<u4", "<f4")
_NAMES = (b"token_ids", b"logprobs", b"ranks", b"top_token_ids", b"top_logprobs")


class Columns:
    """`columns`: how many tokens, how many alternatives each has, and five arrays."""

    is_empty = False

    def __init__(self, name: bytes = b'"columns":') -> None:
        """Take the member's name."""
        self.name = name

    def take(self, view: RenderedStep, place: int, count: int) -> tuple[bytes, ...]:
        """Return the bytes of the five arrays, and before them how many alternatives each token has, in four bytes."""
        batch, top_k = view.batch, view.top_ks[place]
        begin, scored, at = view.begins[place], view.scored_begins[place], view.alternative_begins[place]
        kept = min(count, view.scored[place])
        arrays = (
            batch.token_ids[begin : begin + count],
            batch.logprobs[scored : scored + kept],
            batch.ranks[scored : scored + kept],
            batch.alternative_token_ids[at : at + kept * top_k],
            batch.alternative_logprobs[at : at + kept * top_k],
        )
        tops = np.full(count, top_k, "<u1").tobytes()
        return (tops, *(array.astype(kind, copy=False).tobytes() for array, kind in zip(arrays, _TYPES, strict=True)))

    def joined(self, pieces: Sequence[tuple[bytes, ...]]) -> bytes:
        """Return the object."""
        tops, *arrays = pieces[0] if len(pieces) == 1 else map(b"".join, zip(*pieces, (b"",) * 6, strict=False))
        members = [b'"tokens":%d,"top_ks":"%b"' % (len(tops), b2a_base64(tops, newline=False))]
        for name, array in zip(_NAMES, arrays, strict=True):
            members.append(b'"%b":"%b"' % (name, b2a_base64(array, newline=False)))
        return b"{" + b",".join(members) + b"}"
