"""One valid message, and every way to break one rule of the contract alone by changing one value in it."""

from typing import Any

from tests.contracts.strategies import canonical
from tests.contracts.valid_messages import header_of
from tokenbus_contracts.generated import logprob_batch_pb2 as pb


def four_rows() -> pb.LogprobBatch:
    """Return a message whose rows differ in status and scoring, so that each rule has something to be broken by."""
    header = header_of(4)
    header.vocabulary_size = 50
    return pb.LogprobBatch(
        header=header,
        request_keys=[11, 12, 13, 14],
        batch_indices=[3, 2, 1, 0],
        positions=[0, 1, 2, 3],
        statuses=[
            pb.ROW_STATUS_ACTIVE,
            pb.ROW_STATUS_IDLE,
            pb.ROW_STATUS_HANDED_OFF,
            pb.ROW_STATUS_FINISHED_STOP,
        ],
        token_counts=[2, 0, 1, 1],
        draft_token_counts=[1, 0, 0, 0],
        proposal_counts=[0, 0, 1, 0],
        scorings=[pb.SCORING_FULL, pb.SCORING_FULL, pb.SCORING_SHED, pb.SCORING_NONE],
        top_ks=[2, 0, 0, 0],
        token_ids=[5, 9, 0, 49],
        logprobs=[-0.5, -3.0, 0.0],
        ranks=[1, 5, 50],
        alternative_token_ids=[5, 7, 3, 4],
        alternative_logprobs=[-0.5, -0.5, -1.0, -2.0],
        proposal_token_ids=[49],
        stops=[2],
        extras=[3, 2, 1, 0],
        given_counts=[2, 1, 0, 0],
        mask_bounds=[3, 1, 0, 0],
        other_logprobs=[-0.5, -2.0, 0.0],
        entropies=[0.0, 3.5],
        given_token_ids=[0, 49, 7],
        given_logprobs=[-1.0, -2.0, 0.0, -9999.0],
        mask_sizes=[3, 50],
        mask_token_ids=[0, 5, 49],
    )


_DELETED = object()
_NAN, _INFINITY, _SMALLEST = float("nan"), float("inf"), 2.0**-149
BREAKS: list[tuple[str, Any, str]] = [
    ("header", _DELETED, "required"),
    ("header.schema_major", 0, "version"),
    ("header.schema_major", 2, "version"),
    ("header.worker_id", "", "required"),
    ("header.worker_id", "w" * 65, "bytes"),
    ("header.worker_id", "\N{GREEK SMALL LETTER OMEGA}" * 33, "bytes"),
    ("header.epoch", 0, "min"),
    ("header.sequence", 0, "min"),
    ("header.step", 0, "min"),
    ("header.part_index", 1, "max"),
    ("header.part_count", 65, "max"),
    ("header.step_rows", 5, "length"),
    ("header.kind", 0, "min"),
    ("header.kind", 3, "named"),
    ("header.kind", pb.BATCH_KIND_DRAFT, "kind"),
    ("header.phase", 0, "min"),
    ("header.phase", 4, "named"),
    ("header.method", 0, "min"),
    ("header.method", 128, "max"),
    ("header.value_kind", 0, "scoring"),
    ("header.value_kind", 5, "named"),
    ("header.value_kind", -1, "named"),
    ("header.tp_rank", 65536, "max"),
    ("header.dp_rank", 65536, "max"),
    ("header.vocabulary_size", 2**31, "max"),
    ("header.vocabulary_size", 1, "max"),
    ("request_keys[1]", 0, "min"),
    ("request_keys[1]", 11, "unique"),
    ("batch_indices[0]", 4, "max"),
    ("batch_indices[0]", 0, "unique"),
    ("positions[0]", 2**31, "max"),
    ("statuses[0]", 0, "min"),
    ("statuses[0]", 10, "named"),
    ("statuses[0]", 128, "named"),
    ("statuses[0]", pb.ROW_STATUS_IDLE, "status"),
    ("statuses[1]", pb.ROW_STATUS_ACTIVE, "status"),
    ("statuses[2]", pb.ROW_STATUS_FINISHED_LENGTH, "status"),
    ("token_counts[0]", 1, "length"),
    ("draft_token_counts[0]", 17, "max"),
    ("draft_token_counts[0]", 2**32 - 1, "max"),
    ("proposal_counts[2]", 0, "length"),
    ("scorings[1]", 0, "min"),
    ("scorings[1]", 4, "named"),
    ("scorings[0]", pb.SCORING_SHED, "scoring"),
    ("top_ks[1]", 51, "max"),
    ("token_ids[3]", 50, "max"),
    ("logprobs[2]", _NAN, "finite"),
    ("logprobs[2]", -_INFINITY, "finite"),
    ("logprobs[2]", _SMALLEST, "max"),
    ("logprobs[0]", -0.25, "agreement"),
    ("logprobs[1]", -1.5, "agreement"),
    ("ranks[2]", 0, "min"),
    ("ranks[2]", 51, "max"),
    ("ranks[1]", 2, "agreement"),
    ("alternative_token_ids[2]", 50, "max"),
    ("alternative_token_ids[1]", 5, "order"),
    ("alternative_token_ids[3]", 9, "agreement"),
    ("alternative_logprobs[2]", _NAN, "finite"),
    ("alternative_logprobs[2]", _SMALLEST, "max"),
    ("alternative_logprobs[1]", -0.25, "order"),
    ("proposal_token_ids[0]", 50, "max"),
    ("stops[0]", 18, "max"),
    ("statuses[3]", pb.ROW_STATUS_FINISHED_LENGTH, "length"),
    ("extras[1]", 4, "max"),
    ("scorings[1]", pb.SCORING_NONE, "scoring"),
    ("scorings[1]", pb.SCORING_SHED, "scoring"),
    ("extras[0]", 1, "length"),
    ("given_counts[1]", 0, "length"),
    ("mask_bounds[1]", 1025, "max"),
    ("mask_bounds[0]", 2, "length"),
    ("other_logprobs[1]", _NAN, "finite"),
    ("other_logprobs[1]", _SMALLEST, "max"),
    ("entropies[1]", _INFINITY, "finite"),
    ("entropies[1]", -_SMALLEST, "min"),
    ("given_token_ids[1]", 50, "max"),
    ("given_logprobs[3]", -_INFINITY, "finite"),
    ("given_logprobs[2]", _SMALLEST, "max"),
    ("mask_sizes[1]", 0, "min"),
    ("mask_sizes[1]", 51, "max"),
    ("mask_sizes[0]", 2, "length"),
    ("mask_token_ids[2]", 50, "max"),
    ("mask_token_ids[1]", 0, "order"),
    *((field.name, _DELETED, "length") for field in pb.LogprobBatch.DESCRIPTOR.fields[2:] if field.name != "stops"),
]


def changed(path: str, value: object) -> bytes:
    """Return the four rows with one field, or one element of it, set to a value or deleted."""
    message = four_rows()
    target: Any = message
    *parents, last = path.rstrip("]").replace("[", ".").split(".")
    for parent in parents:
        target = getattr(target, parent)
    if value is _DELETED and last == "header":
        message.ClearField("header")
    elif value is _DELETED:
        del getattr(message, last)[-1]
    elif last.isdecimal():
        target[int(last)] = value
    else:
        setattr(target, last, value)
    return canonical(message)
