"""tokenbus ask."""

import argparse
import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Any
from unicodedata import category

from tokenbus.cli.arguments import Parser, whole
from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Texts, Values, coloured, text_of, tokenizer_of
from tokenbus.client import Client, Generation, Token
from tokenbus.delivery import RequestFailedError
from tokenbus.plugins import Tokenizer
from tokenbus.printable import printable
from tokenbus.tokenizer_probes import digest_of, encoder_of, probed
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import Generate

_DESCRIPTION = """\
Send one prompt over the bus and print the answer as it streams, each token coloured by its probability: green from 1/2
on, red below 1/10. The last line shows the number of tokens, their mean logprob and the worker.

The tokenizer is the gateway's: ngram's by default; for a model, name its folder.

examples:
  tokenbus ask "In the evening the old man said"
  tokenbus ask --max-tokens 200 --seed 1 --json "Once upon a time" | jq .logprob
  tokenbus ask --tokenizer /models/qwen "Write a haiku about queues."

main settings: bus.clients_address (a comma-separated list for several processors), bus.key_file, bus.server_key.
"""
_HARMLESS = "\t\u200c\u200d"


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    parser.positional = "prompt"
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="the text to continue; words are joined by spaces")
    parser.add_argument("--max-tokens", type=whole(), default=64, metavar="N", help="the maximum number of tokens (64)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 takes the most probable token (default: 1)")
    parser.add_argument("--seed", type=whole(0), metavar="N", help="make the answer reproducible")
    parser.add_argument(
        "--alternatives", type=whole(0), default=0, metavar="K", help="with --json: alternatives per token (0)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each token, and one at the end")
    declare_settings(parser, {"--tokenizer": "gateway.tokenizer", "--clients-address": "bus.clients_address"})
    parser.set_defaults(**{"log.level": "warning"})  # keep the answer free of log lines


def run(options: argparse.Namespace) -> int:
    settings = load_settings(options)
    tokenizer = tokenizer_of(settings.gateway.tokenizer)
    sampling = {name: value for name in ("temperature", "seed") if (value := getattr(options, name)) is not None}
    wanted: dict[str, Any] = {"text": {"text": " ".join(options.prompt)}, "top_logprobs": options.alternatives}
    if tokenizer is not None:  # workers with another tokenizer must refuse the request
        wanted["tokenizer_digest"] = digest_of(tokenizer, probed(encoder_of(tokenizer)))
    generate = Generate(sampling={"max_tokens": options.max_tokens, **sampling}, **wanted)

    async def ask() -> None:
        async with Client(settings) as client, client.generate(generate) as generation:
            try:
                await show_answer(generation, tokenizer, _print_json if options.json else _print_text)
            except BaseException:
                if generation.position and not options.json:
                    print()
                raise

    try:
        asyncio.run(ask())
    except ContractError as error:
        raise CommandError(str(error), WRONG_USE) from None
    except RequestFailedError as error:
        raise CommandError(str(error)) from None
    return 0


async def show_answer(generation: Generation, tokenizer: Tokenizer | None, show: Callable[[Values], None]) -> None:
    """Show each token when it arrives, then the summary.

    A character that several tokens form is shown with the last of these tokens.
    """
    total, decoder, text = 0.0, getincrementaldecoder("utf-8")(errors="replace"), text_of(tokenizer)
    async for token in generation:
        total += token.logprob or 0.0
        known = tokenizer is not None and token.id < tokenizer.vocabulary_size
        own = decoder.decode(tokenizer.token_bytes(token.id)) if tokenizer is not None and known else text(token.id)
        show(_token_values(token, own, text))
    status = generation.status
    show(
        {
            "request_id": f"{generation.request_id:016x}",
            "status": None if status is None else status.name,
            "tokens": generation.position,
            "mean_logprob": total / generation.position if generation.position else None,
            "workers": [turn.worker_id for turn in generation.turns],
        }
    )


def _token_values(token: Token, own: str, text: Texts) -> Values:
    return {
        "position": token.position,
        "token_id": token.id,
        "text": own,
        "logprob": token.logprob,
        "rank": token.rank,
        "alternatives": [
            {"token_id": other, "text": text(other), "logprob": logprob} for other, logprob in token.alternatives
        ],
    }


def _shown(line: str) -> str:
    """Escape unprintable characters in a line, except for tabs, all kinds of spaces and joined emoji."""
    return "".join(each if each in _HARMLESS or category(each) == "Zs" else printable(each) for each in line)


def _print_json(values: Values) -> None:
    print(json.dumps(values, allow_nan=False), flush=True)


def _print_text(values: Values) -> None:
    if "status" not in values:
        lines = values["text"].split("\n")
        print("\n".join(coloured(_shown(line), values["logprob"]) for line in lines), end="", flush=True)
        return
    mean = "" if values["mean_logprob"] is None else f", mean logprob {values['mean_logprob']:.3f}"
    workers = " then ".join(map(printable, values["workers"]))
    print(f"\n{styled(values['status'], 'bold')}: {values['tokens']} tokens{mean}, from {workers}")
