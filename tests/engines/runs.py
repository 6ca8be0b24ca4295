"""Runs a demo engine, puts each of its batches through the contract, and keeps what each request got."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.in_process.builders import generate_of
from tokenbus.engines.engine import BatchEngine
from tokenbus.engines.ngram import NgramEngine, NgramOptions
from tokenbus.engines.paddle import PaddleEngine, PaddleOptions
from tokenbus.plugins import Tokenizer
from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, Limits, LogprobBatch, Row, RowStatus, decode, encode
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt, TokenPrompt

PROMPT = "The old man said"


def asked(
    key: int,
    prompt: str | Sequence[int] = PROMPT,
    top_logprobs: int | None = None,
    *,
    include_draft_logprobs: bool = False,
    **sampling: Any,  # noqa: ANN401 - any parameter
) -> Generate:
    fields: dict[str, Any] = {} if top_logprobs is None else {"top_logprobs": top_logprobs}
    if isinstance(prompt, str):
        fields["text"] = TextPrompt(text=prompt)
    else:
        fields["tokens"] = TokenPrompt(token_ids=prompt)
    sampled = SamplingParameters(**sampling)
    return generate_of(key, sampling=sampled, include_draft_logprobs=include_draft_logprobs, **fields)


@dataclass(slots=True)
class Got:
    rows: list[Row] = field(default_factory=list)
    drafts: list[Row] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Return its tokens, which must follow each other without a hole."""
        found: list[int] = []
        for row in self.rows:
            assert row.position == len(found), "tokens come without a hole"
            found += row.token_ids.tolist()
        return found

    @property
    def statuses(self) -> list[RowStatus]:
        return [row.status for row in self.rows]

    @property
    def logprobs(self) -> list[float]:
        return [value for row in self.rows for value in row.logprobs.tolist()]

    @property
    def ranks(self) -> list[int]:
        return [rank for row in self.rows for rank in row.ranks.tolist()]

    @property
    def alternatives(self) -> list[list[tuple[int, float]]]:
        lines = [
            (ids, values)
            for row in self.rows
            for ids, values in zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
        ]
        return [list(zip(ids, values, strict=True)) for ids, values in lines]

    @property
    def stop(self) -> int:
        return self.rows[-1].stop


class Run:
    def __init__(self, engine: Any, requests: Iterable[Generate] = ()) -> None:  # noqa: ANN401 - any demo engine
        self.engine = engine
        self.got: dict[int, Got] = {}
        self.batches: list[list[LogprobBatch]] = []
        self.arrays: list[list[StepArrays]] = []
        self._assembler = StepAssembler(Limits.schema(), engine.vocabulary_size)
        for request in requests:
            self.admit(request)

    def admit(self, request: Generate, before: Got | None = None) -> int:
        tokens: int = self.engine.admit(request)
        self.got[request.request_id] = before or Got()
        return tokens

    def step(self) -> list[LogprobBatch]:
        arrays = list(self.engine.step())
        batches = [_published(made) for one in arrays for made in self._assembler.assemble(one)]
        for batch in batches:
            for row in batch.rows():
                got = self.got[row.request_id]
                (got.rows if batch.header.kind is BatchKind.TARGET else got.drafts).append(row)
        self.arrays.append(arrays)
        self.batches.append(batches)
        return batches

    def to_the_end(self, most: int = 2000) -> "Run":
        for _ in range(most):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError(f"still at work after {most} steps")


def _published(batch: LogprobBatch) -> LogprobBatch:
    """Return a batch as it is after it was published: checked, and under some worker's name."""
    named = LogprobBatch.of_views(batch.header._replace(worker_id="w"), batch.columns)
    return decode(encode(named, Limits.schema()), Limits.schema())


def text_of(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")


def tokens_alone(engine: BatchEngine[Any], generate: Generate) -> list[int]:
    return Run(engine, [generate]).to_the_end().got[generate.request_id].tokens


def ngram(requests: Iterable[Generate] = (), /, **options: Any) -> Run:  # noqa: ANN401 - each option's own
    return Run(NgramEngine(NgramOptions(**options)), requests)


def paddle(requests: Iterable[Generate] = (), /, **options: Any) -> Run:  # noqa: ANN401 - as above
    return Run(PaddleEngine(PaddleOptions(**{"context": 512, "max_running": 8} | options)), requests)
