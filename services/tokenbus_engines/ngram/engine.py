"""NgramEngine: a language model of n-grams with speculative decoding, in numpy alone."""

from dataclasses import dataclass

from tokenbus_engines.engine import BatchEngine
from tokenbus_engines.ngram.decoder import NgramBlock, NgramDecoder
from tokenbus_engines.ngram.model import WIDTH
from tokenbus_engines.scheduler import SchedulerOptions

_MOST_DRAFTS = 15
"""With the token after them, as many as the contract lets a row have."""
_LONGEST_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(SchedulerOptions):
    """How the engine runs. An option out of range is a ValueError with the option, the limit and the value."""

    def __post_init__(self) -> None:
        """Refuse an option out of range."""
        self.check(speculate=_MOST_DRAFTS, context=_LONGEST_CONTEXT, top_logprobs=WIDTH)


class NgramEngine(BatchEngine[NgramBlock]):
    """An engine over words. It reads the model that comes with the package, once in a process."""

    def __init__(self, options: NgramOptions | None = None) -> None:
        """Read the model; that takes less than a second."""
        options = options or NgramOptions()
        super().__init__(options, NgramDecoder(options))
