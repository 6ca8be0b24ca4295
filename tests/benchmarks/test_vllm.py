"""The benchmark beside vLLM: how a stream is read, and whose processor time is whose."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.processes import Child
from benchmarks.vllm.measure import roles
from benchmarks.vllm.reader import READY, TOKENS, read_steps
from tests.support.waiting import wait_until
from tests.system.deployment import Deployment
from tokenbus.worker import Publisher, StepArrays, StepAssembler
from tokenbus_contracts import RowStatus


def test_reader_counts_every_token_of_a_stream(tmp_path: Path) -> None:
    settings = Deployment(tmp_path).settings()
    with Child() as reader, Publisher(settings, vocabulary_size=100) as publisher:
        reader.begin(read_steps, settings)
        assert reader.answer() == READY
        assembler = StepAssembler(settings.limits, 100)
        for position in range(3):
            statuses = np.full(2, RowStatus.FINISHED_LENGTH if position == 2 else RowStatus.ACTIVE, np.uint8)
            arrays = StepArrays(
                request_ids=np.array([7, 8], np.uint64),
                positions=[position] * 2,
                token_counts=[1, 1],
                token_ids=[5, 6],
                statuses=statuses,
            )
            for batch in assembler.assemble(arrays):
                publisher.publish(batch)
        wait_until(lambda: reader.ask(TOKENS) == 6)


def test_what_an_engine_starts_counts_as_its_publisher() -> None:
    """A process below the engine's is the publisher, unless its title is one of vLLM's; below others it is theirs."""
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    titled = ["bash", "-c", f'exec -a VLLM::Worker "{sys.executable}" -c "import sys; sys.stdin.read()"']
    with (
        subprocess.Popen(sleeper, stdin=subprocess.PIPE) as plain,
        subprocess.Popen(titled, stdin=subprocess.PIPE) as model,
    ):
        wait_until(lambda: Path(f"/proc/{model.pid}/cmdline").read_bytes().startswith(b"VLLM::Worker"))
        of_engine, of_server = dict(roles(os.getpid(), "engine")), dict(roles(os.getpid(), "front end"))
        assert (of_engine[os.getpid()], of_engine[plain.pid], of_engine[model.pid]) == ("engine", "publisher", "model")
        assert (of_server[plain.pid], of_server[model.pid]) == ("front end", "model")
        for process in (plain, model):
            process.communicate()
