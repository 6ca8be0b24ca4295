"""The compiled check: it accepts exactly the plain messages that are valid, and reads nothing beyond them."""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.contracts.broken_messages import damage
from tests.contracts.other_encodings import record, varint
from tests.contracts.test_vectors import VALID, VECTORS
from tests.contracts.valid_messages import seeded
from tokenbus_contracts import ContractError, Limits, LogprobBatch, decode, native, wire
from tokenbus_contracts.columns import MessageColumns
from tokenbus_contracts.generated import logprob_batch_pb2 as pb
from tokenbus_contracts.native.rules import rules_for
from tokenbus_contracts.schema import COLUMNS
from tokenbus_contracts.validate import check_batch

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = {path.stem: path.read_bytes() for path in sorted(VECTORS.rglob("*.binpb"))}
installed = pytest.mark.skipif(not native.available(), reason="not run: the compiled check is not installed")
SMALL = [data for data in MESSAGES.values() if len(data) < 10_000]


def _holds_in_python(data: bytes) -> bool:
    try:
        batch = wire.read(data)
        if batch is None:
            return False
        check_batch(batch, Limits.default())
    except ContractError:
        return False
    return True


def _read(data: bytes) -> LogprobBatch | None:
    """Return the batch that the compiled code reads in a message; None: it leaves the message to Python."""
    if (found := native.read(data, Limits.default())) is None:
        return None
    header, places = found
    return LogprobBatch.of_message(header, MessageColumns(data, places))


def test_it_is_in_use() -> None:
    """Where there is a C compiler the compiled check is installed, so that the tests below test something."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("not run: there is no C compiler, so there is no compiled check")
    assert native.available() or os.environ.get("TOKENBUS_PURE_PYTHON")


@installed
def test_it_agrees_on_every_vector() -> None:
    """A golden message is accepted if it is plain and valid, and otherwise left to the checks in Python."""
    # Field orders that Python still reads as plain, and what lies in the header, may be left to Python.
    left = {"fields_in_reverse", "padded_varints", "widest_values", "newer_minor", "step_twice", "header_twice"}
    for name, data in MESSAGES.items():
        assert native.accepts(data, Limits.default()) == (_holds_in_python(data) and name not in left), name


@installed
def test_column_without_elements_is_not_plain() -> None:
    data = MESSAGES["empty_step"]
    assert native.accepts(data, Limits.default())
    for column in COLUMNS:
        empty = varint(column.key) + b"\0"
        assert not native.accepts(data + empty, Limits.default())
        assert wire.read(data + empty) is None
        assert decode(data + empty) == decode(data)


@installed
@pytest.mark.parametrize("digit", [1, 2, 3, 0x7F])
def test_number_above_64_bits_is_not_accepted(digit: int) -> None:
    """A varint of ten bytes may have one bit in its last: what has more is left to Python, as parsers differ there."""
    batch = pb.LogprobBatch.FromString(MESSAGES["one_row"])
    number = batch.header.DESCRIPTOR.fields_by_name["step"].number
    batch.header.ClearField("step")
    header = batch.header.SerializeToString() + varint(number << 3) + b"\x85" + b"\x80" * 8 + bytes([digit])
    batch.ClearField("header")
    data = record(1, 2, header) + batch.SerializeToString()
    assert native.accepts(data, Limits.default()) == (digit == 1)


def _read_twice() -> Iterator[tuple[Random, LogprobBatch, LogprobBatch]]:
    """Yield each valid golden message as the compiled code reads it, and as Python does; and what draws choices."""
    for name in VALID:
        read, arrays = _read(MESSAGES[name]), wire.read(MESSAGES[name])
        if read is not None and arrays is not None:  # the vectors that are left to Python are named above
            yield Random(name), read, arrays  # noqa: S311 - it picks test data


@installed
def test_it_selects_rows_as_numpy_does() -> None:
    for rng, read, arrays in _read_twice():
        for _ in range(5):
            rows = rng.sample(range(read.row_count), rng.randint(0, read.row_count))
            some, other = read.select(rows), arrays.select(rows)
            assert wire.write(some, Limits.default()) == wire.write(other, Limits.default())
            again = some.select(range(len(rows)))
            assert wire.write(again, Limits.default()) == wire.write(other, Limits.default())


@installed
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(("one_row", rows) for rows in ([-1], [0, 0], [2**40], [10_000], list(range(3_000)))),
        *(("stops", rows) for rows in ([1, 1], [0, 0], [0, 1, 0], [3, 2, 3])),
    ],
)
def test_it_takes_no_row_twice(name: str, rows: list[int]) -> None:
    read, arrays = _read(MESSAGES[name]), wire.read(MESSAGES[name])
    assert read is not None
    assert arrays is not None
    with pytest.raises(ContractError) as by_c:
        read.select(rows)
    with pytest.raises(ContractError) as by_numpy:
        arrays.select(rows)
    assert str(by_c.value) == str(by_numpy.value)


@pytest.mark.process
@pytest.mark.nightly
def test_it_stays_within_the_message(tmp_path: Path) -> None:
    """Compiled with checks of each access it gives the same verdicts, and reads nothing beyond a message."""
    harness = tmp_path / "harness"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("not run: there is no C compiler")
    include = ROOT / "contracts" / "tokenbus_contracts" / "native"
    flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "tests" / "contracts" / "accept_harness.c"
    subprocess.run([compiler, *flags, "-I", str(include), "-o", str(harness), str(source)], check=True)
    rng = seeded(20261121)
    damaged = [damage(rng, rng.choice(SMALL), rng.choice(SMALL)) for _ in range(20_000)]
    messages = [*MESSAGES.values(), *damaged]
    feed = bytes(rules_for(Limits.default())) + b"".join(struct.pack("<I", len(data)) + data for data in messages)
    run = subprocess.run([harness], input=feed, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    verdicts = run.stdout.decode().strip()
    assert len(verdicts) == len(messages)
    if native.available():
        expected = "".join(str(int(native.accepts(data, Limits.default()))) for data in messages)
        assert verdicts == expected


@pytest.mark.process
def test_library_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    """Neither a damaged one, nor one of another source, nor any where TOKENBUS_PURE_PYTHON is set."""
    copy = tmp_path / "tokenbus_contracts"
    shutil.copytree(ROOT / "contracts" / "tokenbus_contracts", copy, ignore=shutil.ignore_patterns("__pycache__"))
    library, source = copy / "native" / "accept.so", copy / "native" / "accept.c"
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tokenbus_contracts import native, decode\n"
        f"print(native.available(), decode(open({str(VECTORS / 'valid' / 'one_row.binpb')!r}, 'rb').read()).token_ids)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENBUS_PURE_PYTHON"}

    def used() -> tuple[str, str]:
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return run.stdout, run.stderr

    whole = library.read_bytes() if library.exists() else None
    library.write_bytes(b"no library")
    out, err = used()
    assert out == "False [42]\n"
    assert "RuntimeWarning: messages are checked in Python, which is slower" in err
    if whole is None:
        return
    library.unlink()  # a mapped library is not written over
    library.write_bytes(whole)
    assert used() == ("True [42]\n", "")
    environment["TOKENBUS_PURE_PYTHON"] = "1"
    assert used() == ("False [42]\n", "")
    del environment["TOKENBUS_PURE_PYTHON"]
    source.write_text(source.read_text() + "\n")
    out, err = used()
    assert out == "False [42]\n"
    assert "accept.so was compiled from another version of accept.c" in err
