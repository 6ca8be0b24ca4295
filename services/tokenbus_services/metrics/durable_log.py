"""The metrics of a processor's durable log; without one they have no values."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenbus_services.metrics.families import Family, Samples, counter, gauge
from tokenbus_services.metrics.view import ProcessorView

if TYPE_CHECKING:
    from tokenbus_services.processor.item_log import ItemLog


def _of_log(read: Callable[["ItemLog"], Samples]) -> Callable[[ProcessorView], Samples]:
    def samples(view: ProcessorView) -> Samples:
        return () if view.processor.item_log is None else read(view.processor.item_log)

    return samples


def _one(read: Callable[["ItemLog"], float]) -> Callable[[ProcessorView], Samples]:
    return _of_log(lambda log: (((), read(log)),))


def _outcomes(log: "ItemLog") -> Samples:
    counts = log.writer.counts
    yield ("written",), counts.items
    yield ("already_there",), counts.already_there
    yield ("refused",), counts.refused_items
    yield ("left_out",), log.left_out


DURABLE_LOG: tuple[Family[ProcessorView], ...] = (
    counter(
        "tokenbus_log_items_total",
        "Items by what became of them: written; already there, as after a restart; refused, as too large for the "
        "server; left out, as the buffer was full.",
        _of_log(_outcomes),
        "outcome",
    ),
    counter(
        "tokenbus_log_missing_items_total",
        "Items that the log names as missing, since this writer did not have them.",
        _one(lambda log: log.writer.counts.missing_items),
    ),
    counter(
        "tokenbus_log_bytes_total",
        "Payload bytes of the items that were written.",
        _one(lambda log: log.writer.counts.payload_bytes),
    ),
    counter(
        "tokenbus_log_messages_total",
        "Messages that the server acknowledged; each has a run of one worker's items.",
        _one(lambda log: log.writer.counts.messages),
    ),
    counter(
        "tokenbus_log_write_seconds_total",
        "How long those messages took to be acknowledged, in all; divided by messages_total, the mean.",
        _one(lambda log: log.writer.counts.write_seconds),
    ),
    counter(
        "tokenbus_log_failed_messages_total",
        "Messages that were not acknowledged, and are written again.",
        _one(lambda log: log.writer.counts.failed_writes),
    ),
    gauge(
        "tokenbus_log_waiting_items",
        "Items that are not in the log yet.",
        _one(lambda log: log.writer.unwritten_items),
    ),
    gauge(
        "tokenbus_log_waiting_bytes",
        "Bytes of those items.",
        _one(lambda log: log.writer.buffered_bytes),
    ),
    gauge(
        "tokenbus_log_lag_seconds",
        "How long the oldest item that is not in the log has waited.",
        _one(lambda log: log.writer.lag_seconds),
    ),
    gauge(
        "tokenbus_log_connected_servers",
        "1 while there is a connection to a server that has the log, else 0.",
        _one(lambda log: log.writer.is_connected),
    ),
    gauge(
        "tokenbus_log_writable_servers",
        "1 while a server writes what comes to the log, else 0.",
        _one(lambda log: not log.writer.problem),
    ),
    gauge(
        "tokenbus_log_missing_replicas",
        "Replicas of the log that are away, as far as a server says; nothing is written without most of them.",
        _one(lambda log: log.writer.missing_replicas),
    ),
    gauge(
        "tokenbus_log_storage_ratio",
        "How much of the storage that JetStream may use is used at each server of durable_log.monitors, from 0 to 1.",
        _of_log(lambda log: [((server,), ratio) for server, ratio in log.monitors.storage_ratios.copy().items()]),
        "server",
    ),
)
