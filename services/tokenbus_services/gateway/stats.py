"""Counts: what the gateway counts of the answers that it gives."""

from collections import Counter

from tokenbus_services.metrics.families import Histogram


class Counts:
    """Plain numbers, changed on the event loop and read by whoever scrapes."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """By route and status."""
        self.refusals: Counter[str] = Counter()
        """Of requests over HTTP that were not let in, by why."""
        self.open_answers = 0
        self.left_clients = 0
        """How many clients went away before their answer had ended."""
        self.cut_clients = 0
        """How many clients took nothing for too long."""
        self.broken_answers: Counter[str] = Counter()
        """By the code of the error that they ended with, after they had begun with status 200."""
        self.refused_connections = 0
        self.late_requests = 0
        """How many requests took too long to arrive."""
        self.peak_outbox_bytes = 0
        self.first_token = Histogram()
        """From a request's arrival until the first of its answer is there, in seconds."""
        self.to_socket = Histogram()
        """From a row's publication until it was written to its client's socket, in seconds."""
