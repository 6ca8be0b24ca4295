"""The campaign of kills, short; `make nightly` and `make soak` run longer ones."""

from tests.system.campaign import VICTIMS, campaign
from tests.system.deployment import Deployment


async def test_nothing_is_lost_or_repeated_whichever_process_is_killed(deployment: Deployment) -> None:
    """Processor, publisher, engine, worker and client are killed: each request has its tokens once and in order.

    A client's requests are resumed from what it had taken. Those of a dead engine end with an error, no others.
    """
    figures = await campaign(deployment, [*VICTIMS, "processor"], seed=20, requests=8)
    assert figures.is_clean, figures
    assert figures.resumed == 4
    assert figures.ended >= 2
    assert figures.client_handshakes >= 3
    assert figures.tokens > 4000
