"""The arguments of the ops that came in several forms, by how many there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenbus_services.worker.fastdeploy import inputs
from tokenbus_services.worker.fastdeploy.message import Flags, Integers, Tensor
from tokenbus_services.worker.fastdeploy.scoring import ScoreTensors

_TODAY, _WITHOUT_PREEMPTED, _WITHOUT_LENGTHS = 13, 12, 9


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much of each slot's request is computed, and how long its prompt is."""

    decoder: Integers
    prompt: Integers

    @classmethod
    def of(cls, decoder: Tensor, prompt: Tensor, slots: int) -> "Lengths":
        """Take them from an op's tensors."""
        return cls(inputs.line("seq_lens_decoder", decoder, slots), inputs.line("prompt_lens", prompt, slots))

    @property
    def prefilling(self) -> Flags:
        """Of slots: whether its prompt is not computed yet."""
        return self.decoder < self.prompt


@dataclass(frozen=True, slots=True)
class Speculated:
    """What is saved of a step under speculation, with logprobs."""

    sampled: Tensor
    scores: ScoreTensors
    token_numbers: Tensor
    offsets: Tensor
    not_need_stop: Tensor
    decoder_lengths: Tensor | None
    prompt_lengths: Tensor | None
    preempted: Tensor | None
    flag: int
    rank: int
    each_rank: bool

    @classmethod
    def of(cls, op: str, arguments: tuple[Tensor, ...], *, only_today: bool = False) -> "Speculated":
        """Take an op's arguments by position."""
        count = len(arguments)
        known = (_TODAY,) if only_today else (_TODAY, _WITHOUT_PREEMPTED, _WITHOUT_LENGTHS)
        if count not in known:
            raise TypeError(f"{op}: {_either(known)} arguments, got {count}")
        tensors = count - (2 if count == _WITHOUT_LENGTHS else 3)
        sampled, ids, logprobs, ranks, numbers, offsets, not_need_stop = arguments[:7]
        decoder, prompt, preempted = (*arguments[7:tensors], None, None, None)[:3]
        flag, rank, each_rank = (*arguments[tensors:], False)[:3]
        scores = ScoreTensors(ids, logprobs, ranks)
        return cls(
            sampled,
            scores,
            numbers,
            offsets,
            not_need_stop,
            decoder,
            prompt,
            preempted,
            flag,
            int(rank),
            bool(each_rank),
        )

    def lengths(self, slots: int) -> Lengths | None:
        """Return the lengths, where the form has them."""
        return None if self.decoder_lengths is None else Lengths.of(self.decoder_lengths, self.prompt_lengths, slots)


def with_preempted(op: str, arguments: tuple[Tensor, ...], most: int, tensors: int) -> tuple[Tensor, ...]:
    """Return an op's arguments, with None for `preempted_idx`, the last of its tensors, in its older form."""
    if len(arguments) == most - 1:
        return (*arguments[: tensors - 1], None, *arguments[tensors - 1 :])
    if len(arguments) != most:
        raise TypeError(f"{op}: {_either((most, most - 1))} arguments, got {len(arguments)}")
    return arguments


def preempted_slots(tensor: Tensor | None, slots: int) -> Flags | None:
    """Return which slots were preempted, where the op's form tells."""
    return None if tensor is None else inputs.flags("preempted_idx", tensor, slots)


@contextmanager
def cleared(preempted: Tensor | None) -> Iterator[None]:
    """Clear the preempted flags at the end, whatever happens in between: the next step must not see them."""
    try:
        yield
    finally:
        if preempted is not None:
            inputs.clear(preempted)


def is_sent(rank: int, *, each: bool) -> bool:
    """Tell whether a rank sends: the others compute the same."""
    return each or rank <= 0


def _either(numbers: tuple[int, ...]) -> str:
    *others, last = (str(number) for number in numbers)
    return f"{', '.join(others)} or {last}" if others else last
