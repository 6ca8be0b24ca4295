"""Feed the decoder damaged messages, many and fast: `python -m tests.contracts.fuzz --messages N --seed S`.

Each must decode or be a ContractError; what decodes must survive another round. A child process does it, with a
limit on its memory and with warnings as errors, so that a crash is a finding and not the end. A message follows
from its seed and index alone, and can be made again by itself: `--seed S --first INDEX --messages 1`. Linux only.
"""

import argparse
import ctypes
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from random import Random

from tests.contracts.bombs import BOMBS
from tests.contracts.broken_messages import damage, mutate
from tests.contracts.other_encodings import LONGEST_KEY, reencoded
from tests.contracts.strategies import canonical
from tests.contracts.valid_messages import Sizes, seeded, uniform_message, valid_message
from tokenbus_contracts import ContractError, Limits, decode, encode
from tokenbus_contracts.generated import logprob_batch_pb2 as pb

MEMORY_ALLOWANCE = 6 * Limits.schema().max_message_bytes
"""What the child may take beyond what it has when it begins, in bytes.

The worst that was measured: a message of the largest size, twice while it is made, and two to three times its size
for 4M unpacked counts in the parser, which doubles its array as it grows. One more is slack. A reader that believes
a length, a count or a depth that a message only claims needs hundreds of times as much, and fails here.
"""

HUNG_AFTER = 60.0
"""How long one message may take, in seconds; the slowest takes a tenth of one."""

_LIMITS = (Limits.schema(), Limits.default())
# Which of its fields, its encoding and its bytes are changed, one line for each share of the messages.
_WAYS = (
    (True, False, False),
    (True, False, False),
    (True, False, False),
    (True, True, False),
    (False, True, False),
    (False, True, True),
    (False, False, True),
    (False, False, True),
)
_TOO_LARGE = 0.0005
_CROSSED = 0.25


@dataclass
class Report:
    """What a campaign came to."""

    seed: int
    first: int
    messages: int
    seconds: float = 0.0
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    bombs: dict[str, str] = field(default_factory=dict)
    baseline_bytes: int = 0
    failure: str = ""
    failed_at: str = ""
    saved_as: str = ""


