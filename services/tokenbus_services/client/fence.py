"""Fence: which workers' rows are those of a request that was sent anew, when an earlier copy of it may still run."""

from dataclasses import dataclass, field

from tokenbus_contracts import LogprobBatch, RowStatus


@dataclass(slots=True)
class Fence:
    """Admits the rows of the first stream that brings any, and those of the streams that it is handed on to."""

    streams: list[tuple[str, int]] = field(default_factory=list)
    """By worker id and epoch, in the order in which they had the request."""
    joins_at: int | None = None
    """The position at which the next stream goes on; None: the last one has not handed the request off."""

    def admits(self, rows: LogprobBatch, row: int) -> bool:
        """Tell whether a row is the request's; the first row behind a hand-off lets its stream in."""
        stream, position = (rows.header.worker_id, rows.header.epoch), int(rows.positions[row])
        if stream not in self.streams:
            if self.streams and position != self.joins_at:
                return False
            self.streams.append(stream)
            self.joins_at = None
        if rows.statuses[row] == RowStatus.HANDED_OFF and stream == self.streams[-1]:
            self.joins_at = position + int(rows.token_counts[row])
        return True
