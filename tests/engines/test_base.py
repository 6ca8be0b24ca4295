"""BaseEngine: a subclass that computes logits alone is a whole engine."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.engines.runs import Got, Run, asked
from tests.engines.test_continuation import continued
from tests.engines.test_prompt_scores import check, scores_of, scoring
from tests.support.model_folder import with_byte_fallback, write_model
from tests.support.settings import settings_of
from tokenbus import BaseEngine, EngineStepError, RowStatus, SettingsError, load_tokenizer, run_engine
from tokenbus.tokenizer_probes import digest_of, encoder_of, probed

BYTES = 258
TABLE = np.random.default_rng(3).normal(scale=3, size=(BYTES, BYTES)).astype(np.float32)
"""For each token, the logits of the next."""


class Table(BaseEngine):
    def __init__(self) -> None:
        super().__init__("bytes", context=64, max_running=2)

    def logits(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        return TABLE[[token_ids[-1] for token_ids in sequences]]


def logprobs_after(token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    values = TABLE[list(token_ids)].astype(float)
    values -= values.max(axis=1, keepdims=True)
    return np.asarray(values - np.log(np.exp(values).sum(axis=1, keepdims=True)))


def got(*requests: object) -> list[Got]:
    run = Run(Table(), requests).to_the_end()  # type: ignore[arg-type]
    return list(run.got.values())


def test_tokens_are_chosen_from_the_logits_and_scored() -> None:
    mine, _, alone = got(
        asked(1, "ab", 2, temperature=0, max_tokens=9, ignore_end_token=True),
        asked(2, "ab", seed=1, max_tokens=20),
        asked(3, "xyz", seed=5, max_tokens=12, ignore_end_token=True),
    )
    best = [ord("b")]
    for _ in range(9):
        best.append(int(TABLE[best[-1]].argmax()))
    values = logprobs_after(best[:-1])
    assert mine.tokens == best[1:]
    assert mine.statuses[-1] is RowStatus.FINISHED_LENGTH
    assert mine.ranks == [1] * 9
    np.testing.assert_allclose(mine.logprobs, values.max(axis=1), atol=1e-5)
    assert [[token for token, _ in each] for each in mine.alternatives] == np.argsort(-values)[:, :2].tolist()
    assert alone.tokens == got(asked(3, "xyz", seed=5, max_tokens=12, ignore_end_token=True))[0].tokens


def test_a_lost_request_goes_on_bit_for_bit() -> None:
    request = asked(1, "ab", 1, seed=4, max_tokens=10, ignore_end_token=True)
    (whole,) = got(request)
    for count in range(1, 10):
        before = Got([row._replace(request_id=99) for row in whole.rows[:count]])
        run = Run(Table())
        run.admit(continued(request, before.tokens), before=before)
        parts = run.to_the_end().got[99]
        assert (parts.tokens, parts.logprobs) == (whole.tokens, whole.logprobs)


def test_a_prompt_is_scored() -> None:
    request = scoring(7, "to be or not", 0, top_logprobs=3)
    prompt = [256, *b"to be or not"]
    check(scores_of(Run(Table(), [request]).to_the_end())[7], prompt, request.prompt_scoring, logprobs_after, 1e-5)


def test_logits_may_change_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def padded(self: Table, sequences: Sequence[list[int]]) -> npt.NDArray[np.float32]:
        found = plain(self, sequences)
        sizes.append(len(sequences))
        for token_ids in sequences:
            token_ids.extend([0] * 64)
        return found

    plain = Table.logits
    (expected,) = got(asked(1, "ab", seed=4, max_tokens=10, ignore_end_token=True))
    monkeypatch.setattr(Table, "logits", padded)
    run = Run(Table(), [asked(1, "ab", seed=4, max_tokens=10, ignore_end_token=True), scoring(7, "to be or not", 0)])
    assert run.to_the_end().got[1].tokens == expected.tokens
    assert max(sizes) == 2


class Plain:
    """A tokenizer without an end token."""

    vocabulary_size = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 256])


def test_tokenizer_needs_no_end_token() -> None:
    class Endless(Table):
        def __init__(self) -> None:
            BaseEngine.__init__(self, Plain())

    run = Run(Endless(), [asked(1, "ab", seed=1, max_tokens=30)]).to_the_end()
    assert run.got[1].statuses[-1] is RowStatus.FINISHED_LENGTH
    with pytest.raises(TypeError, match="tokenizer: an object with encode and token_bytes, got int"):
        BaseEngine.__init__(Table.__new__(Table), 42)  # type: ignore[arg-type]


def test_tokenizer_of_a_models_folder_is_recognized(tmp_path: Path) -> None:
    """A gateway reads the same folder, also if texts begin with a token and chats do not."""
    folder = write_model(tmp_path / "model", with_byte_fallback())
    engine = Table.__new__(Table)
    BaseEngine.__init__(engine, str(folder))
    tokenizer = load_tokenizer(str(folder))
    assert engine.tokenizer_digest == digest_of(tokenizer, probed(encoder_of(tokenizer)))


def test_what_it_does_not_offer_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"sampling\.frequency_penalty: only 0 with this engine, got 0\.5"):
        Table().admit(asked(1, frequency_penalty=0.5))


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (TABLE[:3], r"logits: an array of shape \(1, 258\), got \(3, 258\)"),
        (np.full((1, BYTES), np.nan), "logits: finite numbers, got infinity or NaN"),
    ],
)
def test_wrong_logits_fail_the_step_in_one_line(
    wrong: npt.NDArray[np.float32], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Table(), [asked(1)])
    monkeypatch.setattr(Table, "logits", lambda *_: wrong)
    with pytest.raises(EngineStepError, match=line):
        run.step()


def test_worker_of_another_role_is_refused() -> None:
    settings = settings_of({"worker.role": "prefill"})
    with pytest.raises(SettingsError, match=r"worker\.role: mixed, the role of the engine, got 'prefill'"):
        run_engine(Table(), settings, stop=threading.Event())
