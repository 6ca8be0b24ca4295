"""Attacks on identity, ownership and fairness, over NATS: what they achieve does not depend on the transport."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.integration.attacks import test_fairness, test_identity, test_ownership
from tests.integration.attacks.scene import variants
from tests.integration.deployment import Deployment
from tests.support.nats import NatsServer

ATTACKS: dict[str, Callable[[Deployment], Awaitable[None]]] = {
    "a live worker's id": test_identity.test_hello_of_a_live_worker_is_refused,
    "a live client's session": partial(
        test_identity.test_session_that_is_alive_is_not_taken, name="victim", proof=b"x" * 16
    ),
    "another's request": partial(
        test_ownership.test_request_of_a_live_client_cannot_be_resumed, name="victim", position=30
    ),
    "nothing is acknowledged": test_fairness.test_ten_clients_that_acknowledge_nothing_lose_their_own_requests,
    "rows of a forged worker": partial(test_identity.test_rows_of_a_forged_worker_reach_no_client, later=1),
    "an abort": test_ownership.test_request_of_a_live_client_cannot_be_aborted,
}


@pytest.mark.parametrize("attack", variants(*list(ATTACKS)[:4], long=list(ATTACKS)[4:]))
async def test_attack(deployment: Deployment, attack: str) -> None:
    """The victim gets every token of its own, and the attacker none of them."""
    server = NatsServer(deployment.folder)
    for key in ("workers", "clients"):
        deployment.overrides[f"bus.{key}_address"] = server.address(key)
    try:
        await ATTACKS[attack](deployment)
    finally:
        server.kill()
