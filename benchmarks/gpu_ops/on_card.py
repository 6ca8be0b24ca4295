"""The measurements on a card."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.gpu_ops.card import Call, Kernel, copy_bandwidth, host_microseconds, microseconds
from benchmarks.gpu_ops.cases import DTYPES, KINDS, TOP_KS, Case, logits_on_card, sampled_ids
from benchmarks.gpu_ops.peers import PEERS, Peer, Run
from benchmarks.report import Cell, Row, progress
from tokenbus_gpu_ops import token_logprobs

_CACHE_TIMES = 4
_COMPILED_ROWS = (256, 1536)
_NEAR_ENOUGH = 1e-4
_CHECKED_ROWS = 64
_EXTRAS_ROWS = 768
_PROMPT_ROWS = 8192
_KEPT = _FEW_KEPT, _MANY_KEPT = 50, 1000
"""How many logits the processed rows keep."""


def measure(rows: Sequence[int]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the tables of the first card, each with its title; NotRunError: there is none."""
    try:
        import torch
    except ImportError:
        raise NotRunError("not run: PyTorch, which makes the logits, is not installed") from None
    if not torch.cuda.is_available():
        raise NotRunError("not run: there is no CUDA card")
    runs, absent = _runs(torch)
    yield "the card", [_card(torch)]
    first: dict[tuple[str, str], list[Row]] = {}
    for dtype, kind in [*((DTYPES[0], kind) for kind in KINDS), *((dtype, KINDS[0]) for dtype in DTYPES[1:])]:
        progress(f"{dtype}, {kind}")
        logits = logits_on_card(torch, dtype, kind, max(rows))
        ids = sampled_ids(torch, logits)
        cases = [Case(dtype, kind, count, top_k) for count in rows for top_k in TOP_KS]
        peers = runs if (dtype, kind) == (DTYPES[0], KINDS[0]) else {}
        first[dtype, kind] = [_row(torch, case, logits, ids, peers) for case in cases]
        del logits, ids
        torch.cuda.empty_cache()
    yield f"{DTYPES[0]}, {KINDS[0]} logits: microseconds", first[DTYPES[0], KINDS[0]]
    yield f"{DTYPES[0]}, the kernel by kind of logits", _kernels({kind: first[DTYPES[0], kind] for kind in KINDS})
    yield f"{KINDS[0]} logits, the kernel by type", _kernels({dtype: first[dtype, KINDS[0]] for dtype in DTYPES})
    yield "host time of a call: microseconds until it returns, with the card idle", _host(torch)
    for dtype in (DTYPES[0], "float32"):
        progress(f"{dtype}, extras")
        yield f"{dtype}, k = 20, {_EXTRAS_ROWS} rows, with what can be asked for beside", _extras(torch, dtype)
    progress("prompt scores")
    yield f"{_PROMPT_ROWS} rows of prompt scores", [_prompt(torch)]
    yield "peers", [{"peer": peer.label, "what it does": absent.get(peer.label, peer.includes)} for peer in PEERS]


def _kernels(tables: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return the kernel's times of several tables, side by side."""
    return [
        {"rows": same[0]["rows"], "k": same[0]["k"]}
        | {name: row["kernel"] for name, row in zip(tables, same, strict=True)}
        | {f"{name}, of the floor": row["of the floor"] for name, row in zip(tables, same, strict=True)}
        for same in zip(*tables.values(), strict=True)
    ]


def _card(torch: Any) -> Row:  # noqa: ANN401
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": torch.cuda.get_device_name(),
        "multiprocessors": properties.multi_processor_count,
        "L2, MiB": properties.L2_cache_size >> 20,
        "CUDA": torch.version.cuda,
        "torch": torch.__version__,
        "a large copy, TB/s": copy_bandwidth(torch) / 1e6,
    }


def _runs(torch: Any) -> tuple[dict[Peer, Run], dict[str, str]]:  # noqa: ANN401
    runs: dict[Peer, Run] = {}
    absent = {}
    for peer in PEERS:
        try:
            runs[peer] = peer.make(torch)
        except NotRunError as error:
            absent[peer.label] = str(error)
    return runs, absent


