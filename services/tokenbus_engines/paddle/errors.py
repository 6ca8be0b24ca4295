"""What keeps the engine from being made; who starts it is told in one line."""


class WeightsError(RuntimeError):
    """The weights cannot be used: the file, and what is wrong with it."""

    def __init__(self, path: object, problem: str) -> None:
        """Keep both in the message."""
        super().__init__(f"weights {path}: {problem}")


class DeviceError(RuntimeError):
    """Paddle is missing, or has not the device that was asked for."""
