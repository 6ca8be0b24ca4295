"""The same system through its gateway: one answer by HTTP, as any client of OpenAI's API gets it, and the true one."""

import asyncio
import json
import urllib.request
from dataclasses import dataclass

from tokenbus_contracts import Limits
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_services.cli.demonstration.asking import PROMPTS
from tokenbus_services.cli.demonstration.truth import computed
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.terminal import styled
from tokenbus_services.plugins import load_tokenizer
from tokenbus_services.printable import printable

_SECONDS = 20.0
_MOST_BYTES = 1_048_576
_TOKENS, _SEED = 12, 1
_BODY = {"model": "tokenbus", "prompt": PROMPTS[0], "max_tokens": _TOKENS, "seed": _SEED, "logprobs": 1}


@dataclass(frozen=True, slots=True)
class Front:
    """What came by HTTP, and what had to come."""

    url: str
    text: str
    tokens: int
    true_text: str
    true_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether it is what the same request gives in an engine without a bus and a gateway."""
        return (self.text, self.tokens) == (self.true_text, self.true_tokens)

    def told(self) -> str:
        """Return it as a line."""
        line = f"   by HTTP, at {self.url}: {printable(self.text)!r}, {self.tokens} tokens"
        if self.is_right:
            return line
        return styled(f"{line}, and NOT {printable(self.true_text)!r}, {self.true_tokens} tokens", "red")


async def front_of(address: str, limits: Limits) -> Front | None:
    """Return an answer of the gateway beside the true one, or None where there is no gateway."""
    if not address:
        return None
    url = f"http://{address}/v1/completions"
    try:
        text, count = await asyncio.to_thread(_answer, url)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CommandError(f"the gateway at {address} did not answer as it should: {error}") from None
    return Front(url, text, count, *await asyncio.to_thread(_truth, limits))


def _answer(url: str) -> tuple[str, int]:
    request = urllib.request.Request(  # noqa: S310 - our own gateway's, on this host
        url, json.dumps(_BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        found = json.loads(answer.read(_MOST_BYTES))
    choice = found["choices"][0]
    return str(choice["text"]), len(choice["logprobs"]["token_logprobs"])


def _truth(limits: Limits) -> tuple[str, int]:
    sampling = SamplingParameters(max_tokens=_TOKENS, seed=_SEED, temperature=1.0)
    generate = Generate(request_key=1, text=TextPrompt(text=PROMPTS[0]), sampling=sampling)
    ids = [int(token_id) for row in computed([generate], limits)[1] for token_id in row.token_ids]
    return b"".join(map(load_tokenizer("ngram").token_bytes, ids)).decode(errors="replace"), len(ids)
