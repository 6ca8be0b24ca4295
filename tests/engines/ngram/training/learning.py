"""Learning: what the ngram engine's tables hold, from a text: tokens, contexts counted and mixed to probabilities."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenbus.engines.ngram.model import ABSENT, WIDTH, Logprobs, Tables
from tokenbus.engines.ngram.tokenizer import BYTES, CHUNKS, Tokenizer
from tokenbus.engines.sampling import Floats, Ids

DISCOUNT = 0.4
"""What is taken from each count for what was never seen there."""
CONTINUATIONS = (WIDTH, 16, 8)
"""By a context's length, how many of the tokens that followed it are remembered; the target looks at three tokens."""
_LETTER_GROUPS = 400
_LONGEST_GROUP = 4


def documents() -> list[str]:
    """Return the texts beside this module, short prose and talk written for it: a line for each paragraph."""
    sources = sorted(Path(__file__).with_name("text").glob("*.txt"))
    texts = [part for source in sources for part in source.read_text("utf-8").split("\n---\n")]
    return ["\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")) for text in texts]


def learned(texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of some texts: their words, the commonest groups of letters, and all bytes.

    The more frequent a token, the lower its id.
    """
    counts = Counter(chunk.encode() for text in texts for chunk in CHUNKS.findall(text))
    groups: Counter[bytes] = Counter()
    for word in counts:
        for begin in range(len(word)):
            for end in range(begin + 2, min(len(word), begin + _LONGEST_GROUP) + 1):
                groups[word[begin:end]] += end - begin - 1
    for group, _ in sorted(groups.items(), key=lambda item: (-item[1], item[0]))[:_LETTER_GROUPS]:
        counts.setdefault(group, 0)
    for byte in range(BYTES):
        counts.setdefault(bytes([byte]), 0)
    # Those that never occur come last, the longer first: they spell what is likelier.
    return Tokenizer(sorted(counts, key=lambda piece: (-counts[piece], -len(piece), piece)))


class Level(NamedTuple):
    """The contexts of one length, which are numbered on from those of the level before."""

    first: int
    """The number of the first one."""
    parents: Ids
    """Of contexts: the one without the oldest token."""
    prefixes: Ids
    """Of contexts: the one without the newest token; absent for those of one token."""
    newest: Ids
    """Of contexts: the newest token."""
    totals: Ids
    """Of contexts: how often something came after it."""
    kinds: Ids
    """Of contexts: how many different tokens did."""
    next_ids: Ids
    """Of contexts, a line each: the most frequent of those, ties by the lower id, then absent."""
    next_counts: Ids
    """Of contexts, a line each: how often each of them came."""


class Counts(NamedTuple):
    """What was counted in a text."""

    vocabulary_size: int
    single: Ids
    """Of tokens: how often each occurs."""
    levels: list[Level]
    """By length, from one token up. Every token is a context of one, whether it occurs or not."""


def counted(texts: Sequence[Sequence[int]], end_token: int, continuations: Sequence[int]) -> Counts:
    """Count contexts of one token, two tokens and so on, and what most often follows each: as many as are asked for.

    Each text begins and ends with the end token, and no context reaches back over one.
    """
    tokens = np.array([end_token, *(token for text in texts for token in (*text, end_token))], np.int64)
    size = end_token + 1
    single = np.bincount(tokens[1:], minlength=size)
    contexts = tokens  # of places in the text: the context of the current length that ends there
    levels = [_level(0, contexts, tokens, _alone(size), continuations[0])]
    first = size
    for most in continuations[1:]:
        before = np.concatenate([[ABSENT], contexts[:-1]])
        keys = np.where((before == ABSENT) | (tokens == end_token), ABSENT, before * size + tokens)
        found, places, numbers = np.unique(keys, return_index=True, return_inverse=True)
        has_absent = int(found[0] == ABSENT)
        places = places[has_absent:]
        ancestry = _Ancestry(contexts[places], before[places], tokens[places])
        contexts = np.where(keys == ABSENT, ABSENT, numbers - has_absent + first)
        levels.append(_level(first, contexts, tokens, ancestry, most))
        first += places.size
    return Counts(size, single, levels)


class _Ancestry(NamedTuple):
    parents: Ids
    prefixes: Ids
    newest: Ids


def _alone(size: int) -> _Ancestry:
    absent = np.full(size, ABSENT, np.int64)
    return _Ancestry(absent, absent, np.arange(size))


def _level(first: int, contexts: Ids, tokens: Ids, ancestry: _Ancestry, continuations: int) -> Level:
    """Count what comes after each context."""
    rows = ancestry.newest.size
    size = int(tokens.max()) + 1
    at, then = contexts[:-1], tokens[1:]
    keys, counts = np.unique(((at - first) * size + then)[at != ABSENT], return_counts=True)
    owners, followers = np.divmod(keys, size)
    order = np.lexsort((followers, -counts, owners))
    owners, followers, counts = owners[order], followers[order], counts[order]
    kinds = np.bincount(owners, minlength=rows)
    totals = np.bincount(owners, counts, minlength=rows).astype(np.int64)
    places = np.arange(owners.size) - np.repeat(np.cumsum(kinds) - kinds, kinds)
    near = places < continuations
    next_ids = np.full((rows, continuations), ABSENT, np.int64)
    next_counts = np.zeros((rows, continuations), np.int64)
    next_ids[owners[near], places[near]] = followers[near]
    next_counts[owners[near], places[near]] = counts[near]
    return Level(first, *ancestry, totals, kinds, next_ids, next_counts)


def mixed(counts: Counts, width: int) -> tuple[Ids, Logprobs]:
    """Return of every context the likeliest tokens, ties by the lower id, and their logprobs.

    What followed a context has a discounted share, and the rest is shared out as its parent's line says (Chen and
    Goodman's absolute discounting). A line is cut to its width and made to sum to one again before its children take
    from it, so the model of a lower order is part of that of a higher one.
    """
    order = np.lexsort((np.arange(counts.vocabulary_size), -counts.single))[:width]
    ids = order[None, :]
    masses = _to_one(counts.single[order].astype(np.float64)[None, :])
    all_ids, all_masses = [], []
    before = 0
    for level in counts.levels:
        parents = np.zeros(level.parents.size, np.int64) if level.first == 0 else level.parents - before
        ids, masses = _with_own(level, ids[parents], masses[parents], width)
        all_ids.append(ids)
        all_masses.append(masses)
        before = level.first
    ids, logprobs = np.concatenate(all_ids), np.log(np.concatenate(all_masses)).astype(np.float32)
    # Two that were not equal may be so as float32, and then the lower id comes first.
    order = np.lexsort((ids, -logprobs), axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)


def _with_own(level: Level, ids: Ids, masses: Floats, width: int) -> tuple[Ids, Floats]:
    """Add what followed the contexts themselves to what their parents make likely."""
    totals = np.maximum(level.totals, 1).astype(np.float64)
    left = np.where(level.totals > 0, DISCOUNT * level.kinds / totals, 1.0)
    masses = masses * left[:, None]
    own = np.where(level.next_ids == ABSENT, 0.0, (level.next_counts - DISCOUNT) / totals[:, None])
    same = level.next_ids[:, :, None] == ids[:, None, :]
    masses = masses + (own[:, :, None] * same).sum(1)
    # A continuation that the parent has too is counted there, and is no candidate of its own.
    alone = np.where(same.any(2) | (level.next_ids == ABSENT), -1.0, own)
    ids, masses = np.concatenate([ids, level.next_ids], 1), np.concatenate([masses, alone], 1)
    order = np.lexsort((ids, -masses), axis=1)[:, :width]
    return np.take_along_axis(ids, order, 1), _to_one(np.take_along_axis(masses, order, 1))


def _to_one(masses: Floats) -> Floats:
    return np.asarray(masses / masses.sum(1, keepdims=True))


def learned_tables(tokenizer: Tokenizer, texts: Sequence[str]) -> Tables:
    """Return a model's tables, as it learns them from texts."""
    counts = counted([tokenizer.encode(text) for text in texts], tokenizer.end_token, CONTINUATIONS)
    ids, logprobs = mixed(counts, WIDTH)
    deeper = counts.levels[1:]
    keys = [level.prefixes * counts.vocabulary_size + level.newest for level in deeper]
    numbers = [np.arange(level.first, level.first + level.newest.size) for level in deeper]
    # One more that is never searched for, so that a search always ends at something.
    joined = np.concatenate([*keys, [np.iinfo(np.int64).max]])
    order = np.argsort(joined)
    return Tables(
        ids=ids,
        logprobs=logprobs,
        parents=np.concatenate([level.parents for level in counts.levels]),
        keys=joined[order],
        numbers=np.concatenate([*numbers, [ABSENT]])[order],
        ends=np.array([level.first + level.newest.size for level in counts.levels]),
    )


def save(path: Path, tokenizer: Tokenizer, tables: Tables) -> None:
    """Write a model's tables and its tokenizer."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.end_token)]
    small = tables._replace(ids=tables.ids.astype(np.int16), parents=tables.parents.astype(np.int32))
    np.savez_compressed(
        path,
        pieces=np.frombuffer(b"".join(pieces), np.uint8),
        piece_ends=np.cumsum([len(piece) for piece in pieces]),
        **small._asdict(),
    )
