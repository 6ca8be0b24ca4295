"""tokenbus ask."""

import argparse
import asyncio
import json
from collections.abc import Callable

from tokenbus.cli.arguments import Parser, whole
from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.cli.values import Texts, Values, coloured, text_of_tokens
from tokenbus.client import Client, Generation, RequestParameters, Token
from tokenbus.delivery import RequestFailedError
from tokenbus.printable import printable
from tokenbus_contracts import ContractError

_DESCRIPTION = """\
Send one prompt over the bus and print the answer as it streams, each token coloured by its probability: green from 1/2
on, red below 1/10. The last line shows the number of tokens, their mean logprob and the worker.

The tokenizer is that of the gateway: ngram's by default; for a model use its folder.

examples:
  tokenbus ask "In the evening the old man said"
  tokenbus ask --max-tokens 200 --seed 1 --json "Once upon a time" | jq .logprob
  tokenbus ask --tokenizer /models/qwen "Write a haiku about queues."

main settings: bus.clients_address (a comma-separated list for several processors), bus.key_file, bus.server_key.
"""


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
    parser.set_defaults(**{"log.level": "warning"})  # keep log lines out of the answer


def run(options: argparse.Namespace) -> int:
    settings = load_settings(options)
    text = text_of_tokens(settings.gateway.tokenizer)
    parameters: RequestParameters = {"max_tokens": options.max_tokens, "top_logprobs": options.alternatives}
    for name in ("temperature", "seed"):
        if getattr(options, name) is not None:
            parameters[name] = getattr(options, name)
    show = _print_json if options.json else _print_text

    async def ask() -> None:
        async with Client(settings) as client, client.generate(" ".join(options.prompt), **parameters) as generation:
            await show_answer(generation, text, show)

    try:
        asyncio.run(ask())
    except ContractError as error:
        raise CommandError(str(error), WRONG_USE) from None
    except RequestFailedError as error:
        raise CommandError(str(error)) from None
    return 0


async def show_answer(generation: Generation, text: Texts, show: Callable[[Values], None]) -> None:
    """Show each token as it arrives, then the summary."""
    total = 0.0
    async for token in generation:
        total += token.logprob or 0.0
        show(_token_values(token, text))
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


def _token_values(token: Token, text: Texts) -> Values:
    return {
        "position": token.position,
        "token_id": token.id,
        "text": text(token.id),
        "logprob": token.logprob,
        "rank": token.rank,
        "alternatives": [
            {"token_id": other, "text": text(other), "logprob": logprob} for other, logprob in token.alternatives
        ],
    }


def _print_json(values: Values) -> None:
    print(json.dumps(values, allow_nan=False), flush=True)


def _print_text(values: Values) -> None:
    if "status" not in values:
        lines = values["text"].split("\n")
        print("\n".join(coloured(printable(line), values["logprob"]) for line in lines), end="", flush=True)
        return
    mean = "" if values["mean_logprob"] is None else f", mean logprob {values['mean_logprob']:.3f}"
    workers = " then ".join(map(printable, values["workers"]))
    print(f"\n{styled(values['status'], 'bold')}: {values['tokens']} tokens{mean}, from {workers}")
