"""RefusedMessages: counts and logs the messages that violate the contract."""

from collections import Counter
from collections.abc import Mapping

from tokenbus.logs import DeduplicatedLog, logger
from tokenbus_contracts import ContractError

_log = logger("processor")
SHOWN_BYTES = 64


class RefusedMessages:
    """Counts refused messages by rule, and logs their first bytes."""

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
        """Count and log a message; messages of one sender that violate the same rule share one log line.

        A sequence of zero means that the message has no sequence.
        """
        self.by_rule[str(error.rule)] += 1
        key = (event, error.rule, *sender.values())
        fields = {**sender, "sequence": sequence} if sequence else sender
        first = payload[:shown].hex()
        self.repeated_log.begin(
            key, _log.warning, event, reason=str(error), **fields, bytes=len(payload), first_bytes=first
        )
