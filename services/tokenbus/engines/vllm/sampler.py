"""Sampler: calls `token_logprobs` in the sampler of vLLM's worker processes (`--token-scores`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: TID253 - as the module's docstring says
from vllm.v1.outputs import LogprobsTensors  # noqa: TID253
from vllm.v1.sample import rejection_sampler  # noqa: TID253
from vllm.v1.sample.sampler import Sampler  # noqa: TID253

from tokenbus.engines.vllm.token_scores import Asked, TokenScores, given_ids_of, token_scores
from tokenbus_contracts import ValueKind
from tokenbus_gpu_ops import token_logprobs
from tokenbus_gpu_ops.columns import TokenColumns
from tokenbus_gpu_ops.errors import GpuUnavailableError


class ExtraScores(NamedTuple):
    """Extra scores of a batch, as arguments of `token_logprobs`."""

    arguments: dict[str, Any]
    want_other: bool
    """Whether any request needs the kind of logprobs, raw or processed, that vLLM does not return."""


NO_EXTRA_SCORES = ExtraScores({}, want_other=False)


class PendingScores:
    """Replacement for vLLM's LogprobsTensors, with scores that the device may still be computing."""

    cu_num_generated_tokens = None

    def __init__(self, found: TokenColumns, kept: Any = None) -> None:  # noqa: ANN401 - numpy's or torch's
        self._found, self._kept = found, kept

    def to_cpu_nonblocking(self) -> "PendingScores":
        """Return this object, because its copy to the host has begun already."""
        return self

    def filter(self, mask: Any) -> "PendingScores":  # noqa: ANN401 - as above
        return PendingScores(self._found, np.asarray(mask))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> TokenScores:
        return token_scores(self._found, self._kept, cu_num_generated_tokens)


