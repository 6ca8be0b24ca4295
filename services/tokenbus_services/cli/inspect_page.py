"""The page of `tokenbus inspect --html`: one file with the tokens, in the inspector's look, that loads nothing."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tokenbus_contracts import ContractError
from tokenbus_services.comparison import is_parquet
from tokenbus_services.items import RecordingError, read_recording
from tokenbus_services.token_columns import TokenBuffer, TokenKind

MOST_REQUESTS = 100
_MOST_TOKENS = 20_000
_AT_ONCE = 1 << 16
_OURS, _GATEWAYS = files("tokenbus_services.cli") / "page", files("tokenbus_services.gateway") / "page"
_MODULES = {"recorded.js": _OURS} | dict.fromkeys(("dom.js", "format.js", "panel.js", "tokens.js"), _GATEWAYS)
_COLUMNS = ("request_id", "position", "rank", "step", "alternative_token_ids", "alternative_logprobs")

Values = dict[str, Any]
Token = tuple[int, int, int | None, int, list[int], list[float]]


def write_page(path: Path, document: Values, tokens: int, source: Path, text: Callable[[int], str]) -> str:
    """Write the page of what `--json` prints, of as many requests and tokens as a page may have; return what it has.

    Args:
        path: the file to write; FileExistsError if it exists.
        document: what `--json` prints.
        tokens: how many tokens there are to show.
        source: the file that has the alternatives of the tokens.
        text: makes a token's text; `str`: its id.
    """
    requests = list(_bounded(document["requests"]))
    shown = sum(len(each["values"]) for each in requests)
    _add_alternatives(requests, source, text)
    counts = {
        "requests": len(requests),
        "of_requests": document["summary"]["requests"],
        "tokens": shown,
        "of_tokens": tokens,
        "most_requests": MOST_REQUESTS,
        "most_tokens": _MOST_TOKENS,
    }
    page = _page(document | {"requests": requests, "shown": counts, "has_texts": text is not str})
    with path.open("x", encoding="utf-8") as file:
        file.write(page)
    return f"{len(requests)} requests of {counts['of_requests']}, {shown} tokens of {tokens}"


def _bounded(requests: Iterable[Values]) -> Iterator[Values]:
    left = _MOST_TOKENS
    for request in requests:
        if left:
            values = request["values"][:left]
            left -= len(values)
            yield request | {"values": values}


def _page(recorded: Values) -> str:
    modules = {name: (folder / name).read_text("utf-8") for name, folder in _MODULES.items()}
    # A module in a URL of its own has no neighbours: the import map has all of them, by their bare names.
    imports = {name: re.sub(r'from "\./', 'from "', module) for name, module in modules.items()}
    urls = {name: f"data:text/javascript;base64,{b64encode(each.encode()).decode()}" for name, each in imports.items()}
    page = (_OURS / "recorded.html").read_text("utf-8")
    for name, value in (
        ("style", (_GATEWAYS / "style.css").read_text("utf-8")),
        ("imports", json.dumps({"imports": urls})),
        # No text ends the element that holds it.
        ("recorded", json.dumps(recorded, allow_nan=False).replace("<", "\\u003c")),
    ):
        page = page.replace(f"{{{{{name}}}}}", value)
    return page


def _add_alternatives(requests: Iterable[Values], source: Path, text: Callable[[int], str]) -> None:
    wanted = {
        (int(request["request_id"]), value["position"]): value for request in requests for value in request["values"]
    }
    ids = np.array(sorted({key for key, _ in wanted}), np.uint64)
    for request_id, position, rank, step, alternatives, logprobs in _tokens(source, ids):
        if (value := wanted.get((request_id, position))) is None:
            continue
        listed = zip(alternatives, logprobs, strict=True)
        value |= {"step": step, "alternatives": [[token, text(token), logprob] for token, logprob in listed]}
        value |= {"rank": rank} if rank else {}


def _tokens(source: Path, request_ids: "np.ndarray[Any, np.dtype[np.uint64]]") -> Iterator[Token]:
    """Yield the output's tokens of some requests with their alternatives, of a recording up to its fault."""
    if is_parquet(source):
        yield from _of_parquet(source, request_ids)
        return
    buffer = TokenBuffer()

    def taken() -> Iterator[Token]:
        tokens = buffer.take()
        for place in np.flatnonzero((tokens.kind == TokenKind.TARGET) & np.isin(tokens.request_id, request_ids)):
            begin, end = tokens.alternative_token_ids.offsets[place : place + 2]
            numbers = (tokens.request_id[place], tokens.position[place], tokens.rank[place], tokens.step[place])
            ids, logprobs = tokens.alternative_token_ids.values, tokens.alternative_logprobs.values
            yield *map(int, numbers), ids[begin:end].tolist(), logprobs[begin:end].tolist()

    try:
        for item in read_recording(source):
            try:
                buffer.add(item)
            except ContractError:  # loading the file has reported it
                continue
            if buffer.tokens >= _AT_ONCE:
                yield from taken()
    except RecordingError:
        pass
    yield from taken()


def _of_parquet(source: Path, request_ids: "np.ndarray[Any, np.dtype[np.uint64]]") -> Iterator[Token]:
    import pyarrow.dataset as ds  # noqa: PLC0415 - an extra

    table = ds.dataset(source, format="parquet")
    names = table.schema.names
    if not set(_COLUMNS) <= set(names):
        return
    is_wanted = ds.field("request_id").isin(request_ids.tolist())
    if "kind" in names:
        is_wanted &= ds.field("kind") == TokenKind.TARGET.name
    for batch in table.to_batches(columns=[*_COLUMNS], filter=is_wanted):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
