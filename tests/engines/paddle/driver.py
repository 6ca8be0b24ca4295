"""Runs an engine, puts each of its batches through the contract, and keeps what each request got."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.services.builders import generate_of
from tokenbus_contracts import BatchKind, Limits, LogprobBatch, Row, RowStatus, decode, encode
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt, TokenPrompt
from tokenbus_engines.paddle import PaddleEngine
from tokenbus_engines.paddle.tokenizer import ByteTokenizer
from tokenbus_services.worker.assembler import StepAssembler


@dataclass(slots=True)
class Got:
    """All rows of one request."""

    rows: list[Row] = field(default_factory=list)
    drafts: list[Row] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Return its tokens, which must follow each other without a hole."""
        found: list[int] = []
        for row in self.rows:
            assert row.position == len(found)
            found += row.token_ids.tolist()
        return found

    @property
    def text(self) -> str:
        return ByteTokenizer().decode(self.tokens)

    @property
    def statuses(self) -> list[RowStatus]:
        return [row.status for row in self.rows]


@dataclass(slots=True)
class Run:
    """An engine that is run, and what came of it."""

    engine: PaddleEngine
    got: dict[int, Got] = field(default_factory=dict)
    batches: list[LogprobBatch] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    assembler: StepAssembler = field(init=False)

    def __post_init__(self) -> None:
        """Make what turns steps into batches."""
        self.assembler = StepAssembler(Limits.default(), self.engine.vocabulary_size)

    def step(self) -> list[LogprobBatch]:
        """Compute a step; each of its batches keeps the contract."""
        made = []
        for arrays in self.engine.step():
            self.states |= arrays.states
            for batch in self.assembler.assemble(arrays):
                header = batch.header._replace(worker_id="w", sequence=len(self.batches) + 1)
                addressed = decode(encode(LogprobBatch.of_views(header, batch.columns)))
                made.append(addressed)
                self._keep(addressed)
        self.batches += made
        return made

    def _keep(self, batch: LogprobBatch) -> None:
        for row in batch.rows():
            got = self.got.setdefault(row.key, Got())
            (got.rows if batch.header.kind is BatchKind.TARGET else got.drafts).append(row)

    def to_the_end(self, most: int = 2000) -> "Run":
        """Compute steps until there is nothing left to do."""
        for _ in range(most):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError(f"still at work after {most} steps")


def text_request(key: int, text: str, max_tokens: int = 24, **fields: Any) -> Generate:  # noqa: ANN401 - both messages'
    """Return a request for what follows a text; names are of the sampling parameters, or of the request."""
    return _request(key, max_tokens, fields, text=TextPrompt(text=text))


def token_request(key: int, tokens: Sequence[int], max_tokens: int = 24, **fields: Any) -> Generate:  # noqa: ANN401
    """Return a request for what follows some tokens."""
    return _request(key, max_tokens, fields, tokens=TokenPrompt(token_ids=tokens))


def _request(key: int, max_tokens: int, fields: dict[str, Any], **prompt: Any) -> Generate:  # noqa: ANN401
    own = {name: fields.pop(name) for name in ("top_logprobs", "include_draft_logprobs") if name in fields}
    return generate_of(key, sampling=SamplingParameters(max_tokens=max_tokens, **fields), **own, **prompt)


def tokens_alone(engine: PaddleEngine, generate: Generate) -> list[int]:
    """Return what a request gets from an engine that has no other."""
    engine.admit(generate)
    return Run(engine).to_the_end().got[generate.request_key].tokens
