"""Clients that vanish, for some seconds; `make soak` lets them for minutes."""

from tests.integration.deployment import Deployment
from tests.integration.vanishing import vanishing


async def test_clients_that_vanish_harm_no_request_of_others(deployment: Deployment) -> None:
    """Beside clients that are killed, stop reading, leave and come back, every other request ends well."""
    figures = await vanishing(deployment, 4.0, seed=3)
    assert figures.is_clean, figures
    assert figures.resumed > 0
    assert len(figures.vanished) == 5
