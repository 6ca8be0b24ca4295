"""The bounds that a deployment enforces: the schema's bounds or tighter ones."""

from dataclasses import dataclass
from functools import cache

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import COLUMN, MESSAGE_BOUNDS


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch.

    `Limits.schema()` has the schema's bounds. `Limits.default()` has the defaults of a deployment. No limit may exceed
    the schema's bound.

    Raises:
        ContractError: a limit is wider than the schema's bound, or negative.

    Example:
        from dataclasses import replace

        tight = replace(tokenbus.Limits.default(), max_rows=64)
        assert tight.max_rows < tokenbus.Limits.schema().max_rows
    """

    max_message_bytes: int
    max_rows: int
    max_tokens_per_row: int
    max_draft_tokens_per_row: int
    max_top_k: int
    max_token_id: int

    def __post_init__(self) -> None:
        for name, (_, most) in _schema_bounds().items():
            value = getattr(self, name)
            if type(value) is not int:
                raise ContractError(f"limits.{name}", "a whole number", repr(value), rule=Rule.TYPE)
            if value < 0:
                raise ContractError(f"limits.{name}", 0, value, rule=Rule.MIN)
            if value > most:
                raise ContractError(f"limits.{name}", most, value, rule=Rule.MAX)

    @classmethod
    def schema(cls) -> "Limits":
        """Return the schema's bounds: the widest limits."""
        return cls(**{name: most for name, (_, most) in _schema_bounds().items()})

    @classmethod
    def default(cls) -> "Limits":
        """Return the schema's defaults for a deployment."""
        return cls(**{name: default for name, (default, _) in _schema_bounds().items()})


@cache
def _schema_bounds() -> dict[str, tuple[int, int]]:
    """Return the default and the maximum of each limit, from the schema."""
    return {
        "max_message_bytes": (MESSAGE_BOUNDS.default_max_bytes, MESSAGE_BOUNDS.max_bytes),
        "max_rows": (COLUMN["request_ids"].default_max_items, COLUMN["request_ids"].max_items),
        "max_tokens_per_row": (COLUMN["token_counts"].default_max, COLUMN["token_counts"].max),
        "max_draft_tokens_per_row": (COLUMN["draft_token_counts"].default_max, COLUMN["draft_token_counts"].max),
        "max_top_k": (COLUMN["top_ks"].default_max, COLUMN["top_ks"].max),
        "max_token_id": (COLUMN["token_ids"].default_max, COLUMN["token_ids"].max),
    }
