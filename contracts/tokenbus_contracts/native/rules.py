"""Fills the structs of accept.c from the schema and the limits."""

import ctypes

from google.protobuf.descriptor import FieldDescriptor

from tokenbus_contracts.generated.bounds_pb2 import TokenRule
from tokenbus_contracts.generated.enums import BatchKind, RowStatus, Scoring, ValueKind
from tokenbus_contracts.limits import Limits
from tokenbus_contracts.schema import COLUMN, COLUMNS, HEADER_KEY, HEADER_RULES, STATUS_RULES

HEADER_NUMBERS = 32
_ROLES = ("part_index", "part_count", "step_rows", "selection", "kind", "value_kind", "draft_follows")
_VARINT, _FIXED64, _TEXT = 1, 2, 3
_TYPES = {FieldDescriptor.TYPE_FIXED64: _FIXED64, FieldDescriptor.TYPE_STRING: _TEXT}
_STATUS_VALID, _NEEDS_TOKENS, _FORBIDS_TOKENS, _MAY_PROPOSE, _STOPPED = 1, 2, 4, 8, 16
_TOKEN_FLAGS = {TokenRule.TOKEN_RULE_SOME: _NEEDS_TOKENS, TokenRule.TOKEN_RULE_NONE: _FORBIDS_TOKENS}
_SCORING_VALID, _SCORED, _MAY_HAVE_ALTERNATIVES = 1, 2, 4
_SCORING_FLAGS = {
    Scoring.NONE: _SCORING_VALID,
    Scoring.FULL: _SCORING_VALID | _SCORED | _MAY_HAVE_ALTERNATIVES,
    Scoring.SHED: _SCORING_VALID | _SCORED,
}


class Rules(ctypes.Structure):
    """The fields of struct rules in accept.c."""

    _fields_ = (
        ("header_min", ctypes.c_uint64 * HEADER_NUMBERS),
        ("header_max", ctypes.c_uint64 * HEADER_NUMBERS),
        ("header_type", ctypes.c_int32 * HEADER_NUMBERS),
        ("header_key", ctypes.c_int32),
        ("column_keys", ctypes.c_int32 * len(COLUMNS)),
        *((role, ctypes.c_int32) for role in _ROLES),
        *((name, ctypes.c_int32) for name in ("vocabulary", "draft_kind", "no_value_kind")),
        ("logit_kinds", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("position_max", "rank_min", "rank_max", "token_id_max")),
        *((name, ctypes.c_uint32) for name in ("rows_max", "token_count_max", "draft_count_max", "top_k_max")),
        *((name, ctypes.c_uint32) for name in ("stop_max", "extras_max", "given_count_max", "mask_bound_max")),
        ("status_flags", ctypes.c_uint8 * 256),
        ("scoring_flags", ctypes.c_uint8 * 256),
    )


Layout = ctypes.c_uint64 * (2 + HEADER_NUMBERS + 2 * len(COLUMNS))
"""The struct layout of accept.c: the header's offset, size and values, then all columns' offsets, then all lengths."""


def rules_for(limits: Limits) -> Rules:
    rules = Rules()
    for rule in HEADER_RULES.values():
        number = rule.field.number
        rules.header_type[number] = _TYPES.get(rule.field.type, _VARINT)
        rules.header_min[number] = rule.bounds.min_bytes if rule.is_text else rule.min
        rules.header_max[number] = rule.bounds.max_bytes if rule.is_text else rule.max
    for role in _ROLES:
        setattr(rules, role, HEADER_RULES[role].field.number)
    rules.vocabulary = HEADER_RULES["vocabulary_size"].field.number
    rules.header_key = HEADER_KEY
    rules.column_keys[:] = [column.key for column in COLUMNS]
    rules.draft_kind = BatchKind.DRAFT
    rules.no_value_kind = ValueKind.UNSPECIFIED
    rules.logit_kinds = 1 << ValueKind.RAW_LOGITS | 1 << ValueKind.PROCESSED_LOGITS
    rules.position_max = COLUMN["positions"].max
    rules.rank_min, rules.rank_max = COLUMN["ranks"].min, COLUMN["ranks"].max
    rules.token_id_max = limits.max_token_id
    rules.rows_max = limits.max_rows
    rules.token_count_max = limits.max_tokens_per_row
    rules.draft_count_max = limits.max_draft_tokens_per_row
    rules.top_k_max = limits.max_top_k
    rules.stop_max = COLUMN["stops"].max
    rules.extras_max = COLUMN["extras"].max
    rules.given_count_max, rules.mask_bound_max = COLUMN["given_counts"].max, COLUMN["mask_bounds"].max
    for status, permits in STATUS_RULES.items():
        flags = _STATUS_VALID | _TOKEN_FLAGS.get(permits.tokens, 0)
        rules.status_flags[status] = flags | (_MAY_PROPOSE if permits.proposals else 0)
    rules.status_flags[RowStatus.FINISHED_STOP] |= _STOPPED
    for scoring, flags in _SCORING_FLAGS.items():
        rules.scoring_flags[scoring] = flags
    return rules
