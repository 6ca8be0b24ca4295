"""A client as a process: it prints what it took before it acks that, and how requests end.

`token ID RESUME_ID POSITION` says how far a request came, and what another client resumes it by.
Its arguments are how many tokens each request has, and the number of requests.
What waits for it is large, as each token has twenty alternatives.
"""

import asyncio
import sys
from typing import NamedTuple

from tests.system.asking import wanted
from tests.system.programs import tell
from tokenbus.client import Client, Generation, StepRows
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import code_name
from tokenbus.logs import configure
from tokenbus.settings import Settings


class Place(NamedTuple):
    """What another client resumes a request by, and from where on."""

    turn_id: int
    position: int


def taken(lines: list[str]) -> dict[int, Place]:
    """Return how far each request came, from the lines of this program; fail if one went back or stood still."""
    places: dict[int, Place] = {}
    for line in lines:
        request_id, turn_id, position = map(int, line.split()[1:])
        assert request_id not in places or position > places[request_id].position, line
        places[request_id] = Place(turn_id, position)
    return places


async def _take(tokens: Generation) -> None:
    try:
        async for _ in tokens.rows():
            pass
    except RequestFailedError as error:
        tell(f"failed {tokens.request_id} {error.generated_tokens} {code_name(error.code)}")
    else:
        tell(f"ended {tokens.request_id} {tokens.position}")


async def _main(count: int, requests: int) -> None:
    settings = Settings.load()
    configure(settings.log)
    async with Client(settings) as client:
        generations = [client.generate(wanted(count, top_logprobs=20)) for _ in range(requests)]
        by_id = {each.request_id: each for each in generations}
        takers = [asyncio.create_task(_take(tokens)) for tokens in generations]
        # While one waits to be taken, nothing is acked: what is acked was printed before.
        async for output in client.steps(most=0):
            if not isinstance(output, StepRows):
                continue
            target = output.target
            ends = target.positions.astype(int) + target.token_counts
            for key, end in zip(target.request_ids.tolist(), ends.tolist(), strict=True):
                tell(f"token {key} {by_id[key].turns[-1].request_id} {end}")
        await asyncio.gather(*takers)


if __name__ == "__main__":
    asyncio.run(_main(*map(int, sys.argv[1:])))
