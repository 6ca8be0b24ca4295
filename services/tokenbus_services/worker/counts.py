"""What happened at a worker beside its stream."""

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerCounts:
    """Written by the engine's loop and by the hand-offs, each its own; read by the metrics."""

    failed_steps: int = 0
    """Steps that raised."""
    engine_errors: int = 0
    """Requests that the engine failed to take or to abort, with an exception that is no ValueError."""
    handing_off: int = 0
    """Requests that wait for a decode worker's answer just now."""
    handed_off: int = 0
    """Requests that a decode worker took."""
    untaken: int = 0
    """Requests that no decode worker took: they ended with an error."""
    taken_over: int = 0
    """Requests of prefill workers that this one's engine took."""
    refused: int = 0
    """Hand-offs that were refused, by the engine or before it saw them."""
    waiting_state_bytes: int = 0
    """Of the states that were handed off to this worker, those that wait for its engine just now."""
    refused_connections: int = 0
    """Connections for hand-offs that were turned away or cut off."""
