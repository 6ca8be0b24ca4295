"""Refused messages: counted by the rule that they break, and logged with their first bytes."""

from collections import Counter
from collections.abc import Mapping

from tokenbus.logs import DeduplicatedLog, logger
from tokenbus_contracts import ContractError

_log = logger("processor")
SHOWN_BYTES = 64


class RefusedMessages:
    """Counts and logs the messages that break the contract."""

    def __init__(self, repeated_log: DeduplicatedLog) -> None:
        self.by_rule: Counter[str] = Counter()
        self._repeated_log = repeated_log

    def add(  # noqa: PLR0913 - what the line says
        self,
        event: str,
        payload: bytes,
        error: ContractError,
        sender: Mapping[str, object],
        *,
        sequence: int = 0,
        shown: int = SHOWN_BYTES,
    ) -> None:
        """Count a refused message and log it, once for those of a sender that break one rule; zero is no sequence."""
        self.by_rule[str(error.rule)] += 1
        key = (event, error.rule, *sender.values())
        place = {**sender, "sequence": sequence} if sequence else sender
        first = payload[:shown].hex()
        self._repeated_log.begin(
            key, _log.warning, event, reason=str(error), **place, bytes=len(payload), first_bytes=first
        )
