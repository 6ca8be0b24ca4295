"""Messages that keep the contract, of every shape, made in plain Python with the generated classes alone.

They are made from a `random.Random`, here and in the modules beside this one: a seed makes a message again.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from tokenbus_contracts.generated import logprob_batch_pb2 as pb


class Sizes(NamedTuple):
    """The most rows of a message, and the most tokens and alternatives of a row."""

    rows: int = 4
    tokens: int = 3
    top_k: int = 9


_ID_END = 2**31 - 1
_RANK_MAX = 2**31 - 1
_LOWEST = -(2 - 2**-23) * 2.0**127
_LOGPROBS = (0.0, -0.0, -(2.0**-149), -0.5, -2.0, -2.0 - 2**-22, -9999.0, _LOWEST)
_LOGITS = (-_LOWEST, 88.5, 2.0**-149, *_LOGPROBS)
_GRID = tuple(-step / 256 for step in range(5000))
# The generated classes take any number for an enum, the stubs only the names.
_PHASES: tuple[Any, ...] = (pb.STEP_PHASE_PREFILL, pb.STEP_PHASE_DECODE, pb.STEP_PHASE_MIXED)
_METHODS: tuple[Any, ...] = (pb.SPECULATIVE_METHOD_NONE, pb.SPECULATIVE_METHOD_MTP, 8, 127)
_VALUE_KINDS: tuple[Any, ...] = tuple(pb.ValueKind.values())
_MAY_HAVE_NO_TOKENS: tuple[Any, ...] = tuple(pb.RowStatus.values()[2:])
_MAY_HAVE_TOKENS: tuple[Any, ...] = (
    pb.ROW_STATUS_ACTIVE,
    pb.ROW_STATUS_HANDED_OFF,
    pb.ROW_STATUS_FINISHED_STOP,
    pb.ROW_STATUS_FINISHED_LENGTH,
)
_MAY_PROPOSE = (pb.ROW_STATUS_ACTIVE, pb.ROW_STATUS_HANDED_OFF)


def canonical(message: pb.LogprobBatch) -> bytes:
    return message.SerializeToString(deterministic=True)


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - it makes test data, and the same each time


def valid_message(rng: Random, sizes: Sizes = Sizes()) -> pb.LogprobBatch:  # noqa: B008 - it is immutable
    rows = rng.randint(0, sizes.rows)
    message = pb.LogprobBatch(header=_header(rng, rows, sizes))
    keys = range(1, 4 * sizes.rows + 2)
    base = rng.choice((0, 2**63, 2**64 - 1 - keys[-1]))
    message.request_ids.extend(base + key for key in rng.sample(keys, rows))
    # From a short range, or from as far as the step goes, so that its last place is met too.
    places = range(message.header.step_rows)
    indices = rng.sample(places[-2 * rows :] if rng.random() < 0.5 else places, rows)
    message.batch_indices.extend(sorted(indices) if rng.random() < 0.5 else indices)
    alike = _scoring(rng, message.header, sizes) if rng.random() < 0.5 else None
    for _ in range(rows):
        _add_row(rng, message, sizes, alike or _scoring(rng, message.header, sizes))
    if rng.random() < 0.5:
        stopped = list(message.statuses).count(pb.ROW_STATUS_FINISHED_STOP)
        message.stops.extend(rng.choice((0, 1, 2, 17)) for _ in range(stopped))
    if rng.random() < 0.5:
        _add_extras(rng, message)
    return message


def header_of(rows: int) -> pb.BatchHeader:
    return pb.BatchHeader(
        schema_major=1, worker_id="w", epoch=1, sequence=1, step=1, part_count=1, step_rows=rows,
        kind=pb.BATCH_KIND_TARGET, phase=pb.STEP_PHASE_DECODE, method=pb.SPECULATIVE_METHOD_MTP,
        value_kind=pb.VALUE_KIND_RAW_LOGPROBS,
    )  # fmt: skip


def uniform_message(rows: int) -> pb.LogprobBatch:
    """Return a message that is valid, but for its size, with rows that carry nothing."""
    return pb.LogprobBatch(
        header=header_of(rows), request_ids=range(1, rows + 1), batch_indices=range(rows), positions=[0] * rows,
        statuses=[pb.ROW_STATUS_IDLE] * rows, token_counts=bytes(rows), draft_token_counts=bytes(rows),
        proposal_counts=bytes(rows), scorings=[pb.SCORING_NONE] * rows, top_ks=bytes(rows),
    )  # fmt: skip


def _header(rng: Random, rows: int, sizes: Sizes) -> pb.BatchHeader:
    part_count = rng.choice((1, 1, 2, 64))
    selection = rng.random() < 0.25
    whole = part_count == 1 and not selection
    kind = rng.choice((pb.BATCH_KIND_TARGET, pb.BATCH_KIND_TARGET, pb.BATCH_KIND_DRAFT))
    return pb.BatchHeader(
        schema_major=1,
        schema_minor=rng.choice((0, 1, 2**32 - 1)),
        worker_id=rng.choice(("w", "decode-0", "w" * 64, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 32)),
        epoch=rng.choice((1, 2**64 - 1)),
        sequence=rng.choice((1, 300, 2**64 - 1)),
        step=rng.choice((1, 2**35, 2**64 - 1)),
        part_index=rng.choice((0, part_count - 1)),
        part_count=part_count,
        step_rows=rows if whole else rng.choice((rows, rows + 1, rows + 200, 2**16)),
        selection=selection,
        kind=kind,
        phase=rng.choice(_PHASES),
        method=rng.choice(_METHODS),
        value_kind=rng.choice(_VALUE_KINDS),
        tp_rank=rng.choice((0, 65535)),
        dp_rank=rng.choice((0, 65535)),
        vocabulary_size=rng.choice((0, max(sizes.top_k, 1), 1000, _RANK_MAX)),
        weight_version=rng.choice((0, 2**64 - 1)),
        produced_at_ns=rng.choice((0, 1_700_000_000_000_000_000)),
        draft_follows=kind == pb.BATCH_KIND_TARGET and rng.random() < 0.5,
    )


def _scoring(rng: Random, header: pb.BatchHeader, sizes: Sizes) -> tuple[Any, int]:
    if header.value_kind == pb.VALUE_KIND_UNSPECIFIED:
        return pb.SCORING_NONE, 0
    scoring = rng.choice((pb.SCORING_FULL, pb.SCORING_FULL, pb.SCORING_NONE, pb.SCORING_SHED))
    return scoring, rng.randint(0, sizes.top_k) if scoring == pb.SCORING_FULL else 0


def _add_row(rng: Random, message: pb.LogprobBatch, sizes: Sizes, scored: tuple[Any, int]) -> None:
    scoring, top_k = scored
    count = rng.randint(0, sizes.tokens)
    status = rng.choice(_MAY_HAVE_TOKENS if count else _MAY_HAVE_NO_TOKENS)
    draft = message.header.kind == pb.BATCH_KIND_DRAFT
    proposals = 0 if draft or status not in _MAY_PROPOSE else rng.choice((0, 1, sizes.tokens))
    message.positions.append(rng.choice((0, 7, _RANK_MAX)))
    message.statuses.append(status)
    message.token_counts.append(count)
    message.draft_token_counts.append(0 if draft else rng.randint(0, sizes.tokens))
    message.proposal_counts.append(proposals)
    message.scorings.append(scoring)
    message.top_ks.append(top_k)
    ids_end = message.header.vocabulary_size or _ID_END
    message.proposal_token_ids.extend(rng.choice((0, ids_end - 1)) for _ in range(proposals))
    for _ in range(count):
        token = _token(rng, message.header, top_k)
        message.token_ids.append(token.id)
        message.alternative_token_ids.extend(token.ids)
        message.alternative_logprobs.extend(token.values)
        if scoring != pb.SCORING_NONE:
            message.logprobs.append(token.value)
            message.ranks.append(token.rank)


def _add_extras(rng: Random, message: pb.LogprobBatch) -> None:
    """Add what rows asked for beyond their logprobs: of each kind for all rows, for some, or for none."""
    ids_end = message.header.vocabulary_size or _ID_END
    values = _palette(rng, message.header)
    has_kinds, has_given, has_masks = (rng.random() < 0.6 for _ in range(3))
    for count, scoring in zip(message.token_counts, message.scorings, strict=True):
        is_full = scoring == pb.SCORING_FULL
        kinds = rng.randint(0, 3) if has_kinds and scoring != pb.SCORING_NONE else 0
        given = rng.choice((0, 1, 3, 128)) if has_given and is_full else 0
        bound = rng.choice((0, 1, 3, 1024)) if has_masks and is_full else 0
        message.extras.extend([kinds] * has_kinds)
        message.given_counts.extend([given] * has_given)
        message.mask_bounds.extend([bound] * has_masks)
        message.given_token_ids.extend(rng.choice((0, ids_end - 1)) for _ in range(given))
        message.given_logprobs.extend(rng.choices(values, k=count * given))
        message.other_logprobs.extend(rng.choices(values, k=count if kinds & 1 else 0))
        message.entropies.extend(rng.choices((0.0, -0.0, 2.0**-149, 1.5, -_LOWEST), k=count if kinds & 2 else 0))
        for _ in range(count if bound else 0):
            size = rng.choice((1, min(bound, ids_end), min(bound + 1, ids_end), ids_end))
            message.mask_sizes.append(size)
            message.mask_token_ids.extend(sorted(rng.sample(range(ids_end), size)) if size <= bound else ())


def _palette(rng: Random, header: pb.BatchHeader) -> Sequence[float]:
    logits = header.value_kind in (pb.VALUE_KIND_RAW_LOGITS, pb.VALUE_KIND_PROCESSED_LOGITS)
    return rng.choice((_LOGITS if logits else _LOGPROBS, _GRID))


class _Token(NamedTuple):
    id: int
    value: float
    rank: int
    ids: Sequence[int] = ()
    values: Sequence[float] = ()


def _token(rng: Random, header: pb.BatchHeader, top_k: int) -> _Token:
    palette = _palette(rng, header)
    last_rank = header.vocabulary_size or _RANK_MAX
    ids_end = min(header.vocabulary_size or _ID_END, rng.choice((top_k + 2, _ID_END)))
    if not top_k:
        return _Token(rng.choice((0, ids_end - 1)), rng.choice(palette), rng.choice((1, last_rank)))
    drawn = zip(rng.choices(palette, k=top_k), rng.sample(range(ids_end), top_k), strict=True)
    ranked = sorted(drawn, key=lambda pair: (-pair[0], pair[1]))
    values, ids = [value for value, _ in ranked], [token_id for _, token_id in ranked]
    unlisted = rng.randrange(ids_end)
    while unlisted in ids and ids_end > top_k:
        unlisted = (unlisted + 1) % ids_end
    place = rng.randrange(top_k)
    rank = rng.choice([other for other, value in enumerate(values, 1) if value == values[place]])
    match rng.choice(("listed", "tied", "below")) if ids_end > top_k else "listed":
        case "below":
            value, token_id = rng.choice((values[-1], min(palette))), unlisted
            rank = rng.choice((top_k + 1, last_rank))
        case how:
            value, token_id = values[place], ids[place] if how == "listed" else unlisted
    # The two zeros are one value.
    return _Token(token_id, -value if not value and rng.random() < 0.5 else value, rank, ids, values)