class Maker:
    """Makes the messages of a campaign, each from its seed and index alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._small = [valid_message(seeded(number)) for number in range(400)]
        self._larger = [valid_message(seeded(number), Sizes(60, 8, 20)) for number in range(12)]
        self._larger += [uniform_message(513), uniform_message(1024)] * 4
        self._large = [valid_message(seeded(number), Sizes(600, 16, 127)) for number in range(3)]

    def message(self, index: int) -> tuple[bytes, Limits]:
        rng = seeded(self._seed << 40 | index)
        limits = rng.choice(_LIMITS)
        valid = rng.choices((self._small, self._larger, self._large), (2000, 10, 1))[0]
        message, other = pb.LogprobBatch(), rng.choice(valid)
        message.CopyFrom(rng.choice(valid))
        fields, encoding, contents = _WAYS[rng.randrange(len(_WAYS))]
        for _ in range(rng.choice((1, 1, 2)) if fields else 0):
            _change(rng, message, other)
        # Another encoding of a large message shows nothing that a small one's does not, and takes far longer.
        longest_key = rng.choice((LONGEST_KEY, LONGEST_KEY, 2 * LONGEST_KEY))
        small = valid is self._small
        data = reencoded(rng, message, longest_key) if encoding and small else canonical(message)
        for _ in range(rng.choice((1, 1, 2, 4)) if contents else 0):
            data = damage(rng, data, canonical(other))
        if rng.random() < _TOO_LARGE:
            data += bytes(limits.max_message_bytes)
        return data, limits


def _change(rng: Random, message: pb.LogprobBatch, other: pb.LogprobBatch) -> None:
    """Change a field in some way, or take it over from another message."""
    if rng.random() >= _CROSSED:
        mutate(rng, message)
        return
    name = rng.choice(list(message.DESCRIPTOR.fields_by_name))
    message.ClearField(name)
    getattr(message, name).MergeFrom(getattr(other, name))


def check(data: bytes, limits: Limits, expected: str = "") -> str:
    """Return the rule that a message breaks, or "accepted"; raise what no message may bring about."""
    verdict = "accepted"
    try:
        batch = decode(data, limits)
    except ContractError as error:
        verdict = error.rule.value
        if not str(error).startswith(error.field):
            raise AssertionError("an error that does not name its field") from error
    else:
        if decode(encode(batch, limits), limits) != batch:
            raise AssertionError("a batch that is another one after a round")
    if expected and verdict != expected:
        raise AssertionError(f"{verdict!r} instead of {expected!r}")
    return verdict


def campaign(report: Report, at: ctypes.c_longlong, sender: Connection) -> None:
    """Run in the child: feed all messages, report at every one which it is, and send the report at the end."""
    warnings.simplefilter("error")
    maker = Maker(report.seed)
    begun = time.perf_counter()
    verdicts: Counter[str] = Counter()
    report.baseline_bytes = _address_space()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (report.baseline_bytes + MEMORY_ALLOWANCE, unlimited[1]))
    try:
        for number, bomb in enumerate(BOMBS):
            at.value = -1 - number
            report.bombs[bomb.name] = check(bomb.make(), Limits.schema(), bomb.verdict)
        for index in range(report.first, report.first + report.messages):
            at.value = index
            verdicts[check(*maker.message(index))] += 1
    except Exception:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        report.failure = traceback.format_exc()
    report.seconds = round(time.perf_counter() - begun, 3)
    report.accepted = verdicts.pop("accepted", 0)
    report.refused = dict(verdicts.most_common())
    sender.send(report)


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text().split(maxsplit=1)[0]
    return int(pages) * resource.getpagesize()


def run(report: Report) -> Report:
    """Return the report of a campaign that a child process runs, also where the child crashes or hangs."""
    context = multiprocessing.get_context("spawn")
    at = context.RawValue(ctypes.c_longlong, report.first)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=campaign, args=(report, at, sender))
    child.start()
    sender.close()
    try:
        _watch(child, receiver, at, report)
        report = receiver.recv()
    except EOFError:
        child.join()
        report.failure = f"the process that decodes ended with exit code {child.exitcode}"
    child.join()
    if report.failure:
        index = at.value
        data = BOMBS[-1 - index].make() if index < 0 else Maker(report.seed).message(index)[0]
        report.failed_at = f"bomb-{-1 - index}" if index < 0 else str(index)
        path = Path(tempfile.gettempdir()) / f"tokenbus-fuzz-{report.seed}-{report.failed_at}.binpb"
        path.write_bytes(data)
        report.saved_as = str(path)
    return report


def _watch(child: SpawnProcess, receiver: Connection, at: ctypes.c_longlong, report: Report) -> None:
    """Wait for the child's report or its end; show where it is, and end it when it stays there."""
    last, since = at.value, time.monotonic()
    while not receiver.poll(0.5):
        if at.value != last:
            last, since = at.value, time.monotonic()
        elif time.monotonic() - since > HUNG_AFTER:
            child.kill()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{max(last - report.first, 0):,} of {report.messages:,} messages")
            sys.stderr.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


def _text(report: Report) -> str:
    lines = [f"seed {report.seed}: {report.messages:,} messages in {report.seconds:.1f} s"]
    lines += [f"{count:>12,} {rule}" for rule, count in {"accepted": report.accepted, **report.refused}.items()]
    lines += [f"{len(report.bombs)} of {len(BOMBS)} bombs defused"]
    return "\n".join(lines)


def main() -> int:
    """Run a campaign as the command line says; return 1 if it found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.contracts.fuzz", description="Fuzz the decoder.")
    parser.add_argument("--messages", type=int, default=200_000, help="how many messages to feed")
    parser.add_argument("--seed", type=int, default=0, help="what the messages are made from")
    parser.add_argument("--first", type=int, default=0, help="the index of the first message")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    report = run(Report(options.seed, options.first, options.messages))
    sys.stdout.write((json.dumps(asdict(report)) if options.json else _text(report)) + "\n")
    if report.failure:
        where = f"seed {report.seed}, index {report.failed_at}, message saved as {report.saved_as}"
        sys.stderr.write(f"{report.failure}\n{where}\n")
    return 1 if report.failure else 0


if __name__ == "__main__":
    sys.exit(main())
