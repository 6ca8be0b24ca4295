"""Hand-off: a request goes on at another engine as if it had never left, or is refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.paddle.driver import Run, text_request, token_request, tokens_alone
from tests.engines.paddle.needs import NEEDS_PADDLE
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.paddle import PaddleEngine, PaddleOptions
from tokenbus_engines.paddle.handoff import RequestStates
from tokenbus_engines.paddle.network import Shape
from tokenbus_engines.paddle.requests import request_of

Arrays = dict[str, npt.NDArray[Any]]

FINGERPRINT = bytes(range(16))
SHAPE = Shape(layers=2, width=8, attention_heads=2)
OPTIONS = PaddleOptions(context=32)
STATES = RequestStates(SHAPE, FINGERPRINT, OPTIONS.context)
ASKED = text_request(9, "abc", 8)
STORY = "The wind was strong. That evening Leo was at the school again. "
REQUESTS = [
    text_request(1, STORY, 40, temperature=0.0, top_logprobs=2, include_draft_logprobs=True),
    text_request(2, "One morning ", 50, seed=1, top_logprobs=0),
    text_request(3, STORY * 3, 30, seed=2, temperature=1.4),
    token_request(4, [0, 65], 30, seed=3, top_k=20, stop=["e "]),
]


def engine(role: str, **options: Any) -> PaddleEngine:  # noqa: ANN401 - each option's own
    """Return an engine in a role."""
    usual: dict[str, Any] = {"role": role, "context": 512, "max_running": 8}
    return PaddleEngine(PaddleOptions(**usual | options))


def sound() -> Arrays:
    """Return the arrays of a sound state of the request ASKED."""
    return {
        "fingerprint": np.frombuffer(FINGERPRINT, np.uint8),
        "seed": np.array([2**64 - 1], np.uint64),
        "prompt": np.array([256, 97, 98, 99], np.int32),
        "output": np.array([0], np.int32),
        "drafts": np.array([1, 0, 257], np.int32),
        "draft_logits": np.linspace(-1, 1, 3 * 258, dtype=np.float32).reshape(3, 258),
        "keys": np.arange(2 * 4 * 8, dtype=np.float32).reshape(2, 2, 4, 4),
        "values": -np.arange(2 * 4 * 8, dtype=np.float32).reshape(2, 2, 4, 4),
    }


def state_of(arrays: Arrays) -> bytes:
    """Return a state as it travels."""
    from safetensors.numpy import save  # noqa: PLC0415 - of the extra, as paddle is

    state: bytes = save(arrays)
    return state


def refusal(state: bytes, generate: Generate = ASKED) -> str:
    """Return what is said of a state that is wrong."""
    with pytest.raises(ValueError, match=r"^state") as error:
        STATES.unpack(state, request_of(generate, OPTIONS))
    assert "\n" not in str(error.value)
    return str(error.value)


def changed(name: str, array: npt.ArrayLike, dtype: Any = None) -> str:  # noqa: ANN401 - numpy's
    """Return what is said of a sound state with one array changed."""
    return refusal(state_of(sound() | {name: np.asarray(array, dtype or sound()[name].dtype)}))


class TestEngines:
    """A prefill engine and a decode engine."""

    pytestmark = NEEDS_PADDLE

    @pytest.fixture
    def prefilled(self) -> Run:
        """Return a prefill engine that handed everything off."""
        run = Run(engine("prefill", prefill_chunk=100))
        for generate in REQUESTS:
            run.engine.admit(generate)
        return run.to_the_end()

    def test_first_token_and_proposals_come_with_the_hand_off(self, prefilled: Run) -> None:
        """Every request's first token is published with its logprobs and proposals, whatever else is (case 27)."""
        assert set(prefilled.states) == {1, 2, 3, 4}
        for generate in REQUESTS:
            last = prefilled.got[generate.request_key].rows[-1]
            assert last.status is RowStatus.HANDED_OFF
            assert (last.token_ids.size, last.proposal_token_ids.size) == (1, 3)
            assert last.logprobs.size == generate.HasField("top_logprobs")
        assert not prefilled.engine.has_work

    @pytest.mark.parametrize("options", [{}, {"max_running": 1, "slice_steps": 4}], ids=["slots for all", "one slot"])
    def test_tokens_are_those_of_one_engine(self, prefilled: Run, options: dict[str, int]) -> None:
        """With a seed the two engines give the tokens that a mixed one gives, and none is lost or repeated."""
        run = Run(engine("decode", **options), got=prefilled.got)
        for generate in REQUESTS:
            assert run.engine.admit(generate, prefilled.states[generate.request_key]) > 0
        run.to_the_end()
        for generate in REQUESTS:
            got = run.got[generate.request_key]
            assert got.tokens == tokens_alone(engine("mixed"), generate)
            assert got.statuses[-1] in {RowStatus.FINISHED_LENGTH, RowStatus.FINISHED_STOP}
        assert run.got[1].drafts[0].token_ids.tolist() == prefilled.got[1].rows[0].proposal_token_ids.tolist()

    def test_seed_that_was_drawn_goes_along(self) -> None:
        """A request that asks for no seed goes on with the one that the prefill engine drew."""
        first = Run(engine("prefill"))
        first.engine.admit(text_request(1, STORY, 20))
        seed = first.engine._scheduler._requests[1].seed
        first.to_the_end()
        decoding = engine("decode")
        decoding.admit(text_request(1, STORY, 20), first.states[1])
        assert decoding._scheduler._requests[1].seed == seed

    def test_request_that_ends_at_once_is_not_handed_off(self) -> None:
        """A first token that ends the request ends it at the prefill engine."""
        run = Run(engine("prefill"))
        run.engine.admit(text_request(1, STORY, 1))
        run.engine.admit(text_request(2, STORY, 9, temperature=0.0, stop_token_ids=list(range(60, 120))))
        run.to_the_end()
        assert run.got[1].statuses == [RowStatus.FINISHED_LENGTH]
        assert run.got[2].statuses == [RowStatus.FINISHED_STOP]
        assert not run.states

    def test_roles_refuse_what_is_not_theirs(self) -> None:
        """A decode engine wants a state and a prefill engine none; each says so, and stays as it was."""
        decoding, prefilling = engine("decode"), engine("prefill")
        with pytest.raises(ValueError, match=r"^state: a decode engine goes on from a prefill engine's, got none$"):
            decoding.admit(ASKED)
        with pytest.raises(ValueError, match=r"^state: none for a prefill engine, got one$"):
            prefilling.admit(ASKED, b"x")
        with pytest.raises(ValueError, match=r"^state: damaged, or no safetensors: "):
            decoding.admit(ASKED, b"x")
        assert not decoding.has_work
        assert not prefilling.has_work

    def test_state_of_other_weights_is_refused(self, prefilled: Run) -> None:
        """What other weights computed is no use here, and said to be so."""
        decoding = engine("decode")
        decoding._states._fingerprint = FINGERPRINT
        with pytest.raises(
            ValueError, match=r"^state.fingerprint: 000102030405060708090a0b0c0d0e0f, that of the weights"
        ):
            decoding.admit(REQUESTS[0], prefilled.states[1])


