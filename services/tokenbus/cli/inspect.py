"""tokenbus inspect."""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.cli.arguments import request_id, whole
from tokenbus.cli.errors import CommandError
from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Texts, Values, text_of, token_text, tokenizer_of
from tokenbus.printable import printable
from tokenbus.recordings.items import RecordingError, read_recording
from tokenbus.recordings.token_columns import TokenBuffer, TokenKind
from tokenbus_contracts import ContractError, ValueKind

_DESCRIPTION = """\
Show the requests of a recording, each token coloured by its probability: green from 1/2 on, red below 1/10. If the
recording has entropies, they follow the tokens in brackets, and the summary has their mean. If tokens have two
logprobs, one of the model and one of the sampled distribution, the summary has the importance ratio and an estimate of
the KL divergence between the two. The status is 1 if the recording is broken.

examples:
  tokenbus inspect steps.tokenbus --tokenizer ngram            the requests as text
  tokenbus inspect steps.tokenbus --request 17 --json | jq .summary
"""
_BUFFERED_TOKENS = 1 << 20
_MOST_TOKENS = 1 << 26
_MOST_LOG_RATIO = 80.0
"""Larger log ratios are replaced by this maximum, because their mean would overflow."""

Array = npt.NDArray[Any]


class _Tokens(NamedTuple):
    """Columns with one value for each output token, in the order of the recording. An unknown float is NaN."""

    request_id: Array
    position: Array
    token_id: Array
    value_kind: Array
    logprob: Array
    other_logprob: Array
    entropy: Array

    def of(self, request: int) -> "_Tokens":
        return _Tokens(*(column[self.request_id == request] for column in self))

    def request_ids(self) -> list[int]:
        """Return the ids of the requests in the order of their first tokens."""
        ids: list[int] = self.request_id[np.sort(np.unique(self.request_id, return_index=True)[1])].tolist()
        return ids

    def log_ratio(self) -> Array:
        """Return each token's logprob in the model's distribution minus its logprob in the sampled distribution."""
        sign = np.full(self.value_kind.size, np.nan)
        sign[self.value_kind == ValueKind.RAW_LOGPROBS] = 1
        sign[self.value_kind == ValueKind.PROCESSED_LOGPROBS] = -1
        ratio: Array = np.minimum((self.logprob - self.other_logprob) * sign, _MOST_LOG_RATIO)
        return ratio


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs=1, metavar="FILE", help="a recording")
    parser.add_argument("--request", type=request_id, metavar="ID", help="show only this request")
    parser.add_argument("--count", type=whole(0), default=10, metavar="N", help="show at most N requests (10)")
    parser.add_argument(
        "--tokenizer", default="numbers", metavar="NAME", help="show text: an engine's tokenizer, or a model's folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    text = text_of(tokenizer_of(options.tokenizer))
    tokens, fault = _loaded(Path(options.files[0]), options.request)
    summary = {"requests": len(tokens.request_ids()), **_figures(tokens)}
    requests = [_request(request, tokens.of(request), text) for request in tokens.request_ids()[: options.count]]
    if options.json:
        document = {"file": options.files[0], "summary": summary, "requests": requests, "fault": fault}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(*map(_request_lines, requests), _figures_text(summary), sep="\n")
        if fault:
            print(f"{styled('BROKEN', 'red')} {printable(fault)}")
    return 1 if fault else 0


def _loaded(path: Path, request: int | None) -> tuple[_Tokens, str | None]:
    """Return the tokens of one request or of all requests, and the fault of the recording, if any."""
    if path.exists() and not path.is_file():  # opening a pipe could block
        raise CommandError(f"{path}: not a file")
    buffer, found, fault, count = TokenBuffer(), list[_Tokens](), None, 0
    try:
        for item in read_recording(path):
            try:
                buffer.add(item)
            except ContractError as error:
                fault = f"{path}: item {item.sequence}: {error}"
            if buffer.tokens >= _BUFFERED_TOKENS:
                found.append(_taken(buffer, request))
                count += found[-1].token_id.size
                if count > _MOST_TOKENS:
                    raise CommandError(f"{path}: more than {_MOST_TOKENS} tokens; use --request")
    except RecordingError as error:
        fault = str(error)
    found.append(_taken(buffer, request))
    return _Tokens(*map(np.concatenate, zip(*found, strict=True))), fault


def _taken(buffer: TokenBuffer, request: int | None) -> _Tokens:
    taken = buffer.take()
    is_wanted = taken["kind"] == TokenKind.TARGET
    if request is not None:
        is_wanted &= taken["request_id"] == request
    return _Tokens(*(taken[name][is_wanted] for name in _Tokens._fields))


def _figures(tokens: _Tokens) -> Values:
    found = {"tokens": tokens.token_id.size, "mean_logprob": _mean(tokens.logprob)}
    if (entropy := _mean(tokens.entropy)) is not None:
        found["mean_entropy"] = entropy
    log_ratio = tokens.log_ratio()
    if (known := log_ratio[~np.isnan(log_ratio)]).size:
        ratio = np.exp(known)
        # This estimator is never negative, and has less variance than the mean of -log_ratio.
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


def _request_lines(request: Values) -> str:
    figures = _figures_text({name: value for name, value in request.items() if name not in {"request_id", "values"}})
    tokens = " ".join(map(_token, request["values"]))
    return f"{styled('request ' + request['request_id'], 'bold')}: {figures}\n  {tokens}"


def _figures_text(figures: Values) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in figures.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _token(value: Values) -> str:
    entropy = f"[{value['entropy']:.2f}]" if "entropy" in value else ""
    return token_text(printable(value["text"]), value["logprob"]) + entropy
