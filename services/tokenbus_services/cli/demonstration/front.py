"""The same system through its gateway: one answer by HTTP, as any client of OpenAI's API gets it."""

import asyncio
import json
import urllib.request

from tokenbus_services.cli.demonstration.asking import PROMPTS
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.terminal import printable

_SECONDS = 20.0
_MOST_BYTES = 1_048_576
_BODY = {"model": "tokenbus", "prompt": PROMPTS[0], "max_tokens": 12, "seed": 1, "logprobs": 1}


async def front_told(address: str) -> list[str]:
    """Return the lines of an answer of the gateway, or none where there is no gateway."""
    if not address:
        return ["", "   no gateway was started: the extra gateway is not installed"]
    try:
        text, count = await asyncio.to_thread(_answer, f"http://{address}/v1/completions")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"the gateway at {address} did not answer as it should: {error}") from None
    return ["", f"   by HTTP, at http://{address}/v1/completions: {printable(text)!r}, {count} tokens"]


def _answer(url: str) -> tuple[str, int]:
    request = urllib.request.Request(  # noqa: S310 - our own gateway's, on this host
        url, json.dumps(_BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        found = json.loads(answer.read(_MOST_BYTES))
    choice = found["choices"][0]
    return str(choice["text"]), len(choice["logprobs"]["token_logprobs"])
