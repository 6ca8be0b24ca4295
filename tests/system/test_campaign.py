"""The campaigns, short; `make soak` runs them long."""

from tests.system.campaign import campaign
from tests.system.deployment import Deployment


async def test_killing_the_processor_loses_and_repeats_nothing(deployment: Deployment) -> None:
    """What requests get while their processor is killed again and again is exactly what their worker emitted."""
    figures = await campaign(deployment, kills=5, seed=20, requests=16)
    assert figures.is_clean, figures
    assert figures.kills == 5
    assert figures.items_sent_again > 0
    assert figures.tokens > 5_000


async def test_killing_the_publisher_loses_and_repeats_nothing(deployment: Deployment) -> None:
    """The engine goes on, and each publisher takes over from the one before: no request ends."""
    figures = await campaign(deployment, kills=4, seed=21, requests=16, kill="publisher")
    assert figures.is_clean, figures
    assert figures.kills == 4
    assert figures.ended == 0
    assert figures.tokens > 4_000


async def test_killing_the_engine_ends_its_requests_and_no_other(deployment: Deployment) -> None:
    """Each request ends with an error, after exactly the tokens that were made for it up to some step."""
    figures = await campaign(deployment, kills=3, seed=22, requests=16, kill="engine")
    assert figures.is_clean, figures
    assert figures.kills == 3
    assert figures.ended >= 3 * 8
