"""A whole system whose processes have keys: it works as without, a revoked one is out, and no secret is seen."""

import asyncio
from pathlib import Path
from typing import Any

from tests.bus.keyed import Keyring
from tests.support.waiting import until
from tests.system.asking import all_exact, all_failed, ask, begun
from tests.system.deployment import Deployment, Overrides
from tests.system.inprocess import processing
from tokenbus.bus import Role
from tokenbus.client import Client
from tokenbus_contracts.generated.request_pb2 import ErrorCode

TIMEOUT: Overrides = {"bus__heartbeat_timeout_ms": 2000}
HANDOFFS = {"worker__handoff_address": "tcp://127.0.0.1:0"}


def keys_of(keyring: Keyring, name: str) -> dict[str, Any]:
    """Return the settings of a process that has a key, and the list of those that may connect to it."""
    settings = keyring.connecting(name)
    return {
        "bus__key_file": settings.key_file,
        "bus__server_key": settings.server_key,
        "bus__allowed_keys": str(keyring.file),
    }


def listening(keyring: Keyring) -> dict[str, Any]:
    settings = keyring.listening()
    return {"bus__key_file": settings.key_file, "bus__allowed_keys": settings.allowed_keys}


def secrets_in(keyring: Keyring) -> list[str]:
    return [file.read_text().split('secret-key = "')[1].split('"')[0] for file in keyring.folder.glob("*.key_secret")]


async def test_everything_works_with_keys_and_no_secret_is_seen(deployment: Deployment, tmp_path: Path) -> None:
    """Requests begin at a prefill worker and go on at a decode worker, over ports with keys; all tokens are true.

    No secret key is in what the processes log, in their command lines or in their environments.
    """
    keyring = Keyring(tmp_path)
    for name in ("prefill-0", "decode-0", "client"):
        keyring.make(name)
    keyring.allow(
        keyring.entry("prefill-0", Role.WORKER, Role.HANDOFF, names=("prefill-0",)),
        keyring.entry("decode-0", Role.WORKER, names=("decode-0",)),
        keyring.entry("client", Role.CLIENT, names=("client",)),
    )
    async with processing(deployment, **listening(keyring)) as (processor, found):
        addresses: dict[str, Any] = dict(found)
        programs = [
            await asyncio.to_thread(
                deployment.start_worker,
                name,
                worker__role=name.partition("-")[0],
                **addresses,
                **keys_of(keyring, name),
                **HANDOFFS,
            )
            for name in ("decode-0", "prefill-0")
        ]
        chosen = deployment.settings(**addresses, **keys_of(keyring, "client"), client__drain_timeout_ms=0)
        async with Client(chosen) as client:
            await all_exact(ask(client, 16, 61), 61)
        rows = {name: worker.stream.counts.tokens for name, worker in processor.workers.by_id.items()}
        seen = ""
        for program in programs:
            process = Path(f"/proc/{program.pid}")
            seen += (process / "cmdline").read_text() + (process / "environ").read_text() + program.output
        assert not [secret for secret in secrets_in(keyring) if secret in seen]
    assert rows == {"prefill-0": 16, "decode-0": 16 * 60}


async def test_revoked_worker_is_lost_and_another_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    """Requests of a worker whose key is revoked end with `worker_lost`; those of another worker notice nothing."""
    keyring = Keyring(tmp_path)
    for name in ("first", "second", "client"):
        keyring.make(name)
    entries = [keyring.entry(name) for name in ("second", "client")]
    keyring.allow(*entries, keyring.entry("first"))
    async with processing(deployment, **listening(keyring), **TIMEOUT) as (processor, found):
        addresses: dict[str, Any] = dict(found)
        first = {**addresses, **keys_of(keyring, "first"), **TIMEOUT}
        await asyncio.to_thread(deployment.start_worker, "first", **first)
        chosen = deployment.settings(**addresses, **keys_of(keyring, "client"), **TIMEOUT, client__drain_timeout_ms=0)
        async with Client(chosen) as client:
            doomed = ask(client, 4, None)
            await begun(doomed)
            second = {**addresses, **keys_of(keyring, "second"), **TIMEOUT}
            await asyncio.to_thread(deployment.start_worker, "second", **second)
            staying = ask(client, 4, 600)  # they go to the one with fewer
            await begun(staying)
            keyring.allow(*entries)
            await all_failed(doomed, ErrorCode.ERROR_CODE_WORKER_LOST)
            await all_exact(staying, 600)
        await until(lambda: "first" not in processor.workers.by_id)
        assert processor.refused_connections


async def test_revoked_client_is_cut_off_and_another_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    """Requests of a client whose key is revoked end with an error there and at their worker; others notice nothing."""
    keyring = Keyring(tmp_path)
    for name in ("worker-0", "leaver", "stayer"):
        keyring.make(name)
    entries = [keyring.entry(name) for name in ("worker-0", "stayer")]
    keyring.allow(*entries, keyring.entry("leaver"))
    waits = {**TIMEOUT, "client__resume_timeout_ms": 1000, "clients__detached_timeout_ms": 1000}
    async with processing(deployment, **listening(keyring), **waits) as (processor, found):
        addresses: dict[str, Any] = dict(found)

        def client(name: str) -> Client:
            chosen = {**addresses, **keys_of(keyring, name), **waits, "client__name": name}
            return Client(deployment.settings(**chosen, client__drain_timeout_ms=0))

        worker = {**addresses, **keys_of(keyring, "worker-0"), **TIMEOUT}
        await asyncio.to_thread(deployment.start_worker, **worker)
        async with client("leaver") as leaver, client("stayer") as stayer:
            doomed, staying = ask(leaver, 4, None), ask(stayer, 4, 600)
            await begun([*doomed, *staying])
            keyring.allow(*entries)
            await all_failed(doomed, ErrorCode.ERROR_CODE_DEADLINE)
            await all_exact(staying, 600)
        await until(lambda: not processor.registry.table.open_requests())
        assert processor.refused_connections
