"""The campaign, short; `make soak` runs it long."""

from tests.integration.campaign import campaign
from tests.integration.deployment import Deployment


async def test_killing_the_processor_loses_and_repeats_nothing(deployment: Deployment) -> None:
    """What requests get while their processor is killed again and again is exactly what their worker emitted."""
    figures = await campaign(deployment, kills=5, seed=20, requests=16)
    assert figures.is_clean, figures
    assert figures.kills == 5
    assert figures.items_sent_again > 0
    assert figures.tokens > 5_000
