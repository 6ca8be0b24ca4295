"""Measure the way from logits to columns: `python -m benchmarks.gpu_ops`.

Microseconds on the card: the median of seven spans of up to 40 calls each between two events, over inputs that take
four times the L2 where they can. The floor is reading the logits once at 4.3 TB/s. "kernel" is the launch alone,
"call" all that a call queues, with the copy to pinned memory.
"""

from collections.abc import Sequence

from benchmarks.errors import NotRunError
from benchmarks.gpu_ops import on_card, on_cpu
from benchmarks.gpu_ops.cases import QUICK_ROWS, ROWS
from benchmarks.report import Report


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("gpu_ops", __doc__)
    options = report.parse(arguments)
    rows = on_cpu.ROWS[:1] if options.quick else on_cpu.ROWS
    report.table(
        on_cpu.measure(rows), "the CPU twin: float32, microseconds a row; one core but for torch's own threads"
    )
    try:
        for title, table in on_card.measure(QUICK_ROWS if options.quick else ROWS):
            report.table(table, title)
    except NotRunError as error:
        report.say(f"On a card: {error}.")
    report.write()


if __name__ == "__main__":
    main()
