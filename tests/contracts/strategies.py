"""Hypothesis strategies: valid messages, other encodings of them, and broken ones."""

from random import Random

from hypothesis import strategies as st

from tests.contracts.broken_messages import damage, mutate
from tests.contracts.other_encodings import LONGEST_KEY, reencoded
from tests.contracts.valid_messages import valid_message
from tokenbus_contracts.generated import logprob_batch_pb2 as pb


def canonical(message: pb.LogprobBatch) -> bytes:
    """Return the encoding that the codec must write."""
    return message.SerializeToString(deterministic=True)


def mutated(rng: Random) -> bytes:
    """Return an encoding of a message of which a few fields were changed."""
    message = valid_message(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate(rng, message)
    return _some_encoding(rng, message, LONGEST_KEY)


def damaged(rng: Random) -> bytes:
    """Return an encoding of a message of which a few bytes were changed."""
    data = _some_encoding(rng, valid_message(rng), rng.choice((LONGEST_KEY, 2 * LONGEST_KEY)))
    other = canonical(valid_message(rng))
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = damage(rng, data, other)
    return data


def _some_encoding(rng: Random, message: pb.LogprobBatch, longest_key: int) -> bytes:
    return canonical(message) if rng.random() < 0.7 else reencoded(rng, message, longest_key)


def _with_reencoding(rng: Random) -> tuple[pb.LogprobBatch, bytes]:
    message = valid_message(rng)
    return message, reencoded(rng, message)


_randoms = st.randoms(use_true_random=False)

valid_messages = st.builds(valid_message, _randoms)
"""Messages that keep the contract."""

reencoded_messages = st.builds(_with_reencoding, _randoms)
"""Messages that keep the contract, each with another encoding of itself."""

mutated_messages = st.builds(mutated, _randoms)
"""Encodings of messages of which a few fields were changed."""

damaged_messages = st.builds(damaged, _randoms)
"""Encodings of valid messages of which a few bytes were changed."""
