"""A run as one record: what the JSON file holds, and what the tables, the figure and the page are made of."""

from collections.abc import Callable

from benchmarks.codec.lineup import PEERS, lineup
from benchmarks.codec.measure import STEADY, STEPS, Timing, measure, measure_stages
from benchmarks.codec.rows import DECODED, LISTS, READ, ROWS, measure_rows, readers
from benchmarks.machine import Placement, description, on_cores
from benchmarks.outputs import Record
from benchmarks.workload import HEADLINE_TOKENS, MIXED, TOP_KS, Case, cases

OURS = "ours"
_OURS_LISTS = "ours_lists"
_SYSV, _VLLM, _VLLM_SHAPE, _VLLM_PROCESSED = "fastdeploy_sysv", "vllm", "vllm_shape", "vllm_processed"
_ZEROMQ, _ZEROMQ_ELSEWHERE = "zeromq", "zeromq_other_core"
_SYSV_GOAL, _VLLM_GOAL, _ZEROMQ_GOAL, _BYTES_GOAL = 16, 60, 3, 20
_ONE_ROW_GOAL, _ROW_GOAL, _LISTS_GOAL = 15, 1, 2
_OTHER_SIZES_SHARE = 4


def run(*, quick: bool, turns: int, seed: int, progress: Callable[[str], None]) -> Record:
    """Measure everything and return the record; sizes without a goal get a quarter of the turns."""
    placement = Placement.here()
    with on_cores(placement.kept), lineup(placement) as (peers, absent):
        results, stages = [], []
        sizes = list(cases(quick=quick))
        for number, case in enumerate(sizes, 1):
            name = f"{case.rows} rows x {case.tokens_per_row}, k = {case.top_k_name}"
            progress(f"[{number}/{len(sizes)}] {name}")
            share = turns if case.is_headline else max(1, turns // _OTHER_SIZES_SHARE)
            results.append(_result(case, measure(case, peers, share, seed), share))
            if case.is_headline:
                stages.append({"top_k": case.top_k_name, "us": measure_stages(case, turns, seed)})
        rows = []
        for case in (Case(count, HEADLINE_TOKENS, top_k) for count in ROWS for top_k in TOP_KS):
            progress(f"rows of {case.rows} x {case.tokens_per_row}, k = {case.top_k_name}")
            rows.append({"rows": case.rows, "top_k": case.top_k_name, "us": measure_rows(case, peers, turns, seed)})
        labels = {line.name: line.label for line in readers(peers)}
    return {
        "benchmark": "codec",
        "machine": description(placement, vllm=_VLLM not in absent),
        "settings": {
            "quick": quick,
            "seed": seed,
            "different_steps": STEPS,
            "mixed_top_ks": list(MIXED),
            "garbage_collection": "disabled while timing",
            "order": "the peers take turns, in an order drawn anew for every round",
            "steps_a_turn": 1 + STEADY,
        },
        "peers": [
            {
                "name": peer.name,
                "label": peer.label,
                "short": peer.short,
                "includes": peer.includes,
                "delivers": peer.delivers,
                "not_run": absent.get(peer.name),
            }
            for peer in PEERS
        ],
        "results": results,
        "stages": stages,
        "rows": rows,
        "row_labels": labels,
        "goals": [
            *(goal for result in results if _is_headline(result) for goal in goals_of(result)),
            *(goal for result in rows for goal in _row_goals(result)),
        ],
    }


def headline(record: Record) -> list[Record]:
    """Return the results of the goals' sizes, one for each k."""
    return [result for result in record["results"] if _is_headline(result)]


def _is_headline(result: Record) -> bool:
    return Case(result["rows"], result["tokens_per_row"], None).is_headline


def _result(case: Case, timings: dict[str, Timing], turns: int) -> Record:
    ours = timings[OURS]
    return {
        "rows": case.rows,
        "tokens_per_row": case.tokens_per_row,
        "top_k": case.top_k_name,
        "turns": turns,
        "peers": {
            name: {
                **timing._asdict(),
                "bytes_per_token": round(timing.message_bytes / case.tokens, 2),
                "times_ours": round(timing.median_us / ours.median_us, 3),
                "first_times_ours": round(timing.first_median_us / ours.first_median_us, 3),
            }
            for name, timing in timings.items()
        },
    }


def goals_of(result: Record) -> list[Record]:
    """Return the goals of one k; a mixed step has none."""
    if result["top_k"] == "mixed":
        return []
    peers = result["peers"]
    vllm = _VLLM if _VLLM in peers else _VLLM_SHAPE
    goals = [
        _at_least("SysV struct / Tokenbus", _times(result, _SYSV), _SYSV_GOAL),
        _at_least(f"{'vLLM' if vllm == _VLLM else 'vLLM shape'} / Tokenbus", _times(result, vllm), _VLLM_GOAL),
        _at_least("vLLM + processor / Tokenbus", _times(result, _VLLM_PROCESSED), None),
        _at_least("vLLM + processor / as lists", _times(result, _VLLM_PROCESSED, _OURS_LISTS), None),
        _at_most("Tokenbus / ZeroMQ", _inverse(_times(result, _ZEROMQ)), _ZEROMQ_GOAL),
        _at_most("Tokenbus / ZeroMQ, two cores", _inverse(_times(result, _ZEROMQ_ELSEWHERE)), None),
    ]
    if result["top_k"] == "0":
        goals.append(_at_most("bytes a token", peers[OURS]["bytes_per_token"], _BYTES_GOAL))
    return [{"top_k": result["top_k"], **goal} for goal in goals]


def _row_goals(result: Record) -> list[Record]:
    if result["top_k"] == "mixed":
        return []
    taken, vllm = result["us"], f"{DECODED}_{_VLLM_SHAPE}"
    goals = (
        [
            _at_most("one row: decode, rows (us)", taken[DECODED], _ONE_ROW_GOAL),
            _at_most("one row: vLLM shape / that", taken[vllm] / taken[DECODED], None),
        ]
        if result["rows"] == 1
        else [
            _at_most("of 256: a row (us)", taken[READ], _ROW_GOAL),
            _at_most("of 256: a row as lists (us)", taken[LISTS], _LISTS_GOAL),
        ]
    )
    return [{"top_k": result["top_k"], **goal} for goal in goals]


def _times(result: Record, name: str, of: str = OURS) -> float | None:
    peers = result["peers"]
    return round(peers[name]["median_us"] / peers[of]["median_us"], 3) if name in peers else None


def _inverse(value: float | None) -> float | None:
    return round(1 / value, 3) if value else None


def _at_least(goal: str, measured: float | None, wanted: float | None) -> Record:
    met = None if measured is None or wanted is None else measured >= wanted
    text = "(no goal)" if wanted is None else f"at least {wanted}"
    return {"goal": goal, "wanted": text, "measured": measured, "met": met}


def _at_most(goal: str, measured: float | None, wanted: float | None) -> Record:
    met = None if measured is None or wanted is None else measured <= wanted
    text = "(no goal)" if wanted is None else f"at most {wanted}"
    return {"goal": goal, "wanted": text, "measured": measured, "met": met}
