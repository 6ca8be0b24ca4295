"""tokenbus inspect: shows the tokens of a recording by probability."""

import argparse
import json
import math
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.cli.arguments import request_id, whole
from tokenbus.cli.errors import CommandError
from tokenbus.cli.export import lacking
from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Texts, Values, text_of_tokens, token_text
from tokenbus.printable import printable
from tokenbus.recordings.items import RecordingError, read_recording
from tokenbus.recordings.token_columns import TokenBuffer, TokenKind
from tokenbus_contracts import ContractError, ValueKind

_DESCRIPTION = """\
Show a recording's requests, each token coloured by its probability: green from a half on, red below a tenth. Where
entropies are known, they stand behind the tokens in brackets, and the summary has their mean. Where a token has both
logprobs, of the model and of what it was sampled from, the summary has an estimate of the KL divergence of the model
from its sampling, and the importance ratio. docs/recording.md compares two recordings with SQL.

The file is a recording, or Parquet with a row for each token, as `tokenbus export` writes it; that needs the extra
parquet. The status is 1 if a recording is broken.

examples:
  tokenbus inspect steps.tokenbus --tokenizer ngram            its requests, as text
  tokenbus inspect steps.tokenbus --request 17 --json | jq .summary
"""
_AT_ONCE = 1 << 20
_MOST_TOKENS = 1 << 26
_ROWS_AT_ONCE = 1 << 16
_UNKNOWN = 255
_MOST_LOG_RATIO = 80.0
"""Beyond it a ratio is no number that a mean of many could hold."""
_PARQUET = b"PAR1"

Array = npt.NDArray[Any]


class _Tokens(NamedTuple):
    """The output's tokens, in the recording's order; a float is NaN where it is not known."""

    request_id: Array
    position: Array
    token_id: Array
    value_kind: Array
    logprob: Array
    other_logprob: Array
    entropy: Array

    def of(self, request: int) -> "_Tokens":
        """Return those of a request."""
        return _Tokens(*(column[self.request_id == request] for column in self))

    def request_ids(self) -> list[int]:
        """Return the requests in the order in which they begin."""
        ids: list[int] = self.request_id[np.sort(np.unique(self.request_id, return_index=True)[1])].tolist()
        return ids

    def log_ratio(self) -> Array:
        """Return each token's logprob by the model less that in what it was sampled from."""
        sign = np.full(self.value_kind.size, np.nan)
        sign[self.value_kind == ValueKind.RAW_LOGPROBS] = 1
        sign[self.value_kind == ValueKind.PROCESSED_LOGPROBS] = -1
        ratio: Array = np.minimum((self.logprob - self.other_logprob) * sign, _MOST_LOG_RATIO)
        return ratio


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="FILE", help="a recording, or Parquet of one")
    parser.add_argument("--request", type=request_id, metavar="ID", help="show this request alone")
    parser.add_argument("--count", type=whole(0), default=10, metavar="N", help="show so many requests (10)")
    parser.add_argument(
        "--tokenizer", default="numbers", metavar="NAME", help="show texts: an engine's tokenizer, or a model's folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Show the requests; return 1 if the recording is broken."""
    text = text_of_tokens(options.tokenizer)
    try:
        tokens, fault = _loaded(Path(options.files[0]), options.request)
    except ImportError as error:
        raise lacking(error) from None
    except ValueError as error:
        raise CommandError(printable(str(error))) from None
    summary = {"requests": len(tokens.request_ids()), **_figures(tokens)}
    requests = [_request(request, tokens.of(request), text) for request in tokens.request_ids()[: options.count]]
    if options.json:
        document = {"file": options.files[0], "summary": summary, "requests": requests, "fault": fault}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(*map(_line, requests), _told(summary), sep="\n")
        if fault:
            print(f"{styled('BROKEN', 'red')} {printable(fault)}")
    return 1 if fault else 0


# What a file has.


def _loaded(path: Path, request: int | None) -> tuple[_Tokens, str | None]:
    tokens, fault = (_of_parquet(path, request), None) if _is_parquet(path) else _of_recording(path, request)
    if tokens.token_id.size > _MOST_TOKENS:
        raise ValueError(f"{path}: at most {_MOST_TOKENS} tokens, got more; name a request")
    return tokens, fault


def _is_parquet(path: Path) -> bool:
    if path.is_dir():
        return True
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path}: a file or a folder, got neither")
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _of_recording(path: Path, request: int | None) -> tuple[_Tokens, str | None]:
    buffer, found, fault, count = TokenBuffer(), list[_Tokens](), None, 0
    try:
        for item in read_recording(path):
            try:
                buffer.add(item)
            except ContractError as error:
                fault = f"{path}: item {item.sequence}: {error}"
            if buffer.tokens >= _AT_ONCE:
                found.append(_taken(buffer, request))
                count += found[-1].token_id.size
                if count > _MOST_TOKENS:
                    break
    except RecordingError as error:
        fault = str(error)
    found.append(_taken(buffer, request))
    return _Tokens(*map(np.concatenate, zip(*found, strict=True))), fault


