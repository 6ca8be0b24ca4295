"""Requests: those that vLLM has, and what each of its steps made of them, as rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenbus_contracts import RowStatus, ValueKind
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN
from tokenbus_engines.vllm.columns import Logprobs, Row, method_of, step_arrays
from tokenbus_services.worker import StepArrays


@dataclass(slots=True)
class Request:
    """A request that vLLM has."""

    key: int
    top_k: int | None
    stops: Sequence[str] = ()
    """Its stop strings, as many as the column `stops` can tell apart."""
    detokenizer: Any = None
    """vLLM's IncrementalDetokenizer, where it has any."""
    position: int = 0

    def row(self, status: RowStatus) -> Row:
        """Return a row of it without tokens."""
        return Row(key=self.key, position=self.position, status=status, top_k=self.top_k)


class Requests:
    """The requests that vLLM has, by its names for them, from their first step to their last."""

    def __init__(self, vllm: SimpleNamespace, config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
        reasons = vllm.FinishReason
        self._stop = reasons.STOP
        self._statuses = {
            reasons.STOP: RowStatus.FINISHED_STOP,
            reasons.REPETITION: RowStatus.FINISHED_STOP,
            reasons.LENGTH: RowStatus.FINISHED_LENGTH,
            reasons.ABORT: RowStatus.ABORTED,
            reasons.ERROR: RowStatus.UNRECOVERABLE,
        }
        speculative = config.speculative_config
        self._method = method_of(None if speculative is None else speculative.method)
        self._value_kind = ValueKind[str(config.model_config.logprobs_mode).upper()]
        self._open: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def add(self, name: str, request: Request) -> None:
        """Add one that vLLM has from now on."""
        self._open[name] = request

    def names_of(self, keys: Iterable[int]) -> list[str]:
        """Return the names of those of these keys that are open."""
        wanted = frozenset(keys)
        return [name for name, request in self._open.items() if request.key in wanted] if wanted else []

    def abort(self, names: Iterable[str]) -> list[Row]:
        """Remove requests that get nothing more, and return their last rows; others are ignored."""
        ended = [self._open.pop(name, None) for name in names]
        return [request.row(RowStatus.ABORTED) for request in ended if request is not None]

    def arrays(self, rows: Sequence[Row], logprobs: Logprobs) -> StepArrays:
        """Return rows as a step; a ValueError says that vLLM's logprobs are not of these rows."""
        return step_arrays(rows, logprobs, method=self._method, value_kind=self._value_kind)

    def rows_of(self, scheduled: Any, indices: dict[str, int], outputs: Iterable[Any]) -> tuple[list[Row], list[str]]:  # noqa: ANN401
        """Return the rows of a step, and the names of those requests that a stop string ended, as vLLM cannot know.

        The requests that it ended are removed. It takes the step's SchedulerOutput, the index of each request in the
        step's arrays, and its EngineCoreOutput objects.
        """
        rows, stopped = [], []
        silent = dict.fromkeys(scheduled.num_scheduled_tokens, RowStatus.PREFILLING)
        silent |= dict.fromkeys((scheduled.preempted_req_ids or set()) - silent.keys(), RowStatus.PREEMPTED)
        for output in outputs:
            name = output.request_id
            silent.pop(name, None)
            request = self._open.get(name)
            if request is None:
                continue
            row = self._row(request, output, scheduled, indices)
            if row.status is RowStatus.FINISHED_STOP and output.finish_reason is None:
                stopped.append(name)
            if row.status is not RowStatus.ACTIVE:
                del self._open[name]
            rows.append(row)
        rows += [self._open[name].row(status) for name, status in silent.items() if name in self._open]
        return rows, stopped

    def _row(self, request: Request, output: Any, scheduled: Any, indices: dict[str, int]) -> Row:  # noqa: ANN401
        """Return the row of a request that has tokens in this step, or that ends."""
        name, reason = output.request_id, output.finish_reason
        status = RowStatus.ACTIVE if reason is None else self._statuses[reason]
        tokens = [] if status in {RowStatus.ABORTED, RowStatus.UNRECOVERABLE} else output.new_token_ids
        stop = STOP_TOKEN if isinstance(output.stop_reason, int) else 0
        if request.detokenizer is not None:
            kept, text = _until_stop(request.detokenizer, tokens, is_stop=reason == self._stop)
            if text is not None:
                tokens, status = tokens[:kept], RowStatus.FINISHED_STOP
                stop = FIRST_STOP_TEXT + request.stops.index(text) if text in request.stops else 0
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        # An invalid draft is one that the form of an output rules out: it was not computed.
        invalid = (scheduled.num_invalid_spec_tokens or {}).get(name, 0)
        row = Row(
            key=request.key,
            position=request.position,
            status=status,
            token_ids=tokens,
            top_k=request.top_k,
            drafts=drafts - invalid if tokens else 0,
            index=indices[name] if tokens else 0,
            stop=stop,
        )
        request.position += len(tokens)
        return row


def _until_stop(detokenizer: Any, tokens: Sequence[int], *, is_stop: bool) -> tuple[int, str | None]:  # noqa: ANN401
    """Return how many of the next tokens there are up to a stop string's end, and the string; all and None without.

    One token at a time: versions differ in what they leave behind a stop string within a step. `is_stop` says that the
    last token is a stop token or the model's own end.
    """
    for place, token in enumerate(tokens, 1):
        if text := detokenizer.update([token], is_stop and place == len(tokens)):
            return place, text
    return len(tokens), None
