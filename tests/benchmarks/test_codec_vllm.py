"""The codec's benchmark beside vLLM's own classes, which stubs stand in for here."""

import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.codec import vllm, vllm_shape
from benchmarks.codec.peer import Queues
from benchmarks.codec.vllm import Installed, InstalledToItsEnd
from benchmarks.errors import NotRunError
from benchmarks.machine import Placement
from benchmarks.workload import Case, make_steps, truth

TOP_KS = (0, 20, None)


class Codec(vllm_shape.ArrayCodec):
    """Encoder and decoder in one, made without an argument as vLLM's encoder is."""

    def __init__(self, kind: type[vllm_shape.EngineCoreOutputs] = vllm_shape.EngineCoreOutputs) -> None:
        """Decode vLLM's shape."""
        super().__init__(kind)


class Processor:
    """What LogprobsProcessor does in vLLM: dicts of token id to logprob and rank, the sampled token first."""

    def __init__(self, *, logprobs: list[Any], num_logprobs: int, **_: object) -> None:
        """Start with the list that is given."""
        self.logprobs = logprobs
        self._top_k = num_logprobs

    def update_from_output(self, output: vllm_shape.EngineCoreOutput) -> None:
        """Append a dict for each token."""
        assert output.new_logprobs is not None
        for ids, values, rank in zip(*output.new_logprobs[:3], strict=True):
            ranks = [int(rank), *range(1, self._top_k + 1)]
            # Not strict: vLLM too reads only as many columns as the request wants.
            entries = zip(ids.tolist(), values.tolist(), ranks, strict=False)
            self.logprobs.append({i: SimpleNamespace(logprob=v, rank=r) for i, v, r in entries})


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put modules of vLLM's names where an import finds them."""
    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": Processor},
        "vllm.v1.engine": {name: getattr(vllm_shape, name) for name in ("EngineCoreOutput", "EngineCoreOutputs")},
        "vllm.v1.outputs": {"LogprobsLists": vllm_shape.LogprobsLists},
        "vllm.v1.serial_utils": {"MsgpackEncoder": Codec, "MsgpackDecoder": Codec},
    }
    for name, members in stubs.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("top_k", TOP_KS)
def test_installed_vllm_is_used(top_k: int | None) -> None:
    """Where vLLM can be imported, its own encoder, decoder, structs and processor carry the step."""
    steps = make_steps(Case(16, 3, top_k), 1, seed=7)
    for peer in (Installed(), InstalledToItsEnd()):
        peer.prepare(steps)
        assert peer.deliver(steps[0]) == truth(steps[0])


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("top_k", TOP_KS)
def test_the_processor_does_no_more_than_each_request_wants(top_k: int | None) -> None:
    """Its dicts are no wider than the request's own k, also in a mixed step, and of one step alone."""
    (step,) = steps = make_steps(Case(16, 3, top_k), 1, seed=7)
    peer = InstalledToItsEnd()
    peer.prepare(steps)
    queues: Queues = {address: deque() for address in peer.addresses(step)}
    for _ in range(2):
        peer.carry(step, queues)
    for address, wanted in zip(peer.addresses(step), step.top_ks, strict=True):
        delivered = [positions for _, positions in queues[address]]
        assert [len(positions) for positions in delivered] == [3, 3]
        assert max(len(position) for positions in delivered for position in positions) <= wanted + 1


@pytest.mark.parametrize(("missing", "reason"), [("vllm", "vLLM is not installed"), ("torch", "vLLM misses torch")])
def test_vllm_that_cannot_be_imported_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str, reason: str
) -> None:
    """A vLLM that is not there and one that lacks a dependency are distinguished."""

    def fail(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r} for {name}", name=missing)

    monkeypatch.setattr(vllm, "import_module", fail)
    for kind in (Installed, InstalledToItsEnd):
        with pytest.raises(NotRunError, match=f"^not run: {reason}$"):
            kind()


def test_the_machine_names_vllm_only_where_it_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of vLLM and torch stand beside figures of vLLM, and nowhere else."""
    monkeypatch.setattr(machine, "version", lambda name: f"version of {name}")
    with_vllm, without = (machine.description(Placement.here(), vllm=ran) for ran in (True, False))
    assert {name: with_vllm[name] for name in with_vllm.keys() - without.keys()} == {
        "vllm": "version of vllm",
        "torch": "version of torch",
    }