def _taken(buffer: TokenBuffer, request: int | None) -> _Tokens:
    taken = buffer.take()
    is_wanted = taken.kind == TokenKind.TARGET
    if request is not None:
        is_wanted &= taken.request_id == request
    return _Tokens(*(getattr(taken, name)[is_wanted] for name in _Tokens._fields))


def _of_parquet(path: Path, request: int | None) -> _Tokens:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.dataset as ds  # noqa: PLC0415

    from tokenbus.recordings.parquet import SCHEMA  # noqa: PLC0415 - it needs the extra, too

    files = (
        sorted(str(each) for each in path.rglob("[!_.]*.parquet") if each.is_file()) if path.is_dir() else [str(path)]
    )
    # A name is held once, however long it is and however many rows have it.
    dataset = ds.dataset(files, format=ds.ParquetFileFormat(dictionary_columns={"kind", "value_kind"}))
    expected = dict.fromkeys(("kind", "value_kind"), pa.dictionary(pa.int32(), pa.string()))
    expected = {name: SCHEMA.field(name).type for name in _Tokens._fields} | expected
    if not expected.items() <= {field.name: field.type for field in dataset.schema}.items():
        raise ValueError(f"{path}: no rows for each token, as `tokenbus export` writes them")
    found, count = [_taken(TokenBuffer(), None)], 0
    for batch in dataset.to_batches(columns=list(expected), batch_size=_ROWS_AT_ONCE):
        is_wanted = _codes(batch["kind"], TokenKind, path) == TokenKind.TARGET
        if request is not None:
            is_wanted &= batch["request_id"].to_numpy() == request
        kinds = _codes(batch["value_kind"], ValueKind, path)
        columns = [
            kinds if name == "value_kind" else batch[name].to_numpy(zero_copy_only=False) for name in _Tokens._fields
        ]
        found.append(_Tokens(*(column[is_wanted] for column in columns)))
        count += found[-1].token_id.size
        if count > _MOST_TOKENS:
            break
    return _Tokens(*map(np.concatenate, zip(*found, strict=True)))


def _codes(column: Any, names: type[IntEnum], path: Path) -> Array:  # noqa: ANN401 - an Arrow column of names
    """Return the numbers of a column's names."""
    found, places = column.dictionary.to_pylist(), column.indices.to_numpy()
    codes: Array = np.array([names.__members__.get(name, _UNKNOWN) for name in found], np.uint8)[places]
    if (unknown := codes == _UNKNOWN).any():
        name = found[places[unknown.argmax()]]
        raise ValueError(f"{path}: one of {', '.join(names.__members__)}, got {str(name)[:80]!r}")
    return codes


# What is shown of it.


def _figures(tokens: _Tokens) -> Values:
    found = {"tokens": tokens.token_id.size, "mean_logprob": _mean(tokens.logprob)}
    if (entropy := _mean(tokens.entropy)) is not None:
        found["mean_entropy"] = entropy
    log_ratio = tokens.log_ratio()
    if (known := log_ratio[~np.isnan(log_ratio)]).size:
        ratio = np.exp(known)
        # Of tokens drawn from the sampled distribution: the estimate is never negative, and varies less than the mean
        # of -log_ratio.
        found["kl_estimate"] = float((ratio - 1 - known).mean())
        found |= {"importance_ratio_mean": float(ratio.mean()), "importance_ratio_max": float(ratio.max())}
    return found


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else None


def _request(request: int, tokens: _Tokens, text: Texts) -> Values:
    columns = tokens.position, tokens.token_id, tokens.logprob, tokens.entropy, np.exp(tokens.log_ratio())
    values = []
    for position, token, logprob, entropy, ratio in zip(*(each.tolist() for each in columns), strict=True):
        known = {} if math.isnan(entropy) else {"entropy": entropy}
        known |= {} if math.isnan(ratio) else {"importance_ratio": ratio}
        shown = None if math.isnan(logprob) else logprob
        values.append({"position": position, "token_id": token, "text": text(token), "logprob": shown, **known})
    return {"request_id": f"{request:016x}", **_figures(tokens), "values": values}


def _line(request: Values) -> str:
    figures = _told({name: value for name, value in request.items() if name not in {"request_id", "values"}})
    tokens = " ".join(map(_token, request["values"]))
    return f"{styled('request ' + request['request_id'], 'bold')}: {figures}\n  {tokens}"


def _told(figures: Values) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_shortly(value)}" for name, value in figures.items())


def _shortly(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _token(value: Values) -> str:
    entropy = f"[{value['entropy']:.2f}]" if "entropy" in value else ""
    return token_text(printable(value["text"]), value["logprob"]) + entropy
