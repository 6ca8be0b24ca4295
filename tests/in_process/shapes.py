"""Which worlds the state machines try: tight ones, because what is never full is never tested."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.in_process.world import Shape

ALWAYS: dict[str, object] = {
    "limits.max_message_bytes": 2048, "limits.max_rows": 4, "worker.max_requests": 4, "worker.retention_items": 4096,
    "worker.retention_bytes": 20_000, "processor.max_requests": 16,
}  # fmt: skip
_TIGHT: dict[str, list[object]] = {
    "worker.policy": ["block", "shed"], "worker.checksum": [True, False], "worker.retention_items": [12, 32],
    "processor.credit_items": [4, 8, 64], "processor.credit_bytes": [2048, 65_536], "client.window_frames": [1, 2, 8],
    "client.window_bytes": [600, 65_536],
}  # fmt: skip
_PATIENT: dict[str, list[object]] = {
    "bus.heartbeat_timeout_ms": [20_000],
    "clients.detached_timeout_ms": [30_000],
    "client.resume_timeout_ms": [3_600_000],
    "processor.unclaimed_timeout_ms": [30_000],
    "processor.abort_timeout_ms": [3_600_000],
    "processor.step_timeout_ms": [3_600_000],
}
_HEALING: dict[str, list[object]] = {
    "worker.checksum": [True],
    "processor.replay_attempts": [1000],
    "processor.replay_timeout_ms": [300],
}
_FAULTY: dict[str, list[object]] = {
    "worker.policy": ["block", "shed", "fail"], "processor.request_timeout_ms": [3_600_000],
    "processor.pending_items": [6, 64], "processor.max_open_steps": [1, 2, 16], "processor.replay_attempts": [1, 3],
    "processor.ended_requests": [2, 64], "processor.max_requests": [6, 16], "clients.detached_timeout_ms": [5000],
    "clients.send_queue_frames": [3, 64], "client.resume_timeout_ms": [20_000],
    "client.request_buffer_rows": [3, 4096],
}  # fmt: skip


def _shapes(choices: dict[str, list[object]], capacities: list[int]) -> st.SearchStrategy[Shape]:
    chosen = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in choices.items()})
    return st.builds(
        Shape,
        settings=chosen.map(lambda found: ALWAYS | found),
        workers=st.integers(1, 2),
        clients=st.integers(1, 2),
        parts=st.integers(1, 2),
        drafts=st.booleans(),
        by_columns=st.booleans(),
        capacity=st.sampled_from(capacities),
    )


def lossless_shapes() -> st.SearchStrategy[Shape]:
    return _shapes(_TIGHT | _PATIENT, [64])


def healing_shapes() -> st.SearchStrategy[Shape]:
    return _shapes(_TIGHT | _PATIENT | _HEALING, [64])


def continuing_shapes() -> st.SearchStrategy[Shape]:
    """Return worlds in which workers that are lost are noticed, some with prefill and decode workers."""
    shapes = _shapes(_TIGHT | _PATIENT | {"bus.heartbeat_timeout_ms": [5000]}, [64])
    return st.builds(
        lambda shape, kinds: replace(
            shape, continues=True, drafts=False, parts=1, workers=kinds[0], pairs=kinds[1], processors=kinds[2]
        ),
        shapes,
        st.tuples(st.sampled_from([(1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]), st.integers(1, 2)).map(
            lambda kinds: (*kinds[0], kinds[1])
        ),
    )


def faulty_shapes() -> st.SearchStrategy[Shape]:
    return _shapes(_TIGHT | _FAULTY, [6, 64])
