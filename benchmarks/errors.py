"""What a benchmark may not be able to do here."""


class NotRunError(Exception):
    """A peer cannot run here; the message says why, for the tables."""


class WrongDeliveryError(Exception):
    """A peer delivered something else than the engine emitted: its time would mean nothing."""
