"""Launches: the steps that an engine with overlap scheduling has launched and not finished.

Such an engine prepares a step while the one before it is still computed: how many tokens that will accept is not known
yet, and its draft may be done only after the next target.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tokenbus_contracts import ContractError, Rule


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that was launched: the number that its batches carry, and the most tokens that it can emit."""

    step: int
    tokens: int


class Launches:
    """Numbers steps when they are launched, and holds what they emit against what they were launched for."""

    def __init__(self, tokens_per_step: int, most: int = 2) -> None:
        """Take how many tokens a row can get in one step, and how many steps may be launched and not finished."""
        self._tokens_per_step = tokens_per_step
        self._most = most
        self._next = 1
        self._open: OrderedDict[int, Launch] = OrderedDict()

    def __len__(self) -> int:
        """Return how many steps are launched and not finished."""
        return len(self._open)

    def launch(self, real_batch_size: int) -> Launch:
        """Launch the next step for so many requests, those that are padding not counted.

        Its tokens are the real batch size times the tokens of one step: what the step before accepts changes where a
        row's tokens begin, and not how many this step can have.
        """
        if len(self._open) >= self._most:
            raise ContractError("launched steps", self._most, len(self._open) + 1, rule=Rule.MAX)
        launch = Launch(self._next, real_batch_size * self._tokens_per_step)
        self._next += 1
        self._open[launch.step] = launch
        return launch

    def finish(self, step: int, tokens: int) -> None:
        """Learn how many tokens a step emitted, in whichever order steps finish; its draft may come later."""
        launch = self._open.pop(step, None)
        if launch is None:
            raise ContractError("step", f"one of those launched, {list(self._open)}", step)
        if tokens > launch.tokens:
            raise ContractError(f"tokens of step {step}", launch.tokens, tokens, rule=Rule.MAX)