class ScoringSampler(Sampler):  # type: ignore[misc]  # known only at run time
    """vLLM's sampler with our scores. `use_token_scores` changes the class of an existing instance."""

    runner: Any
    """vLLM's model runner, which knows the request of each row of logits."""
    given_ids: Sequence[int] = ()
    """Ids to score in the current prompt."""
    keeps_processed = False
    """Whether to keep the processed logits, from which tokens are sampled."""
    processed: torch.Tensor | None = None
    """Processed logits of the last call."""
    _arguments: Sequence[Mapping[str, Any] | None] = ()
    _extra_scores = NO_EXTRA_SCORES

    @property
    def is_processed(self) -> bool:
        """Whether logprobs are computed from the processed logits."""
        return bool(self.logprobs_mode.startswith("processed"))

    def extra_scores(self) -> ExtraScores:
        """Return the extra scores of this step's requests, cached while the requests stay the same."""
        requests = self.runner.requests
        arguments = [requests[name].sampling_params.extra_args for name in self.runner.input_batch.req_ids]
        if arguments != self._arguments:
            self._arguments = arguments
            self._extra_scores = _extra_scores_of(
                [Asked.of(each) for each in arguments], is_processed=self.is_processed
            )
        return self._extra_scores

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,  # noqa: ANN401 - vLLM's
        predict_bonus_token: bool = False,  # noqa: FBT001, FBT002 - vLLM's own
        logprobs_mode_override: str | None = None,
    ) -> Any:  # noqa: ANN401
        """Sample with vLLM, and score with `token_logprobs`."""
        most = sampling_metadata.max_num_logprobs
        if most is None or logprobs_mode_override is not None:
            return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        extra = self.extra_scores()
        self.keeps_processed = self.is_processed or extra.want_other
        raw = None
        if not self.is_processed or extra.want_other:
            raw = logits.clone() if logits.dtype == torch.float32 else logits  # vLLM changes float32 logits in place
        made = super().forward(logits, replace(sampling_metadata, max_num_logprobs=None), predict_bonus_token)
        own, other = (self.processed, raw) if self.is_processed else (raw, self.processed)
        made.logprobs_tensors = self.scored(own, other, made.sampled_token_ids.reshape(-1), most, extra)
        self.processed = None
        return made

    def sample(self, logits: torch.Tensor, sampling_metadata: Any, *further: Any) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
        """Sample with vLLM, and keep the processed logits if they are needed."""
        if not self.keeps_processed:
            return super().sample(logits, sampling_metadata, *further)  # type: ignore[no-any-return]
        drawing = self.topk_topp_sampler
        before = drawing.logprobs_mode, drawing.forward
        drawing.logprobs_mode = "processed_logits"
        if logits.is_cuda:  # FlashInfer does not return processed logits
            drawing.forward = drawing.forward_native
        try:
            metadata = replace(sampling_metadata, max_num_logprobs=0)
            sampled, self.processed = super().sample(logits, metadata, "processed_logits")
        finally:
            drawing.logprobs_mode, drawing.forward = before
        return sampled, self.processed if self.is_processed else None

    def gather_logprobs(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:  # noqa: ANN401
        """Gather the logprobs of prompt tokens, with the given ids instead of the most probable tokens."""
        if not self.given_ids:
            return super().gather_logprobs(logprobs, num_logprobs, token_ids)
        given = torch.tensor(self.given_ids, device=token_ids.device).expand(len(token_ids), -1)
        ids = torch.cat((token_ids[:, None], given), dim=1)
        values = logprobs.gather(-1, ids)
        return LogprobsTensors(ids.to(torch.int32), values, 1 + (logprobs > values[:, :1]).sum(-1))

    def scored(  # noqa: PLR0913, PLR0917 - internal
        self,
        own: Any,  # noqa: ANN401 - a tensor of rows of logits
        other: Any,  # noqa: ANN401 - as above, or None
        token_ids: torch.Tensor,
        most: int,
        extra: ExtraScores,
        tokens_each: int = 1,
    ) -> PendingScores:
        """Return the scores of `tokens_each` tokens per request, with `most` alternatives each."""
        arguments = dict(extra.arguments)
        if extra.want_other:
            arguments["other_logits"] = other.to(torch.float32)
            own = own.to(torch.float32)
        if tokens_each > 1:
            arguments["token_counts"] = np.full(len(token_ids) // tokens_each, tokens_each)
        kind = ValueKind.PROCESSED_LOGPROBS if self.is_processed else ValueKind.RAW_LOGPROBS
        return PendingScores(token_logprobs(own, token_ids.contiguous(), most, value_kind=kind, **arguments))


_HANDS_OVER = SimpleNamespace(
    is_logits_logprobs_mode=True, sampler=SimpleNamespace(gather_logprobs=lambda logits, *_: logits)
)
"""Replacement for vLLM's rejection sampler that makes `_get_logprobs_tensors` return logits instead of scores."""


class ScoringRejectionSampler(rejection_sampler.RejectionSampler):  # type: ignore[misc]
    """vLLM's rejection sampler with our scores of the accepted tokens."""

    _drafted: torch.Tensor | None = None
    """Logits against which the last call verified drafts."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:  # noqa: ANN401
        wants = sampling_metadata.max_num_logprobs is not None and self.sampler.extra_scores().want_other
        self.sampler.keeps_processed = wants
        try:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        finally:
            self.sampler.processed = self._drafted = None

    def apply_logits_processors(self, logits: torch.Tensor, sampling_metadata: Any, metadata: Any) -> torch.Tensor:  # noqa: ANN401
        """Process the logits with vLLM, and keep the result if it is needed."""
        made: torch.Tensor = super().apply_logits_processors(logits, sampling_metadata, metadata)
        if self.sampler.keeps_processed and not self.sampler.is_processed:
            constrained = rejection_sampler.apply_sampling_constraints
            self._drafted = constrained(made.clone(), metadata.cu_num_draft_tokens, sampling_metadata)
        return made

    def _get_logprobs_tensors(  # noqa: PLR0913, PLR0917 - as vLLM calls it
        self,
        max_num_logprobs: int,
        metadata: Any,  # noqa: ANN401 - vLLM's
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> PendingScores:
        extra, others = self.sampler.extra_scores(), None
        tokens = sampled_token_ids.clamp(min=0).reshape(-1)
        own = self._lines(metadata, logits, target_logits, bonus_logits, sampled_token_ids)
        if extra.want_other:
            drafts, last = self._drafted, self.sampler.processed
            if self.sampler.is_processed:
                drafts, last = logits[metadata.target_logits_indices], logits[metadata.bonus_logits_indices]
            others = self._lines(metadata, logits, drafts, last, sampled_token_ids)
        each = sampled_token_ids.shape[-1]
        return self.sampler.scored(own, others, tokens, max_num_logprobs, extra, each)  # type: ignore[no-any-return]

    @staticmethod
    def _lines(metadata: Any, logits: Any, drafts: Any, last: Any, sampled: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the logits of each draft token and of the bonus token, in vLLM's order."""
        found = rejection_sampler.RejectionSampler._get_logprobs_tensors  # noqa: SLF001 - for its index computation
        return found(_HANDS_OVER, 0, metadata, logits, drafts, last, sampled)


def _extra_scores_of(asked: Sequence[Asked], *, is_processed: bool) -> ExtraScores:
    if not any(map(any, asked)):
        return NO_EXTRA_SCORES
    others, entropies, bounds, ids = zip(*asked, strict=True)
    want_other = any(others) or (any(bounds) and not is_processed)
    if len(set(asked)) == 1 and not ids[0]:  # `token_logprobs` is faster with one value for all requests
        return ExtraScores(
            {"other_logprobs": others[0], "entropies": entropies[0], "mask_bounds": bounds[0]}, want_other
        )
    arguments = {
        "other_logprobs": np.array(others),
        "entropies": np.array(entropies),
        "mask_bounds": np.array(bounds),
        "given_token_ids": np.array([token_id for each in ids for token_id in each], np.int64),
        "given_counts": np.array([len(each) for each in ids]),
    }
    return ExtraScores(arguments, want_other)


class _PromptScores:
    """Scores prompts one by one if a request names token ids. vLLM scores all prompts of a step in the same way."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        self._runner = runner
        self._scored = runner._get_prompt_logprobs_dict  # noqa: SLF001 - the only place that knows a prompt's request

    def __call__(self, hidden_states: Any, scheduled: Any) -> dict[str, Any]:  # noqa: ANN401 - as vLLM calls it
        every, requests = self._runner.num_prompt_logprobs, self._runner.requests
        given = {name: given_ids_of(requests[name].sampling_params.extra_args) for name in every}
        if not any(given.values()):
            return self._scored(hidden_states, scheduled)  # type: ignore[no-any-return]
        sampler, found = self._runner.sampler, dict[str, Any]()
        try:
            for name, token_ids in given.items():
                self._runner.num_prompt_logprobs = one = {name: len(token_ids) or every[name]}
                sampler.given_ids = token_ids
                found |= self._scored(hidden_states, scheduled)
                if not one:
                    del every[name]
        finally:
            sampler.given_ids, self._runner.num_prompt_logprobs = (), every
        return found


def use_token_scores(worker: Any) -> None:  # noqa: ANN401 - vLLM's Worker
    """Install our samplers in a worker process. vLLM calls this function with its worker."""
    runner = worker.model_runner
    sampler: Any = getattr(runner, "sampler", None)
    if type(sampler) is not Sampler:
        got = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
        raise ValueError(f"--token-scores: the sampler of vLLM's V1 model runner, got {got}")
    try:  # fail before the first request if anything is missing
        token_logprobs(torch.zeros((1, 2), device=runner.device), torch.zeros(1, device=runner.device).long()).wait()
    except GpuUnavailableError as error:
        raise ValueError(f"--token-scores: a device that token_logprobs can use, got none: {error}") from error
    sampler.__class__ = ScoringSampler
    sampler.runner = runner
    runner._get_prompt_logprobs_dict = _PromptScores(runner)  # noqa: SLF001 - as above
    judging = getattr(runner, "rejection_sampler", None)
    if judging is not None:
        judging.__class__ = ScoringRejectionSampler
