"""PaddleEngine: speculative decoding with multi-token-prediction heads."""

from dataclasses import dataclass
from pathlib import Path

from tokenbus_engines.engine import BatchEngine
from tokenbus_engines.paddle.decoder import PaddleBlock, PaddleDecoder
from tokenbus_engines.paddle.runner import Runner
from tokenbus_engines.paddle.weights import COMMITTED
from tokenbus_engines.scheduler import SchedulerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOptions(SchedulerOptions):
    """How the engine runs. An option out of range is a ValueError with the option, the limit and the value."""

    weights: Path = COMMITTED
    device: str = "cpu"
    """As paddle names it: cpu, gpu, gpu:1."""
    max_running: int = 32
    """The most requests with a slot of the cache; others wait."""
    context: int = 1024
    """How many tokens a slot holds: a request's prompt and its output."""
    prefill_chunk: int = 256
    """The most tokens of prompts in a step."""
    slice_steps: int = 256
    """After how many steps with tokens a request gives its slot to one that waits; 0: never."""

    def __post_init__(self) -> None:
        """Refuse an option out of range."""
        self.check(speculate=16, context=65_536, top_logprobs=127)


class PaddleEngine(BatchEngine[PaddleBlock]):
    """An engine over bytes. A text begins with a token of its own, and ends with another."""

    def __init__(self, options: PaddleOptions | None = None) -> None:
        """Read the weights and allocate the cache.

        A WeightsError, a DeviceError or a ValueError says in one line why there is no engine.
        """
        options = options or PaddleOptions()
        runner = Runner(options.weights, options.device, slots=options.max_running, context=options.context)
        heads = runner.shape.draft_heads
        if options.speculate > heads:
            raise ValueError(f"speculate: at most {heads}, as many as the weights have heads, got {options.speculate}")
        super().__init__(options, PaddleDecoder(runner, options))
