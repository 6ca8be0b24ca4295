"""tokenbus inspect: shows the tokens of a recording by probability, or how two recordings differ."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_services.cli.arguments import request_id, whole
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.cli.export import lacking
from tokenbus_services.cli.inspect_page import MOST_REQUESTS, write_page
from tokenbus_services.cli.tap import token_text
from tokenbus_services.comparison import MOST_LOG_RATIO, Comparison, Loaded, Tokens, load, mean_of_known, ratio_figures
from tokenbus_services.plugins import PluginError, Tokenizer, load_tokenizer
from tokenbus_services.printable import printable
from tokenbus_services.terminal import styled
from tokenbus_services.token_columns import TokenKind

_DESCRIPTION = """\
Show a recording's requests, each token coloured by its probability: green from a half on, red below a tenth. With a
second file show how the two differ, as rollout and trainer do: tokens are matched by request and position, and coloured
by how far their logprobs are apart, green up to 0.01, red above 0.1. Requests that differ most come first. Where a
request's tokens part, those behind are not compared. The summary has how many tokens were compared, the mean and
largest difference, an estimate of the KL divergence of the first from the second, and the importance ratio,
exp(second - first). Of one file that has both logprobs of its tokens, these are of what it was sampled from and of the
model. Where entropies are known, they stand behind the tokens in brackets, and the summary has their mean, or the mean
of second - first. --drafts compares a recording's output with what its draft model proposed in the same steps.

--html writes one page that loads nothing: the tokens in colour, by difference, probability or entropy, and the
alternatives of the one that is pointed at; of at most 100 requests and 20,000 tokens, which it says.

A file is a recording, or Parquet as `tokenbus export` writes it; one that another program writes needs the columns
request_id, position, token_id and logprob. Parquet needs the extra parquet.

examples:
  tokenbus inspect steps.tokenbus --tokenizer ngram            its requests, as text
  tokenbus inspect rollout.tokenbus trainer.parquet            how far the trainer's logprobs are from the rollout's
  tokenbus inspect a.tokenbus b.tokenbus --tolerance 0.01      for CI: status 1 if a token differs by more
  tokenbus inspect old.tokenbus new.tokenbus --by-order        two runs of the same prompts, whose ids differ
  tokenbus inspect steps.tokenbus --drafts --json | jq .summary
  tokenbus inspect rollout.tokenbus trainer.parquet --html compared.html

The status is 1 if a recording is broken, if nothing could be compared, or, with --tolerance, if a token is another one,
is in one file alone, or differs by more.
"""
_CLOSE, _FAR = 0.01, 0.1

Texts = Callable[[int], str]
Values = dict[str, Any]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recording, or two of them")
    parser.add_argument("--drafts", action="store_true", help="compare the output with the drafts of the same file")
    parser.add_argument("--by-order", action="store_true", help="match requests by the order in which they begin")
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help="the largest difference of logprobs")
    parser.add_argument("--request", type=request_id, metavar="ID", help="show and compare this request alone")
    parser.add_argument("--count", type=whole(0), default=10, metavar="N", help="show so many requests (10)")
    parser.add_argument("--tokenizer", metavar="NAME", help="show texts: an engine's tokenizer, or a model's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", metavar="FILE", help="write a page of the requests for a browser")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"a number of at least 0, got {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """Show one file, or compare two; return the status."""
    is_comparison = options.drafts or len(options.files) > 1
    _check(options, is_comparison=is_comparison)
    text = _texts(options.tokenizer)
    count = options.count if options.html is None else min(options.count, MOST_REQUESTS)
    files = _loaded(options)
    if is_comparison:
        comparison = _comparison(options, *(each.tokens for each in files))
        summary, requests, tokens = comparison.summary(), _compared(comparison, count, text), comparison.ours
    else:
        tokens = files[0].tokens.of_kind(TokenKind.TARGET)
        summary, requests = _summary(tokens), _shown(tokens, count, text)
    faults = [each.fault for each in files if each.fault]
    document = {"files": options.files, "summary": summary, "requests": requests, "faults": faults}
    lines = map(_line, requests)
    if options.html is not None:
        written = write_page(Path(options.html), document, tokens.token_id.size, Path(options.files[0]), text)
        lines = map(printable, [f"{options.html}: {written}"])
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        total = ", ".join(f"{name.replace('_', ' ')} {_shortly(value)}" for name, value in summary.items())
        print(*lines, total, sep="\n")
        for fault in faults:
            print(f"{styled('BROKEN', 'red')} {printable(fault)}")
    return 1 if faults or (is_comparison and not _holds(summary, options.tolerance)) else 0


def _check(options: argparse.Namespace, *, is_comparison: bool) -> None:
    if len(options.files) > (1 if options.drafts else 2):
        raise CommandError("one FILE with --drafts, otherwise one or two", WRONG_USE)
    if options.tolerance is not None and not is_comparison:
        raise CommandError("--tolerance: with something to compare", WRONG_USE)
    if options.html is not None and Path(options.html).exists():
        raise CommandError(f"{options.html}: exists already, and is not written over", WRONG_USE)


def _loaded(options: argparse.Namespace) -> list[Loaded]:
    try:
        return [load(Path(name), options.request) for name in options.files]
    except ImportError as error:
        raise lacking(error) from None
    except ValueError as error:
        raise CommandError(printable(str(error))) from None


def _texts(name: str | None) -> Texts:
    """Return what makes a token's text, or its id where no tokenizer is named."""
    if name is None:
        return str
    try:
        tokenizer = _tokenizer(name)
    except (PluginError, ValueError) as error:
        raise CommandError(printable(str(error)), WRONG_USE) from None
    size = tokenizer.vocabulary_size
    return lambda token: tokenizer.token_bytes(token).decode(errors="replace") if token < size else str(token)


