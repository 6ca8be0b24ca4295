"""A record as tables to read."""

from collections.abc import Iterator

from benchmarks.outputs import Record
from benchmarks.paint import Paint
from benchmarks.processes import MODEL
from benchmarks.vllm.systems import TOKENBUS, VLLM

_SYSTEMS = (VLLM, TOKENBUS)
_ROLES = {VLLM: ("API server", "core"), TOKENBUS: ("gateway", "processor", "worker")}


def render(record: Record, paint: Paint) -> str:
    """Return the whole report."""
    parts = [_head(record, paint), _goals(record, paint), _rates(record, paint), _times(record, paint)]
    return "\n\n".join("\n".join(part) for part in [*parts, _processors(record, paint)])


def _head(record: Record, paint: Paint) -> Iterator[str]:
    place = record["card"] or "a CPU"
    yield paint.title(f"vLLM {record['vllm']} on {place}: its own API server, and Tokenbus")
    same, asked = record["answers"], record["answers"]["asked"]
    yield (
        f"{record['rounds']} rounds of each, taken in turn, medians; {record['max_tokens']} tokens a request; "
        f"{record['gateways']} gateway(s), {record['api_servers']} API server(s)."
    )
    yield (
        f"At temperature 0, {asked} answers of {same['tokens']} tokens: the same tokens in {same['same_tokens']}, "
        f"texts in {same['same_texts']}, logprobs in {same['same_logprobs']} (apart by at most {same['worst']:.1g})."
    )
    idle = ", ".join(f"{name} {cores:.2f}" for name, cores in record["idle_cores"].items())
    yield f"Cores that are busy while nothing is asked: {idle}."


def _goals(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Goals")
    for goal in record["goals"]:
        text = f"{goal['measured']:>8.2f} {'met' if goal['met'] else 'missed'}"
        yield f"{goal['goal']:<74}{goal['wanted']:<15}" + (paint.good(text) if goal["met"] else paint.bad(text))


def _rates(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Tokens a second")
    yield f"{'':<28}{'vLLM':>10}{'of none':>9}{'Tokenbus':>11}{'of none':>9}{'times vLLM':>12}"
    none = {(c["endpoint"], c["streams"]): c["medians"] for c in record["cells"] if c["top_k"] == "none"}
    for cell in record["cells"]:
        base = none.get((cell["endpoint"], cell["streams"]))
        rates = {name: cell["medians"][name]["tokens_per_second"] for name in _SYSTEMS}
        cells = []
        for name, width in ((VLLM, 10), (TOKENBUS, 11)):
            share = f"{rates[name] / base[name]['tokens_per_second']:.2f}" if base else ""
            cells.append(f"{rates[name]:>{width},.0f}{share:>9}")
        yield f"{_named(cell):<28}" + "".join(cells) + f"{rates[TOKENBUS] / rates[VLLM]:>12.2f}"


def _times(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Time to the first token and between tokens (milliseconds), and what comes over the socket")
    yield f"{'':<28}{'':<10}{'first':>8}{'p99':>8}{'between':>10}{'p99':>8}{'tokens/event':>14}{'bytes/token':>13}"
    for cell in record["cells"]:
        for name in _SYSTEMS:
            found = cell["medians"][name]
            yield (
                f"{_named(cell) if name == VLLM else '':<28}{name:<10}{found['first_ms']:>8,.0f}"
                f"{found['first_p99_ms']:>8,.0f}{found['between_ms']:>10.2f}{found['between_p99_ms']:>8.2f}"
                f"{found['tokens_per_event']:>14.2f}{found['bytes_per_token']:>13,.0f}"
            )


def _processors(record: Record, paint: Paint) -> Iterator[str]:
    yield paint.title("Processor time in microseconds a token, by process")
    separate = any(found["outside_us"] is not None for cell in record["cells"] for found in cell["medians"].values())
    for name in _SYSTEMS:
        columns = [*_ROLES[name], *(("outside", MODEL) if separate else ())]
        yield f"{name:<28}" + "".join(f"{each:>12}" for each in [*columns, "the client"])
        for cell in record["cells"]:
            found = cell["medians"][name]
            values = {**found["cpu_us"], "outside": found["outside_us"], "the client": found["client_us"]}
            shown = (values.get(each) for each in [*columns, "the client"])
            yield f"{_named(cell):<28}" + "".join(f"{'' if each is None else f'{each:,.1f}':>12}" for each in shown)
    if separate:
        yield "outside: all of the system's processes but the one that runs the model."
    else:
        yield "The core and the worker run the model themselves, so what is outside of it cannot be told apart."


def _named(cell: Record) -> str:
    return f"{cell['endpoint']:<12}{cell['streams']:>5}  k = {cell['top_k']}"
