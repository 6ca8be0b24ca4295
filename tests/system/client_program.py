"""A client as a process: it prints what it took before it acks that, as `token KEY POSITION`, and how requests end.

`KEY` is what another life of it resumes the request by; `asked ID` has the id of each.

Its arguments are how many tokens each request has, then the number of requests, or `KEY:POSITION` for each to resume.
What waits for it is large, as each token has twenty alternatives.
"""

import asyncio
import sys

from tests.system.asking import wanted
from tests.system.programs import tell
from tokenbus.client import Client, Generation, StepRows
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import code_name
from tokenbus.logs import configure
from tokenbus.settings import Settings


async def _take(tokens: Generation) -> None:
    try:
        async for _ in tokens.rows():
            pass
    except RequestFailedError as error:
        tell(f"failed {tokens.request_id} {error.generated_tokens} {code_name(error.code)}")
    else:
        tell(f"ended {tokens.request_id} {tokens.position}")


async def _main(count: int, wish: list[str]) -> None:
    settings = Settings.load()
    configure(settings.log)
    async with Client(settings) as client:
        if ":" in wish[0]:
            places = [each.split(":") for each in wish]
            requests = [client.resume(int(key), int(position)) for key, position in places]
        else:
            requests = [client.generate(wanted(count, top_logprobs=20)) for _ in range(int(wish[0]))]
        by_id = {each.request_id: each for each in requests}
        for request_id in by_id:
            tell(f"asked {request_id}")
        takers = [asyncio.create_task(_take(tokens)) for tokens in requests]
        # While one waits to be taken, nothing is acked: what is acked was printed before.
        async for output in client.steps(most=0):
            if not isinstance(output, StepRows):
                continue
            target = output.target
            ends = target.positions.astype(int) + target.token_counts
            for key, end in zip(target.request_keys.tolist(), ends.tolist(), strict=True):
                tell(f"token {by_id[key].resume_id} {end}")
        await asyncio.gather(*takers)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2:]))
