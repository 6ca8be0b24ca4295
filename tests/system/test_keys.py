"""A whole system whose processes have keys: it works as without, a revoked one is out, and no secret is seen."""

import asyncio
from pathlib import Path
from typing import Any

from tests.bus.keyed import Keyring
from tests.support.waiting import until
from tests.system.asking import Asked, all_exact, all_exact_so_far, all_failed, ask, begun
from tests.system.deployment import Deployment, Overrides
from tests.system.inprocess import processing
from tokenbus.bus import Role
from tokenbus.client import Client
from tokenbus_contracts.generated.request_pb2 import ErrorCode

TIMEOUT: Overrides = {"bus__heartbeat_timeout_ms": 2000}


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
        keyring.entry("prefill-0", Role.WORKER, names=("prefill-0",)),
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


async def test_requests_stay_their_owners_and_revoked_keys_are_out(deployment: Deployment, tmp_path: Path) -> None:
    """A client neither reads nor ends what is another's, and a process without a key, or with one no more, is cut off.

    The requests of a revoked worker end as lost, those of a revoked client at their worker too. Others notice nothing.
    """
    keyring = Keyring(tmp_path)
    for name in ("first", "second", "leaver", "stayer", "stranger"):
        keyring.make(name)
    entries = {name: keyring.entry(name) for name in ("first", "second", "leaver", "stayer")}
    keyring.allow(*entries.values())
    own = {**TIMEOUT, "clients__detached_timeout_ms": 1000, "processor__abort_timeout_ms": 60_000}
    async with processing(deployment, **listening(keyring), **own) as (processor, found):
        addresses: dict[str, Any] = dict(found)

        def client(name: str) -> Client:
            patience = {} if name == "stayer" else {"client__resume_timeout_ms": 1000}
            chosen = {**addresses, **keys_of(keyring, name), **TIMEOUT, **patience, "client__name": name}
            return Client(deployment.settings(**chosen, client__drain_timeout_ms=0))

        async def worker(name: str) -> None:
            chosen = {**addresses, **keys_of(keyring, name), **TIMEOUT, "worker__model": name}
            await asyncio.to_thread(deployment.start_worker, name, "--steps-per-second", "50", **chosen)

        async def revoke(name: str) -> None:
            del entries[name]
            keyring.allow(*entries.values())

        await worker("first")
        await worker("second")
        async with client("leaver") as leaver, client("stayer") as stayer:
            lost, doomed, staying = (
                ask(one, 4, None, model, is_continued=False)
                for one, model in ((stayer, "first"), (leaver, "second"), (stayer, "second"))
            )
            await begun([*lost, *doomed, *staying])
            for each in staying:
                leaver.abort(each.tokens.request_id)
                audit = await Asked(leaver.resume(each.tokens.request_id, 0)).ended()
                assert (audit.error is not None, audit.position) == (True, 0), audit
            async with client("stranger") as stranger:
                await all_failed(ask(stranger, 1, 1), ErrorCode.ERROR_CODE_DEADLINE)
            await revoke("first")
            await all_failed(lost, ErrorCode.ERROR_CODE_WORKER_LOST)
            await until(lambda: list(processor.workers.by_id) == ["second"])
            await revoke("leaver")
            await all_failed(doomed, ErrorCode.ERROR_CODE_DEADLINE)
            await all_exact_so_far(stayer, staying)
        await until(lambda: not processor.registry.table.open_requests())
        assert processor.refused_connections
