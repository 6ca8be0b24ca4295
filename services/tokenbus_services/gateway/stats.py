"""Counts: what a gateway counts of its answers and connections."""

from collections import Counter

from tokenbus_services.metrics.families import Histogram


class Counts:
    """Counters of answers, changed on the event loop and read by a scrape in any thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By route and status."""
        self.refusals: Counter[str] = Counter()
        """Requests over HTTP that were refused, by reason."""
        self.open_answers = 0
        self.left_clients = 0
        """Clients that disconnected before their answer had ended."""
        self.cut_clients = 0
        """Clients that read nothing for too long."""
        self.broken_answers: Counter[str] = Counter()
        """Answers that had begun with status 200 and ended with an error, by its code."""
        self.refused_connections = 0
        self.late_requests = 0
        """Requests that took too long to arrive."""
        self.peak_outbox_bytes = 0
        self.first_token = Histogram()
        """From a request's arrival to the first part of its answer, in seconds."""
        self.to_socket = Histogram()
        """From a row's publication until it was written to its client's socket, in seconds."""
