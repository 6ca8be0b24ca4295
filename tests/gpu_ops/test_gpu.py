"""The GPU path on a real card. Where there is none these tests say so, and nothing else stands in for them."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.gpu_ops.logits import DTYPES, FAR_KINDS, KINDS, Floats, masked, random, rounded
from tests.gpu_ops.reference import Wanted, assert_extras, assert_right
from tokenbus_contracts import ContractError, ValueKind
from tokenbus_contracts.generated import logprob_batch_pb2 as pb
from tokenbus_gpu_ops import FaultReason, TokenColumns, token_logprobs
from tokenbus_gpu_ops.cuda import compile as compiling
from tokenbus_gpu_ops.cuda.card import card
from tokenbus_gpu_ops.cuda.driver import core
from tokenbus_gpu_ops.cuda.memory import Pool

VOCABULARIES = (1, 2, 7, 99, 111, 2047, 50_257, 128_256, 151_936, 262_144)


@pytest.fixture(scope="module")
def torch() -> Any:  # noqa: ANN401 - a module
    try:
        import torch as module
    except ImportError:
        pytest.skip("not run: PyTorch, which these tests make their arrays with, is not installed here")
    if not module.cuda.is_available():
        pytest.skip("not run: there is no CUDA card here")
    return module


def on_card(torch: Any, logits: Floats, dtype: str) -> Any:  # noqa: ANN401
    return torch.from_numpy(np.ascontiguousarray(logits)).cuda().to(getattr(torch, dtype))


def ids_on_card(torch: Any, ids: npt.ArrayLike) -> Any:  # noqa: ANN401
    return torch.as_tensor(np.asarray(ids), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_vocabulary(torch: Any, dtype: str, vocabulary: int) -> None:  # noqa: ANN401
    rng = np.random.default_rng(vocabulary)
    logits = rounded(random(rng, 3, vocabulary), dtype)
    ids = rng.integers(0, vocabulary, 3)
    tensor, ids_there = on_card(torch, logits, dtype), ids_on_card(torch, ids)
    for top_k in {0, 1, min(20, vocabulary), min(127, vocabulary)}:
        assert_right(token_logprobs(tensor, ids_there, top_k), logits, ids, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocabulary"), [(2, 500), (2, 151_936), (200, 3001)])
def test_every_kind_of_logits(torch: Any, kind: str, dtype: str, rows: int, vocabulary: int) -> None:  # noqa: ANN401
    """Equal, masked, tiny, sorted and crowded logits come out right, in one part a row and in many (case 33)."""
    rng = np.random.default_rng(5)
    logits = rounded(KINDS[kind](rng, rows, vocabulary), dtype)
    ids = rng.integers(0, vocabulary, rows)
    tensor, ids_there = on_card(torch, logits, dtype), ids_on_card(torch, ids)
    for top_k in (5, 100):
        assert_right(token_logprobs(tensor, ids_there, top_k), logits, ids, top_k)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAR_KINDS)
@pytest.mark.parametrize("rows", [2, 300])
def test_logits_at_the_end_of_the_floats(torch: Any, kind: str, dtype: str, rows: int) -> None:  # noqa: ANN401
    rng = np.random.default_rng(6)
    logits = rounded(FAR_KINDS[kind](rng, rows, 5000), dtype)
    logits[1, :4990] = -np.inf
    logits[0, [5, 4999]] = logits[0].max()
    ids, tensor = logits.argmax(axis=1), on_card(torch, logits, dtype)
    wanted = Wanted([1] * rows, [True] * rows, [True] * rows, [[0, 4999]] * rows, [10] * rows)
    result = token_logprobs(tensor, ids_on_card(torch, ids), 9, other_logits=tensor, **wanted.arguments)
    assert_right(result, logits, ids, 9)
    assert_extras(result, logits, ids, wanted, logits, logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["equal", "masked", "crowded", "random", "ascending"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2_000_003), (140, 151_936)])
def test_every_way_to_the_largest(torch: Any, kind: str, dtype: str, rows: int, vocabulary: int) -> None:  # noqa: ANN401
    made = rounded(KINDS[kind](np.random.default_rng(18), min(rows, 4), vocabulary), dtype)
    chosen = np.arange(rows) % len(made)
    ids = np.full(rows, 7)
    result = token_logprobs(on_card(torch, made, dtype)[chosen], ids_on_card(torch, ids), 127)
    table = result.alternative_token_ids.reshape(rows, 127)
    assert (table == table[chosen]).all()
    checked = token_logprobs(on_card(torch, made, dtype), ids_on_card(torch, ids[: len(made)]), 127)
    assert checked.alternative_token_ids.tolist() == table[: len(made)].ravel().tolist()
    assert_right(checked, made, ids[: len(made)], 127)


@pytest.mark.parametrize("rows", [1, 16, 131, 256, 1000, 4096])
@pytest.mark.parametrize("top_k", [0, 20])
def test_every_number_of_rows(torch: Any, rows: int, top_k: int) -> None:  # noqa: ANN401
    rng = np.random.default_rng(rows)
    logits = rounded(random(rng, rows, 1111), "bfloat16")
    logits[0, 5] = -np.inf
    ids = rng.integers(0, 1111, rows)
    for kind in (ValueKind.RAW_LOGPROBS, ValueKind.RAW_LOGITS):
        result = token_logprobs(on_card(torch, logits, "bfloat16"), ids_on_card(torch, ids), top_k, value_kind=kind)
        assert_right(result, logits, ids, top_k, as_logits=kind is ValueKind.RAW_LOGITS)


@pytest.mark.parametrize("ids_on_gpu", [True, False])
@pytest.mark.parametrize("layout", ["rows", "tokens", "requests"])
def test_requests_with_several_tokens(torch: Any, layout: str, ids_on_gpu: bool) -> None:  # noqa: ANN401, FBT001
    """Accepted tokens are found by count and offset, ids alone where nothing else is wanted (cases 5, 11)."""
    rng = np.random.default_rng(9)
    store = rounded(random(rng, 9, 50_257), "bfloat16")
    rows, accepted = [0, 1, 4, 6, 7, 8], [10, 11, 40, 60, 61, 62]
    by_row = np.full(9, -1)
    by_row[rows] = accepted
    by_request = np.array([[10, 11, -1], [-1, -1, -1], [40, -1, -1], [60, 61, 62]])
    ids = {"rows": by_row, "tokens": np.array(accepted), "requests": by_request}[layout]
    asked: dict[str, Any] = {"token_counts": [2, 0, 1, 3], "offsets": [0, 3, 4, 6], "scored": [True, True, False, True]}
    given = ids_on_card(torch, ids) if ids_on_gpu else ids
    result = token_logprobs(on_card(torch, store, "bfloat16"), given, [2, 0, 0, 5], **asked)
    _assert_same(result, token_logprobs(store, accepted, [2, 0, 0, 5], **asked))


def test_requests_of_which_none_is_scored(torch: Any) -> None:  # noqa: ANN401
    tensor = on_card(torch, random(np.random.default_rng(17), 5, 300), "float32")
    result = token_logprobs(tensor, ids_on_card(torch, np.arange(5)), 3, scored=[False] * 5)
    assert result.logprobs.size == result.alternative_token_ids.size == 0
    assert list(pb.LogprobBatch.FromString(bytes(result.body)).token_ids) == list(range(5))


def test_faults_are_reported_and_neighbours_are_right(torch: Any) -> None:  # noqa: ANN401
    """Each faulty row is named with its reason, ids that are none too, and the others are right (case 24)."""
    rng = np.random.default_rng(10)
    logits = random(rng, 300, 3000)
    ids = rng.integers(0, 3000, 300)
    bad = logits.copy()
    bad[1, 500] = np.nan
    bad[2, 3] = np.inf
    bad[4] = -np.inf
    ids[[6, 7]] = 3000, -1
    result = token_logprobs(on_card(torch, bad, "float32"), ids_on_card(torch, ids), 4)
    faulty = [fault.row for fault in result.faults]
    assert faulty == [1, 2, 4, 6, 7]
    reasons = [FaultReason.NOT_A_NUMBER, FaultReason.INFINITE, FaultReason.ALL_MASKED]
    assert [fault.reason for fault in result.faults] == [*reasons, *[FaultReason.ID_OUT_OF_RANGE] * 2]
    assert np.isnan(result.logprobs[faulty]).all()
    fine = np.setdiff1d(np.arange(300), faulty)
    ids[faulty] = 0
    right = token_logprobs(logits, ids, 4)
    assert result.ranks[fine].tolist() == right.ranks[fine].tolist()
    tables = [each.alternative_token_ids.reshape(300, 4)[fine].tolist() for each in (result, right)]
    assert tables[0] == tables[1]


def test_it_is_queued_on_the_callers_stream_and_waits_for_nothing(torch: Any) -> None:  # noqa: ANN401
    """The call returns while the stream is still busy with what comes before, and reads what that leaves."""
    rng = np.random.default_rng(11)
    logits = random(rng, 5, 9000)
    ids = rng.integers(0, 9000, 5)
    source, tensor = on_card(torch, logits, "float32"), torch.zeros(5, 9000, device="cuda")
    ids_there = ids_on_card(torch, ids)
    token_logprobs(source, ids_there, 6).wait()  # compiled and loaded before
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        tensor.copy_(source)
        result = token_logprobs(tensor, ids_there, 6)
        assert not result.ready
    assert_right(result, logits, ids, 6)
    assert result.ready


def test_results_are_their_holders_until_they_let_go(torch: Any) -> None:  # noqa: ANN401
    """Held results keep their memory; memory that no caller holds is used again, so that it does not grow."""
    rng = np.random.default_rng(12)
    logits = random(rng, 60, 2000)
    tensor = on_card(torch, logits, "float32")
    held = [token_logprobs(tensor[row : row + 3], [1, 2, 3], 5) for row in range(50)]
    views = [result.columns for result in held]
    del held
    for row, columns in enumerate(views):
        twin = token_logprobs(logits[row : row + 3], [1, 2, 3], 5)
        assert columns["alternative_token_ids"].tolist() == twin.alternative_token_ids.tolist()
        assert columns["ranks"].tolist() == twin.ranks.tolist()
    del views, columns
    before = card(0).pool.bytes
    for _ in range(300):
        token_logprobs(tensor, ids_on_card(torch, np.arange(60)), 5).wait()
    assert card(0).pool.bytes == before


def test_held_results_have_a_bound(torch: Any) -> None:  # noqa: ANN401
    torch.zeros(1, device="cuda")
    pool = Pool(max_bytes=1 << 15)
    first, second = pool.take(1), pool.take(1 << 14)
    assert first is not second
    with pytest.raises(MemoryError, match=r"results that are still referenced take 32768 bytes .* at most 32768"):
        pool.take(1)
    pool.give_back(first)
    assert pool.take(100) is first


def test_threads_on_streams_of_their_own(torch: Any) -> None:  # noqa: ANN401
    rng = np.random.default_rng(13)
    logits = random(rng, 16, 20_000)
    tensor = on_card(torch, logits, "float32")
    twin = token_logprobs(logits, np.arange(16), 9)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(40):
                result = token_logprobs(tensor, np.arange(16), 9)
                if result.alternative_token_ids.tolist() != twin.alternative_token_ids.tolist():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_generated_classes_read_what_the_card_wrote(torch: Any) -> None:  # noqa: ANN401
    rng = np.random.default_rng(14)
    for rows, top_ks in ((1, [0]), (33, list(range(33))), (257, [5] * 257), (4100, [1] * 4100)):
        tensor = on_card(torch, random(rng, rows, 999), "float32")
        result = token_logprobs(tensor, np.zeros(rows, int), top_ks)
        message = pb.LogprobBatch.FromString(bytes(result.body))
        assert message.SerializeToString() == bytes(result.body)
        assert list(message.ranks) == result.ranks.tolist()
        assert list(message.alternative_token_ids) == result.alternative_token_ids.tolist()


def test_kernels_are_compiled_once_for_a_user(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setenv("TOKENBUS_CACHE_DIR", str(tmp_path))
    torch.zeros(1, device="cuda")
    device = core().Device(0)
    compiling.kernel(device, "float32", with_alternatives=False)
    (kept,) = (tmp_path / "kernels").iterdir()
    assert f"sm_{device.arch}" in kept.name
    monkeypatch.setattr(compiling, "compiled", None)
    compiling.kernel(device, "float32", with_alternatives=False)


def test_ids_elsewhere_are_refused(torch: Any) -> None:  # noqa: ANN401
    logits = torch.zeros(2, 50, device="cuda")
    with pytest.raises(ContractError, match=r"token_ids: whole numbers \(int32, int64\), got int16"):
        token_logprobs(logits, torch.zeros(2, dtype=torch.int16, device="cuda"))
    with pytest.raises(ContractError, match=r"token_ids\[1\]: at most 49, got 50"):
        token_logprobs(logits, torch.tensor([0, 50]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 500), (3, 151_936), (200, 3001)])
def test_extras_of_every_kind_of_logits(torch: Any, kind: str, dtype: str, rows: int, vocabulary: int) -> None:  # noqa: ANN401
    """All that can be asked for at once, by some requests, is float64's and the twin's, whichever tensor is raw."""
    rng = np.random.default_rng(20)
    raw, processed = (rounded(KINDS[each](rng, rows, vocabulary), dtype) for each in (kind, "masked"))
    ids, wanted = rng.integers(0, vocabulary, rows), Wanted.drawn(rng, rows, vocabulary)
    kinds = (raw, processed, ValueKind.RAW_LOGPROBS), (processed, raw, ValueKind.PROCESSED_LOGPROBS)
    for first, second, value_kind in kinds:
        tensors = on_card(torch, first, dtype), on_card(torch, second, dtype)
        arguments = wanted.arguments | {"value_kind": value_kind}
        result = token_logprobs(tensors[0], ids_on_card(torch, ids), 7, other_logits=tensors[1], **arguments)
        assert_right(result, first, ids, 7)
        assert_extras(result, first, ids, wanted, second, processed)
        twin = token_logprobs(tensors[0].cpu(), ids, 7, other_logits=tensors[1].cpu(), **arguments)
        _assert_same(result, twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "asked", ["other_logits", "entropies", "given_token_ids", "mask_bounds", "all", "masks-of-others"]
)
@pytest.mark.parametrize("rows", [2, 300])
def test_extras_of_all_requests(torch: Any, asked: str, dtype: str, rows: int) -> None:  # noqa: ANN401
    """One thing for all requests, alone and with the others: without uploads where nothing differs."""
    rng = np.random.default_rng(21)
    logits, other = (rounded(make(rng, rows, 5003), dtype) for make in (random, masked))
    everything = {
        "entropies": True,
        "given_token_ids": [7, 7, 5002],
        "mask_bounds": 20,
        "other_logits": on_card(torch, other, dtype),
    }
    chosen = {"all": set(everything), "masks-of-others": {"other_logits", "mask_bounds"}}.get(asked, {asked})
    arguments: dict[str, Any] = {name: value for name, value in everything.items() if name in chosen}
    if asked == "masks-of-others":
        arguments["other_logprobs"] = False
    ids = rng.integers(0, 5003, rows)
    for top_k in (0, 20):
        result = token_logprobs(on_card(torch, logits, dtype), ids_on_card(torch, ids), top_k, **arguments)
        assert_right(result, logits, ids, top_k)
        wanted = Wanted(
            [1] * rows,
            [asked in {"all", "other_logits"}] * rows,
            ["entropies" in chosen] * rows,
            [arguments.get("given_token_ids", [])] * rows,
            [arguments.get("mask_bounds", 0)] * rows,
        )
        assert_extras(result, logits, ids, wanted, other, other if "other_logits" in chosen else logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(9, 151_936), (200, 151_936), (9, 2_000_003), (9, 1025)])
def test_masks_up_to_their_bounds(torch: Any, dtype: str, rows: int, vocabulary: int) -> None:  # noqa: ANN401
    """Masks of one, of exactly the bound and of one more, together, scattered, and at both ends of a row."""
    rng = np.random.default_rng(22)
    made = np.full((rows, vocabulary), -np.inf, np.float32)
    for row in range(rows):
        size = [1, 20, 21, 1000, 1023, 1024, 1025, 2, vocabulary][row % 9]
        places = rng.permutation(vocabulary)[:size], np.arange(size), np.arange(vocabulary - size, vocabulary)
        made[row, places[row % 3]] = rng.normal(0, 3, size).astype(np.float32)
    logits = rounded(made, dtype)
    ids = logits.argmax(axis=1)
    bounds = [20 if row % 2 else 1024 for row in range(rows)]
    wanted = Wanted([1] * rows, [False] * rows, [True] * rows, [[]] * rows, bounds)
    result = token_logprobs(on_card(torch, logits, dtype), ids_on_card(torch, ids), 1, **wanted.arguments)
    assert_extras(result, logits, ids, wanted, logits, logits)
    alike = token_logprobs(on_card(torch, logits, dtype), ids_on_card(torch, ids), mask_bounds=1024)
    wanted = Wanted([1] * rows, [False] * rows, [False] * rows, [[]] * rows, [1024] * rows)
    assert_extras(alike, logits, ids, wanted, logits, logits)


def test_extras_of_rows_that_lie_anywhere(torch: Any) -> None:  # noqa: ANN401
    """The two tensors need not lie alike: each has its own strides and its own edges."""
    rng = np.random.default_rng(24)
    for dtype in DTYPES:
        stores = [rounded(make(rng, 12, 5003), dtype) for make in (random, masked)]
        first, second = (on_card(torch, store, dtype) for store in stores)
        for begin in range(9):
            logits, other = stores[0][::2, begin : begin + 4001], stores[1][:6, 1000 - begin : 5001 - begin]
            there = first[::2, begin : begin + 4001], second[:6, 1000 - begin : 5001 - begin]
            ids, wanted = rng.integers(0, 4001, 6), Wanted.drawn(rng, 6, 4001)
            result = token_logprobs(there[0], ids_on_card(torch, ids), 9, other_logits=there[1], **wanted.arguments)
            assert_right(result, logits, ids, 9)
            assert_extras(result, logits, ids, wanted, other, other)
        assert_right(
            token_logprobs(first[:1].expand(5, -1), [3] * 5, 2), np.repeat(stores[0][:1], 5, axis=0), [3] * 5, 2
        )


def test_faults_of_either_tensor(torch: Any) -> None:  # noqa: ANN401
    rng = np.random.default_rng(25)
    logits, other = random(rng, 40, 3000), random(rng, 40, 3000)
    bad, worse = logits.copy(), other.copy()
    bad[1, 500], bad[2, 3], bad[4] = np.nan, np.inf, -np.inf
    worse[1, 2], worse[7, 2999], worse[8] = np.inf, np.nan, -np.inf
    for entropies in (True, False):
        asked: dict[str, Any] = {"entropies": entropies, "given_token_ids": [5], "mask_bounds": 7}
        ids = ids_on_card(torch, np.arange(40))
        tensors = on_card(torch, bad, "float32"), on_card(torch, worse, "float32")
        result = token_logprobs(tensors[0], ids, 2, other_logits=tensors[1], **asked)
        twin = token_logprobs(bad, np.arange(40), 2, other_logits=worse, **asked)
        assert result.faults == twin.faults
        _assert_same(result, twin)


def _assert_same(result: TokenColumns, twin: TokenColumns) -> None:
    twins = twin.columns | twin.extra_columns
    columns = result.columns | result.extra_columns
    assert columns.keys() == twins.keys()
    for name, column in columns.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(column, twins[name], rtol=1e-6, atol=2e-5, err_msg=name)
        else:
            assert column.tolist() == twins[name].tolist(), name
