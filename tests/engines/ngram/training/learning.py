"""Learning: what the ngram engine's tables hold, from a text, as plainly as can be: dictionaries, token by token."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tokenbus.engines.ngram.model import ABSENT, WIDTH, Tables
from tokenbus.engines.ngram.tokenizer import BYTES, CHUNKS, Tokenizer

DISCOUNT = 0.4
"""What is taken from each count for what was never seen there."""
CONTINUATIONS = (WIDTH, 16, 8)
"""By a context's length, how many of the tokens that followed it are remembered; the target looks at three tokens."""
_LETTER_GROUPS = 400
_LONGEST_GROUP = 4
Context = tuple[int, ...]


def documents() -> list[str]:
    sources = sorted(Path(__file__).with_name("text").glob("*.txt"))
    texts = [part for source in sources for part in source.read_text("utf-8").split("\n---\n")]
    return ["\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")) for text in texts]


def learned(texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of some texts: their words, the commonest groups of letters, and all bytes.

    The more frequent a token, the lower its id.
    """
    counts = Counter(chunk.encode() for text in texts for chunk in CHUNKS.findall(text))
    groups: Counter[bytes] = Counter()
    for word in counts:
        for begin in range(len(word)):
            for end in range(begin + 2, min(len(word), begin + _LONGEST_GROUP) + 1):
                groups[word[begin:end]] += end - begin - 1
    for group, _ in sorted(groups.items(), key=lambda item: (-item[1], item[0]))[:_LETTER_GROUPS]:
        counts.setdefault(group, 0)
    for byte in range(BYTES):
        counts.setdefault(bytes([byte]), 0)
    # Those that never occur come last, the longer first: they spell what is likelier.
    return Tokenizer(sorted(counts, key=lambda piece: (-counts[piece], -len(piece), piece)))


class Plain:
    """What followed each context of some texts, and the shares that follow from it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Count what came after each context of up to three tokens; none reaches back over the end of a text."""
        end, self.vocabulary_size = tokenizer.end_token, tokenizer.vocabulary_size
        tokens = [end, *(token for text in texts for token in (*tokenizer.encode(text), end))]
        self.followers: dict[Context, Counter[int]] = {}
        """The empty context has all tokens."""
        self._lines: dict[Context, list[tuple[int, float]]] = {}
        for place in range(1, len(tokens)):
            for length in range(min(len(CONTINUATIONS), place) + 1):
                context = tuple(tokens[place - length : place])
                if end not in context[1:]:
                    self.followers.setdefault(context, Counter())[tokens[place]] += 1

    def line(self, context: Context) -> list[tuple[int, float]]:
        """Return the likeliest tokens of a context with their shares.

        What followed it has a discounted share, and the rest is shared out as the context without its oldest token says
        (Chen and Goodman's absolute discounting).
        """
        if context not in self._lines:
            counts = self.followers.get(context, Counter())
            masses = {token: float(count) for token, count in counts.items()}
            if context:
                total = counts.total()
                left = DISCOUNT * len(counts) / total if total else 1.0
                masses = {token: share * left for token, share in self.line(context[1:])}
                most = CONTINUATIONS[len(context) - 1]
                for token, count in sorted(counts.items(), key=_by_mass)[:most]:
                    masses[token] = masses.get(token, 0.0) + (count - DISCOUNT) / total
            kept = sorted(masses.items(), key=_by_mass)[:WIDTH]
            whole = float(np.array([mass for _, mass in kept]).sum())
            self._lines[context] = [(token, mass / whole) for token, mass in kept]
        return self._lines[context]

    def tables(self) -> Tables:
        """Return the tables of a model that has learned this: every token is a context, whether it occurs or not."""
        numbers: dict[Context, int] = {(token,): token for token in range(self.vocabulary_size)}
        parents, keys, ends = [ABSENT] * len(numbers), [], [len(numbers)]
        for length in range(2, len(CONTINUATIONS) + 1):
            found = (context for context in self.followers if len(context) == length)
            for prefix, newest, context in sorted((numbers[each[:-1]], each[-1], each) for each in found):
                keys.append(prefix * self.vocabulary_size + newest)
                parents.append(numbers[context[1:]])
                numbers[context] = len(numbers)
            ends.append(len(numbers))
        lines = np.array([self.line(context) for context in numbers])
        ids, logprobs = lines[..., 0].astype(np.int64), np.log(lines[..., 1]).astype(np.float32)
        # Two that were not equal may be so as float32, and then the lower id comes first.
        order = np.lexsort((ids, -logprobs), axis=1)
        joined = np.array([*keys, np.iinfo(np.int64).max])  # the last is never searched for: a search ends there
        by_key = np.argsort(joined)
        return Tables(
            ids=np.take_along_axis(ids, order, 1),
            logprobs=np.take_along_axis(logprobs, order, 1),
            parents=np.array(parents),
            keys=joined[by_key],
            numbers=np.array([*range(ends[0], len(numbers)), ABSENT])[by_key],
            ends=np.array(ends),
        )


def _by_mass(item: tuple[int, float]) -> tuple[float, int]:
    return -item[1], item[0]


def save(path: Path, tokenizer: Tokenizer, tables: Tables) -> None:
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.end_token)]
    small = tables._replace(ids=tables.ids.astype(np.int16), parents=tables.parents.astype(np.int32))
    np.savez_compressed(
        path,
        pieces=np.frombuffer(b"".join(pieces), np.uint8),
        piece_ends=np.cumsum([len(piece) for piece in pieces]),
        **small._asdict(),
    )