def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a name, or of a model's folder, with a slash; a ValueError says why there is none."""
    if "/" not in name:
        return load_tokenizer(name)
    try:
        from tokenbus_services.model_files import ModelTokenizer  # noqa: PLC0415 - the extra models may be missing
    except ImportError as error:
        raise ValueError(f"a model's own tokenizer needs the extra models: {error}") from None
    return ModelTokenizer(Path(name))


def _comparison(options: argparse.Namespace, ours: Tokens, theirs: Tokens | None = None) -> Comparison:
    target = ours.of_kind(TokenKind.TARGET)
    if theirs is None:
        return Comparison(target, ours.of_kind(TokenKind.DRAFT), same_step=True)
    theirs = theirs.of_kind(TokenKind.TARGET)
    return Comparison(target, theirs.named_as(target) if options.by_order else theirs)


def _holds(summary: Values, tolerance: float | None) -> bool:
    if not summary["tokens_compared"]:
        return False
    others = ("tokens_that_differ", "tokens_only_in_first", "tokens_only_in_second")
    return tolerance is None or (summary["max_difference"] <= tolerance and not any(summary[each] for each in others))


def _summary(tokens: Tokens) -> Values:
    scored = tokens.logprob[~np.isnan(tokens.logprob)]
    return {
        "requests": tokens.request_ids().size,
        "tokens": tokens.token_id.size,
        "mean_logprob": float(scored.mean(dtype=np.float64)) if scored.size else None,
        **mean_of_known("mean_entropy", tokens.entropy),
        **ratio_figures(tokens.log_ratio),
    }


def _shown(tokens: Tokens, count: int, text: Texts) -> list[Values]:
    found = []
    for request in tokens.request_ids()[:count]:
        mine = tokens.chosen(tokens.request_id == request)
        known = {"entropy": mine.entropy, "importance_ratio": np.exp(np.minimum(mine.log_ratio, MOST_LOG_RATIO))}
        values = zip(mine.position.tolist(), mine.token_id.tolist(), mine.logprob.tolist(), _known(known), strict=True)
        found.append(
            {
                "request_id": str(request),
                **{name: value for name, value in _summary(mine).items() if name != "requests"},
                "values": [
                    {"position": position, "token_id": token, "text": text(token), "logprob": _number(logprob)} | more
                    for position, token, logprob, more in values
                ],
            }
        )
    return found


def _compared(comparison: Comparison, count: int, text: Texts) -> list[Values]:
    found = []
    for request in comparison.worst(count):
        mine = np.flatnonzero(comparison.ours.request_id == request.request_id)
        ours, theirs = comparison.ours.chosen(mine), comparison.theirs.chosen(mine)
        columns = [ours.position, ours.token_id, theirs.token_id, ours.logprob, theirs.logprob]
        known = {"entropy": ours.entropy, "other_entropy": theirs.entropy}
        lists = [each.tolist() for each in (*columns, comparison.difference[mine])]
        values = zip(*lists, _known(known), strict=True)
        found.append(
            request._asdict()
            | {"request_id": str(request.request_id)}
            | {
                "values": [
                    {
                        "position": position,
                        "token_id": token,
                        "text": text(token),
                        "other_token_id": other,
                        "other_text": text(other),
                        "logprob": _number(logprob),
                        "other_logprob": _number(other_logprob),
                        "difference": _number(difference),
                        **more,
                    }
                    for position, token, other, logprob, other_logprob, difference, more in values
                ]
            }
        )
    return found


def _known(columns: Mapping[str, npt.NDArray[np.float32]]) -> list[dict[str, float]]:
    """Return for each token those of its values that are known."""
    lists = {name: values.tolist() for name, values in columns.items()}
    return [
        {name: value for name, value in zip(lists, values, strict=True) if not math.isnan(value)}
        for values in zip(*lists.values(), strict=True)
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _shortly(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _line(request: Values) -> str:
    figures = [
        f"{name.replace('_', ' ')} {_shortly(value)}"
        for name, value in request.items()
        if name not in {"request_id", "values"} and value is not None
    ]
    tokens = " ".join(map(_token, request["values"]))
    return f"{styled('request ' + request['request_id'], 'bold')}: {', '.join(figures)}\n  {tokens}"


def _token(value: Values) -> str:
    text = printable(value["text"])
    if "other_token_id" not in value:
        entropy = f"[{value['entropy']:.2f}]" if "entropy" in value else ""
        return token_text(text, value["logprob"]) + entropy
    if value["token_id"] != value["other_token_id"]:
        return styled(f"{text}|{printable(value['other_text'])}", "red")
    if value["difference"] is None:
        return f"{text}(-)"
    shown, far = f"{text}({value['difference']:+.4f})", abs(value["difference"])
    return styled(shown, "red") if far > _FAR else shown if far > _CLOSE else styled(shown, "green")
