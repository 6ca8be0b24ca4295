"""The metrics of workers' streams, as the processor sees them."""

from collections.abc import Callable

from tokenbus_services.metrics.families import Family, counter, gauge
from tokenbus_services.metrics.view import ProcessorView
from tokenbus_services.processor.intake import Worker
from tokenbus_services.processor.stream import StreamCounts


def _counter(name: str, meaning: str, read: Callable[[StreamCounts], float]) -> Family[ProcessorView]:
    return counter(name, meaning, lambda view: view.each_count(read), "worker")


def _gauge(name: str, meaning: str, read: Callable[[Worker], float]) -> Family[ProcessorView]:
    return gauge(name, meaning, lambda view: view.each_worker(read), "worker")


STREAMS: tuple[Family[ProcessorView], ...] = (
    _counter(
        "tokenbus_stream_items_total",
        "Items that came from a worker, repeated ones too.",
        lambda counts: counts.items,
    ),
    _counter(
        "tokenbus_stream_bytes_total",
        "Payload bytes that came from a worker, repeated ones too.",
        lambda counts: counts.bytes,
    ),
    _counter("tokenbus_stream_steps_total", "Steps of a worker that were handed out.", lambda counts: counts.steps),
    _counter(
        "tokenbus_stream_rows_total",
        "Rows of a worker that were new to their requests.",
        lambda counts: counts.rows,
    ),
    _counter(
        "tokenbus_stream_tokens_total",
        "Tokens of a worker that were handed to requests.",
        lambda counts: counts.tokens,
    ),
    gauge(
        "tokenbus_stream_lag_seconds",
        "How long ago the last step that was handed out was made, by the worker's clock.",
        lambda view: view.lags(),
        "worker",
    ),
    _gauge(
        "tokenbus_stream_lag_items",
        "Items that a worker has sent and that are not in order here yet.",
        lambda worker: worker.stream.lag,
    ),
    _gauge(
        "tokenbus_stream_credit_items",
        "Items that a worker may still send.",
        lambda worker: worker.stream.credit_left[0],
    ),
    _gauge(
        "tokenbus_stream_credit_bytes",
        "Payload bytes that a worker may still send.",
        lambda worker: worker.stream.credit_left[1],
    ),
    _gauge(
        "tokenbus_stream_pending_items",
        "Items of a worker that wait for consumers, so that the worker must keep them.",
        lambda worker: len(worker.stream.acks),
    ),
    _gauge(
        "tokenbus_stream_pending_bytes",
        "Payload bytes of a worker that wait for consumers.",
        lambda worker: worker.stream.acks.bytes,
    ),
    _gauge(
        "tokenbus_stream_peak_pending_items",
        "The most items of a worker that waited for consumers at once, since it came.",
        lambda worker: worker.stream.acks.peak,
    ),
    _gauge(
        "tokenbus_stream_open_steps",
        "Steps of a worker that wait for their other parts or their draft.",
        lambda worker: worker.assembler.open_steps,
    ),
    _counter("tokenbus_stream_gaps_total", "Runs of items that could not be had.", lambda counts: counts.gaps),
    _counter("tokenbus_stream_lost_items_total", "Items that could not be had.", lambda counts: counts.lost),
    _counter(
        "tokenbus_stream_replays_total",
        "How often missing items were asked for again.",
        lambda counts: counts.replays,
    ),
    _counter(
        "tokenbus_stream_duplicate_items_total",
        "Items that had come before, and were dropped.",
        lambda counts: counts.duplicates,
    ),
    _counter(
        "tokenbus_stream_duplicate_parts_total",
        "Parts of steps that had come in another item, and were dropped.",
        lambda counts: counts.repeated_parts,
    ),
    _counter(
        "tokenbus_stream_divergent_items_total",
        "Items and parts that had come before with other contents; the first is what counts.",
        lambda counts: counts.divergences + counts.divergent_parts,
    ),
    _counter(
        "tokenbus_stream_damaged_items_total",
        "Items whose bytes are not those that were sent, by their checksum; they are asked for again.",
        lambda counts: counts.damaged,
    ),
    _counter("tokenbus_stream_refused_items_total", "Items that break the contract.", lambda counts: counts.refused),
    _counter(
        "tokenbus_stream_incomplete_steps_total",
        "Steps that were given up before all of their rows came.",
        lambda counts: counts.incomplete_steps,
    ),
    counter(
        "tokenbus_stream_missing_drafts_total",
        "Steps whose draft was announced and was not there in time, or did not match.",
        lambda view: view.missing_drafts(),
        "worker",
    ),
)
