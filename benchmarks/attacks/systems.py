"""What is attacked: processes as deployed, where an attacker finds them, and the requests of another client."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.asking import wanted
from tests.integration.attacks.floods import login, permissions
from tests.integration.attacks.peers import Prove, no_key
from tests.integration.attacks.scene import AS_DEPLOYED, free_ports
from tests.integration.audit import Audit
from tests.integration.deployment import Deployment
from tests.integration.programs import Program
from tests.integration.serving import Served, plainly
from tests.integration.test_keys import keys_of, listening
from tests.services.bus.keyed import Keyring
from tests.support.model_folder import TEMPLATE, with_byte_fallback, write_model
from tests.support.nats import NatsServer
from tokenbus_services.client import Client
from tokenbus_services.delivery import RequestFailedError

_TOKENS = 300
_PACE = ("--steps-per-second", "200")
_LOOP = "{% for a in work %}{% for b in work %}{% for c in work %}{% endfor %}{% endfor %}{% endfor %}"
"""What a request can make endless: a template may have any loop."""

Ask = Callable[[Callable[[int], None]], Awaitable[bool]]
"""Asks for one request, tells how many tokens come each time, and returns whether it got what it should."""


class Target(NamedTuple):
    """Where a system is attacked, and with what."""

    clients: str = ""
    workers: str = ""
    prove: Prove = no_key
    """Shows the attacker's key."""
    nats_port: int = 0
    url: str = ""
    """Of the gateway."""


class System(NamedTuple):
    """A system, and a client of it that is not the attacker."""

    target: Target
    attacked: Program
    """Whose memory and processor time count."""
    ask: Ask


@asynccontextmanager
async def over_tcp(folder: Path) -> AsyncIterator[System]:
    """Run a processor without keys, and a worker."""
    clients, workers = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    async with _running(_deployment(folder, clients, workers), Target(clients, workers)) as system:
        yield system


@asynccontextmanager
async def with_keys(folder: Path) -> AsyncIterator[System]:
    """Run a processor and a worker with keys; the attacker's allows any name."""
    keyring = Keyring(folder)
    names = ("attacker", "worker-0", "client")
    for name in names:
        keyring.make(name)
    keyring.allow(*map(keyring.entry, names))
    clients, workers = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    target = Target(clients, workers, partial(keyring.prove, name="attacker"))
    own = listening(keyring), keys_of(keyring, "worker-0"), keys_of(keyring, "client")
    async with _running(_deployment(folder, clients, workers), target, *own) as system:
        yield system


def _deployment(folder: Path, clients: str, workers: str) -> Deployment:
    return Deployment(folder, {**AS_DEPLOYED, "bus.clients_address": clients, "bus.workers_address": workers})


@asynccontextmanager
async def over_nats(folder: Path) -> AsyncIterator[System]:
    """Run a processor and a worker at a NATS server whose users may do what docs/security.md lets them."""
    server = NatsServer(folder, permissions(["worker-0", "attacker"], ["victim"]))
    try:
        client = login(folder, "victim", "client") | {"client__name": "victim"}
        own = login(folder, "processor"), login(folder, "worker-0", "worker"), client
        deployment = _deployment(folder, server.address("clients.p"), server.address("workers.p"))
        async with _running(deployment, Target(nats_port=server.port), *own) as system:
            yield system
    finally:
        server.kill()


@asynccontextmanager
async def _running(deployment: Deployment, target: Target, *own: Mapping[str, Any]) -> AsyncIterator[System]:
    """Run a processor, a worker and a client; each has its own settings, or all have the deployment's."""
    processor, worker, client = own or ({}, {}, {})
    try:
        program = deployment.start_processor(**processor)
        deployment.start_worker("worker-0", *_PACE, **worker)
        async with Client(deployment.settings(**client, client__drain_timeout_ms=0)) as connected:
            yield System(target, program, partial(_ask, connected))
    finally:
        deployment.close()


async def _ask(client: Client, tell: Callable[[int], None]) -> bool:
    tokens = client.generate(wanted(_TOKENS))
    audit = Audit(tokens.request_id)
    try:
        async for row in tokens.rows():
            tell(row.token_ids.size)
            audit.take(row)
    except RequestFailedError:
        return False
    return audit.is_exact


@asynccontextmanager
async def at_gateway(folder: Path) -> AsyncIterator[System]:
    """Run a gateway with a tokenizer as Llama 2's, a processor and a worker."""
    model = write_model(folder / "model", with_byte_fallback(), TEMPLATE + _LOOP)
    deployment = Deployment(folder, AS_DEPLOYED)
    try:
        served = Served(deployment, gateway__tokenizer=str(model))
        served.start_worker("worker-0", *_PACE)
        yield System(Target(url=served.url), served.gateway, partial(_stream, served.url))
    finally:
        deployment.close()


async def _stream(url: str, tell: Callable[[int], None]) -> bool:
    body = {"model": "tokenbus", "prompt": "hello", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
    count, reason = 0, None
    async with plainly(url) as client, client.stream("POST", "/v1/completions", json=body | {"logprobs": 0}) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                new = len((choice.get("logprobs") or {}).get("tokens", []))
                count, reason = count + new, choice["finish_reason"] or reason
                tell(new)
    return (count, reason) == (_TOKENS, "length")
