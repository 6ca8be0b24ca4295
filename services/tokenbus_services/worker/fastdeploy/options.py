"""Options: what the engine's ops do not say."""

from dataclasses import dataclass

from tokenbus_contracts import SpeculativeMethod, ValueKind
from tokenbus_services.settings import Settings


@dataclass(frozen=True, slots=True)
class Options:
    """How this process saves and gets; what it starts with suits the engine as it is now."""

    settings: Settings | None = None
    """Of both sides; None: those of the environment."""
    columns_in_flag: bool = True
    """Whether get ops count the columns in the message flag's field, above its low 8 bits, as releases since
    #7884 read it; before, the flag stood there alone."""
    method: SpeculativeMethod = SpeculativeMethod.MTP
    """What `speculate_save_output_topk` and `speculate_save_output` are called for: the ops are the same for all."""
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """What the engine's logprobs are."""
