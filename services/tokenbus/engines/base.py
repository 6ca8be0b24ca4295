"""BaseEngine: the base class of engines that implement only `logits`."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenbus.engines.engine import BatchEngine, Block, EngineOptions, Outcome, Role
from tokenbus.engines.prompt_scoring import PromptPiece, Scores, scored
from tokenbus.engines.requests import SequenceRequests
from tokenbus.engines.sampling import FINAL, Ids, Logits, distribution, drawn, uniforms
from tokenbus.engines.scheduler import Plan
from tokenbus.plugins import Tokenizer, load_tokenizer
from tokenbus.worker.step import Array
from tokenbus_contracts import SpeculativeMethod
from tokenbus_gpu_ops import token_logprobs


@dataclass(slots=True, kw_only=True, eq=False)
class _SampledBlock(Block):
    logits: Logits


class BaseEngine(BatchEngine[_SampledBlock]):
    """Base class of engines that implement only `logits`.

    The base class runs requests in continuous batches, samples tokens (temperature, top-k, top-p, seed), ends requests
    (length, end token, stop strings, abort), scores tokens and prompts, and continues requests of lost workers.
    Requests with unsupported parameters are refused.

    Example:
        import numpy as np

        class Parrot(tokenbus.BaseEngine):
            def logits(self, sequences):
                logits = np.full((len(sequences), self.vocabulary_size), -99, np.float32)
                for row, token_ids in zip(logits, sequences):
                    row[token_ids] = 0
                return logits

        engine = Parrot()
        engine.admit(tokenbus.Generate(request_id=7, text={"text": "to be or not to be"}, sampling={"max_tokens": 4}))
        (step,) = engine.step()
    """

    _requests: SequenceRequests
    _method = SpeculativeMethod.NONE

    def __init__(
        self,
        tokenizer: Tokenizer | str = "ngram",
        *,
        context: int = 2048,
        max_running: int = 64,
        max_top_logprobs: int = 20,
        role: Role = "mixed",
    ) -> None:
        """Create an engine.

        Args:
            tokenizer: An object with the members that `tokenbus.load_tokenizer` documents, or a name or folder to load.
                The tokenizer's optional attribute `end_token` is the id of the token that ends a text.
            context: Maximum length of a prompt and its output together, in tokens.
            max_running: Maximum number of sequences per call of `logits`. Further requests wait.
            max_top_logprobs: Maximum number of alternatives per token.
            role: The value of the setting `worker.role`: prefill, decode or mixed.

        Raises:
            ValueError: A number is out of range.
            PluginError: The tokenizer does not exist.
        """
        options = EngineOptions(
            speculate=0, context=context, max_running=max_running, max_top_logprobs=max_top_logprobs, role=role
        )
        found = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if not isinstance(found, Tokenizer):
            raise TypeError(f"tokenizer: an object with encode and token_bytes, got {type(found).__name__}")
        super().__init__(options, found, SequenceRequests())

    @abstractmethod
    def logits(self, sequences: Sequence[Sequence[int]]) -> Array:
        """Return finite logits of each sequence's next token, of shape [sequences, vocabulary_size].

        Args:
            sequences: Token ids: each request's prompt and output, or prefixes of a prompt that is scored.
        """

    def _compute(self, plan: Plan) -> _SampledBlock:
        requests = self._requests
        slots = np.concatenate([plan.decode, plan.first])
        logits = self._checked_logits([requests.token_ids[slot] for slot in slots.tolist()])
        params = requests.params(slots)
        tokens = drawn(distribution(logits, params), uniforms(params.seeds, requests.positions[slots], FINAL))
        decoding = plan.decode.size
        return _SampledBlock(
            slots=slots,
            tokens=tokens[:, None],
            counts=np.ones(slots.size, np.int64),
            drafts=np.zeros((decoding, 0), np.int64),
            draft_counts=np.zeros(decoding, np.int64),
            logits=logits,
        )

    def _checked_logits(self, sequences: list[list[int]]) -> Logits:
        shape = (len(sequences), self.vocabulary_size)
        if not sequences:
            return np.zeros(shape, np.float32)
        found: npt.NDArray[np.float32] = np.asarray(self.logits([[*each] for each in sequences]), np.float32)
        if found.shape != shape:
            raise ValueError(f"logits: an array of shape {shape}, got {found.shape}")
        if not np.isfinite(found).all():
            raise ValueError("logits: finite numbers, got infinity or NaN")
        return found

    def _scores(self, block: _SampledBlock, rows: Ids, counts: Ids, top_ks: Ids, *, are_drafts: bool) -> Scores:
        del counts, are_drafts  # each row has exactly one token and no drafts
        found = token_logprobs(block.logits[rows], block.tokens[rows, 0], top_ks)
        return Scores(found.logprobs, found.ranks, found.alternative_token_ids, found.alternative_logprobs)

    def _piece_scores(self, block: _SampledBlock, piece: PromptPiece) -> Scores:
        del block
        text, begin, most = [*piece.context, *piece.tokens.tolist()], len(piece.context), self._options.max_running
        prefixes = [text[:end] for end in range(begin, len(text))]
        calls = [prefixes[first : first + most] for first in range(0, len(prefixes), most)]
        return scored(np.concatenate([self._checked_logits(call) for call in calls]), piece)

    def _keep(self, block: _SampledBlock, result: Outcome) -> None:
        for slot, token_id, kept in zip(block.slots.tolist(), block.tokens[:, 0].tolist(), result.kept, strict=True):
            if kept:
                self._requests.token_ids[slot].append(token_id)
