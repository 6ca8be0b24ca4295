"""RefusedMessages: counts and logs the messages that break the contract."""

from collections import Counter
from collections.abc import Mapping

from tokenbus.logs import DeduplicatedLog, logger
from tokenbus_contracts import ContractError

_log = logger("processor")
SHOWN_BYTES = 64


class RefusedMessages:
    """Counts refused messages by rule, and logs them with their first bytes."""

    def __init__(self, repeated_log: DeduplicatedLog) -> None:
        self.by_rule: Counter[str] = Counter()
        self.repeated_log = repeated_log

    def add(  # noqa: PLR0913 - the fields of the log line
        self,
        event: str,
        payload: bytes,
        error: ContractError,
        sender: Mapping[str, object],
        *,
        sequence: int = 0,
        shown: int = SHOWN_BYTES,
    ) -> None:
        """Count and log a message; there is one line for all messages of a sender that break the same rule.

        A sequence of zero means that the message has none.
        """
        self.by_rule[str(error.rule)] += 1
        key = (event, error.rule, *sender.values())
        fields = {**sender, "sequence": sequence} if sequence else sender
        first = payload[:shown].hex()
        self.repeated_log.begin(
            key, _log.warning, event, reason=str(error), **fields, bytes=len(payload), first_bytes=first
        )
