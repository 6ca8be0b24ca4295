"""What the tests of the engine share: requests, and what became of each, read from checked batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenbus_contracts import BatchKind, Limits, LogprobBatch, RowStatus, Scoring, decode, encode
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt, TokenPrompt
from tokenbus_engines.ngram import NgramEngine, NgramOptions, default_tokenizer
from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.step import StepArrays

PROMPT = "The old man said"
ENDED = (RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH, RowStatus.ABORTED, RowStatus.HANDED_OFF)


@dataclass(slots=True)
class Got:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    statuses: list[RowStatus] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    proposals: list[int] = field(default_factory=list)
    stop: int = 0

    @property
    def text(self) -> str:
        return default_tokenizer().decode(self.tokens)

    @property
    def has_ended(self) -> bool:
        return bool(self.statuses) and self.statuses[-1] in ENDED


def asked(key: int, prompt: str | list[int] = PROMPT, top_logprobs: int | None = None, **sampling: Any) -> Generate:  # noqa: ANN401 - any parameter
    generate = Generate(request_key=key, sampling=SamplingParameters(**sampling))
    if isinstance(prompt, str):
        generate.text.CopyFrom(TextPrompt(text=prompt))
    else:
        generate.tokens.CopyFrom(TokenPrompt(token_ids=prompt))
    if top_logprobs is not None:
        generate.top_logprobs = top_logprobs
    return generate


class Run:
    """An engine, and what its requests got. Every batch is encoded and read back, so that it keeps the contract."""

    def __init__(self, options: NgramOptions | None = None, requests: Iterable[Generate] = ()) -> None:
        self.engine = NgramEngine(options)
        self.got: dict[int, Got] = {}
        self.drafts: dict[int, Got] = {}
        self.batches: list[list[LogprobBatch]] = []
        self.arrays: list[list[StepArrays]] = []
        self._assembler = StepAssembler(Limits.schema(), self.engine.vocabulary_size)
        for request in requests:
            self.admit(request)

    def admit(self, request: Generate, state: bytes | None = None, before: Got | None = None) -> int:
        """Admit a request, perhaps one that another engine gave some tokens before."""
        self.got[request.request_key] = before or Got()
        return self.engine.admit(request, state)

    def step(self) -> list[LogprobBatch]:
        """Compute a step, and note what each request got."""
        arrays = list(self.engine.step())
        batches = [_read(made) for one in arrays for made in self._assembler.assemble(one)]
        for batch in batches:
            for place, key in enumerate(batch.request_keys.tolist()):
                is_draft = batch.header.kind is BatchKind.DRAFT
                got = self.drafts.setdefault(key, Got()) if is_draft else self.got[key]
                _note(batch, place, got, is_draft=is_draft)
        self.arrays.append(arrays)
        self.batches.append(batches)
        return batches

    def to_the_end(self) -> "Run":
        while self.engine.has_work:
            self.step()
        return self


def _read(batch: LogprobBatch) -> LogprobBatch:
    """Return a batch as it is after it was published: checked, and under some worker's name."""
    named = LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns)
    return decode(encode(named, Limits.schema()), Limits.schema())


def _note(batch: LogprobBatch, place: int, got: Got, *, is_draft: bool) -> None:
    row = batch.row(place)
    if not is_draft:
        assert row.position == len(got.tokens), "tokens come without a hole"
    got.tokens += row.token_ids.tolist()
    got.counts.append(row.token_ids.size)
    got.statuses.append(RowStatus(row.status))
    got.verified.append(int(row.draft_token_count))
    got.proposals += row.proposal_token_ids.tolist()
    got.stop = row.stop
    if row.scoring is Scoring.FULL:
        got.logprobs += row.logprobs.tolist()
        got.ranks += row.ranks.tolist()
        lines = zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
        got.alternatives += [list(zip(ids, values, strict=True)) for ids, values in lines]