def _row(torch: Any, case: Case, logits: Any, ids: Any, runs: dict[Peer, Run]) -> Row:  # noqa: ANN401
    """Return one case's times; it goes over as many different rows as the card's cache cannot hold."""
    size = torch.cuda.get_device_properties(0).L2_cache_size * _CACHE_TIMES
    different = min(len(logits) // case.rows, max(1, -(-size // (case.rows * logits[0].nbytes))))
    places = [slice(at * case.rows, (at + 1) * case.rows) for at in range(different)]
    inputs, their_ids = [logits[place] for place in places], [ids[place] for place in places]

    _check(case, inputs[0], their_ids[0])
    kernel = Kernel(torch, inputs, their_ids[0], case.top_k)
    us = microseconds(torch, kernel)
    row: dict[str, Cell] = {
        "rows": case.rows,
        "k": case.top_k,
        "floor": case.floor_us,
        "kernel": us,
        "of the floor": us / case.floor_us,
        "call": microseconds(torch, _over(token_logprobs, inputs, their_ids, case.top_k)),
    }
    for peer, run in runs.items():
        if peer.everywhere or case.rows in _COMPILED_ROWS:
            row[peer.label] = microseconds(torch, _over(run, inputs, their_ids, case.top_k))
    return row


def _over(run: Run, inputs: Sequence[Any], ids: Sequence[Any], top_k: int) -> Call:
    def call(number: int) -> object:
        at = number % len(inputs)
        return run(inputs[at], ids[at], top_k)

    return call


def _check(case: Case, logits: Any, ids: Any) -> None:  # noqa: ANN401
    """Refuse to time an answer that is not float64's."""
    few = slice(0, min(case.rows, _CHECKED_ROWS))
    result = token_logprobs(logits[few], ids[few], case.top_k)
    exact = logits[few].double()
    sampled = exact.gather(-1, ids[few, None])
    logprobs = (sampled[:, 0] - exact.logsumexp(-1)).cpu().numpy()
    ranks = ((exact > sampled).sum(-1) + 1).tolist()
    if result.faults or result.ranks.tolist() != ranks or np.abs(result.logprobs - logprobs).max() > _NEAR_ENOUGH:
        raise WrongDeliveryError(f"{case}: {result.logprobs[:4]} and {result.ranks[:4]} are not {logprobs[:4]}")


def _extras(torch: Any, dtype: str) -> list[Row]:  # noqa: ANN401
    """Return the times of calls that ask for more, beside that of one that does not."""
    logits = logits_on_card(torch, dtype, "random", _EXTRAS_ROWS)
    largest = logits.float().topk(_MANY_KEPT, -1).values
    processed, wide = (logits.masked_fill(logits < largest[:, kept - 1 :][:, :1], float("-inf")) for kept in _KEPT)
    ids = sampled_ids(torch, processed)
    given: dict[str, Any] = {"given_token_ids": list(range(20))}
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        ("nothing", None, {}),
        ("entropies", None, {"entropies": True}),
        ("raw and processed", processed, {}),
        ("20 given ids", None, given),
        (f"raw and processed, masks of {_FEW_KEPT}", processed, {"mask_bounds": 1024}),
        (f"raw and processed, masks of {_MANY_KEPT}", wide, {"mask_bounds": 1024}),
        ("all of it", processed, {"entropies": True, "mask_bounds": 1024, **given}),
    ]
    rows: list[Row] = []
    for label, other, arguments in asked:
        kernel = microseconds(torch, Kernel(torch, [logits], ids, 20, [] if other is None else [other], **arguments))

        def call(_: int, other: Any = other, arguments: dict[str, Any] = arguments) -> object:  # noqa: ANN401
            return token_logprobs(logits, ids, 20, other_logits=other, **arguments)

        whole = microseconds(torch, call)
        first = rows[0] if rows else {"kernel": kernel, "call": whole}
        rows.append(
            {
                "asked": label,
                "kernel": kernel,
                "times nothing": kernel / float(first["kernel"] or 1),
                "call": whole,
                "times nothing's call": whole / float(first["call"] or 1),
                "host": host_microseconds(torch, call),
            }
        )
    return rows


def _prompt(torch: Any) -> Row:  # noqa: ANN401
    case = Case(DTYPES[0], KINDS[0], _PROMPT_ROWS, 0)
    logits = logits_on_card(torch, case.dtype, case.kind, case.rows)
    row = _row(torch, case, logits, sampled_ids(torch, logits), {})
    copied = logits.nbytes / copy_bandwidth(torch)
    return {**row, "at a copy's speed": copied, "of that": float(row["kernel"] or 0) / copied}


def _host(torch: Any) -> list[Row]:  # noqa: ANN401
    """Return how long a call takes to return, for rows all alike and for requests of several tokens each."""
    logits = logits_on_card(torch, "bfloat16", "random", 1024)
    ids = sampled_ids(torch, logits)
    few, few_ids = [logits[:256]], [ids[:256]]
    counts = np.tile([1, 2, 3, 4], 64)
    offsets = np.arange(256) * 4
    top_ks = np.tile([0, 5, 20, 1], 64)

    def ragged(_: int) -> object:
        return token_logprobs(logits, ids, top_ks, token_counts=counts, offsets=offsets)

    alike = [(k, host_microseconds(torch, _over(token_logprobs, few, few_ids, k))) for k in (0, 20)]
    rows: list[Row] = [{"": f"256 rows, k = {k}", "microseconds": us} for k, us in alike]
    requests = "256 requests, 1 to 4 tokens, k by request"
    return [*rows, {"": requests, "microseconds": host_microseconds(torch, ragged)}]