class TestStates:
    """States as bytes, which come over the network."""

    pytestmark = NEEDS_PADDLE

    def test_sound_state_is_taken_over(self) -> None:
        """A request goes on from what its state says; its own seed, if it has one, stays."""
        request = request_of(ASKED, OPTIONS)
        STATES.unpack(state_of(sound()), request)
        assert (request.output, list(request.drafts), request.seed) == ([0], [1, 0, 257], 2**64 - 1)
        assert request.handed is not None
        np.testing.assert_array_equal(request.handed.keys, sound()["keys"])
        packed = STATES.packed(request, *request.handed)
        assert packed == state_of(sound())
        seeded = request_of(text_request(9, "abc", 8, seed=5), OPTIONS)
        STATES.unpack(packed, seeded)
        assert seeded.seed == 5

    def test_drafts_that_do_not_fit_any_more_are_left_out(self) -> None:
        """No more drafts are verified than tokens are left, less the last, which needs none."""
        request = request_of(text_request(9, "abc", 3), OPTIONS)
        STATES.unpack(state_of(sound()), request)
        assert list(request.drafts) == [1]
        assert request.draft_logits is not None
        assert request.draft_logits.shape == (1, 258)

    def test_state_that_is_wrong_is_named(self) -> None:
        """Whatever is wrong with a state is told in one line: the array, the limit and the value."""
        assert changed("seed", [1, 2]) == "state.seed: shape (1,), got (2,)"
        assert changed("seed", [1], np.int64) == "state.seed: U64, got I64"
        assert changed("prompt", [256, 97, 98, 100]) == "state.prompt: the request's own, got another"
        assert changed("prompt", [256, 97]) == "state.prompt: shape (4,), got (2,)"
        assert changed("output", [258]) == "state.output[0]: 0 to 257, got 258"
        assert changed("output", [-1]) == "state.output[0]: 0 to 257, got -1"
        assert changed("output", [257]) == "state.output: no token that ends the request, got 257"
        assert changed("drafts", [0, 1, 300]) == "state.drafts[2]: 0 to 257, got 300"
        assert changed("drafts", [0, 1, 2, 3]) == "state.drafts: at most 3, got 4"
        assert changed("draft_logits", np.zeros((2, 258))) == "state.draft_logits: shape (3, 258), got (2, 258)"
        assert changed("keys", np.full((2, 2, 4, 4), np.nan)) == "state.keys: finite numbers up to 65504, got nan"
        assert changed("values", np.full((2, 2, 4, 4), 7e4)) == "state.values: finite numbers up to 65504, got 70000.0"
        assert changed("values", np.zeros((2, 2, 3, 4))) == "state.values: shape (2, 2, 4, 4), got (2, 2, 3, 4)"
        assert changed("more", [1], np.uint8).startswith("state: the arrays fingerprint, seed, prompt")

    def test_output_must_leave_something_to_do(self) -> None:
        """A state has a token of output, and not all that were asked for."""
        arrays = sound() | {"output": np.zeros(0, np.int32)}
        arrays |= {name: np.zeros((2, 2, 3, 4), np.float32) for name in ("keys", "values")}
        assert refusal(state_of(arrays)) == "state.output: 1 to 7 tokens, so that one is left, got 0"
        last = text_request(9, "abc", 1)
        assert refusal(state_of(sound()), last) == "state.output: 1 to 0 tokens, so that one is left, got 1"

    def test_state_is_never_larger_than_a_slot(self) -> None:
        """A state larger than the engine could have made is refused before it is read."""
        assert refusal(bytes(10**6)).startswith("state: at most ")

    @given(
        st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=4),
        st.integers(min_value=0),
    )
    def test_damaged_state_is_refused_or_harmless(self, changes: list[tuple[int, int]], cut: int) -> None:
        """Whatever bytes come, the answer is a ValueError in one line, or a request as a sound state could make it."""
        state = bytearray(state_of(sound()))
        for place, byte in changes:
            state[place % len(state)] = byte
        request = request_of(ASKED, OPTIONS)
        said = _said(lambda: STATES.unpack(bytes(state[: cut % (2 * len(state))]), request))
        assert said.startswith("state")
        assert "\n" not in said
        if request.handed is not None:
            assert request.handed.keys.shape == (2, 2, 4, 4)
            assert np.isfinite(request.handed.keys).all()
            assert all(0 <= token < 258 for token in [*request.output, *request.drafts])


def _said(action: Callable[[], None]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "state: sound"
