"""The whole system over a NATS server: real processes, and a server that is killed while requests run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.integration.asking import all_exact, ask, begun
from tests.integration.campaign import campaign
from tests.integration.deployment import COMMAND, Deployment, meeting
from tests.pages import ROOT
from tests.support.nats import NatsServer
from tokenbus_services.client import Client


@pytest.fixture
def server(deployment: Deployment) -> Iterator[NatsServer]:
    """Return a server that the deployment's processes meet at."""
    with meeting(deployment, "nats") as made:
        assert made is not None
        yield made


async def test_server_that_is_killed_loses_and_repeats_nothing(deployment: Deployment, server: NatsServer) -> None:
    """Requests that run while the server is killed, and started again, get every token once."""
    deployment.start_processor()
    deployment.start_worker()
    async with Client(deployment.settings()) as client:
        asked = ask(client, 8, 1200)
        await begun(asked)
        for _ in range(2):
            server.kill()
            server.start()
            await begun(ask(client, 1, 600))
        await all_exact(asked, 1200)


@pytest.mark.parametrize("bus", ["nats", "found"])
async def test_killing_the_processor_loses_and_repeats_nothing(deployment: Deployment, bus: str) -> None:
    """What requests get while their processor is killed again and again is exactly what their worker emitted."""
    with meeting(deployment, bus):
        figures = await campaign(deployment, kills=3, seed=21, requests=16)
    assert figures.is_clean, figures
    assert figures.items_sent_again > 0


async def test_services_meet_at_a_server(deployment: Deployment, server: NatsServer) -> None:
    """With `--bus` alone a processor, a prefill worker, a decode worker and a client find each other."""
    bus = f"nats://{server.server}"
    for key in ("workers", "clients"):
        del deployment.overrides[f"bus.{key}_address"]
    deployment.start("processor", [COMMAND, "processor", "--bus", bus]).wait_for('"listening"')
    for role in ("prefill", "decode"):
        command = [COMMAND, "worker", "--engine", "synthetic", "--bus", bus, "--role", role, "--id", f"{role}-0"]
        deployment.start(role, command).wait_for('"connected"')
    async with Client(deployment.settings(bus__clients_address=f"{bus}/clients.*")) as client:
        await all_exact(ask(client, 4, 200), 200)


def documented(folder: Path) -> str:
    """Return the configuration of docs/security.md, with certificates, and each user's name for its password."""
    page = (ROOT / "docs" / "security.md").read_text().split("\n## Over NATS\n")[1].split("\n## ")[0]
    (config,) = re.findall(r"^```\n(tls: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    issued.private_key_pem.write_to_path(str(folder / "server-key.pem"))
    config = re.sub(r'"(server(?:-key)?\.pem)"', rf"'{folder}/\1'", config)
    return re.sub(r'user: ([\w-]+), password: "..."', r'user: \1, password: "\1"', config)


async def test_permissions_as_documented(deployment: Deployment) -> None:
    """With the server's configuration of the page each process may be who it is, over TLS, and no other."""
    folder = deployment.folder
    server = NatsServer(folder, documented(folder))
    for key in ("workers", "clients"):
        deployment.overrides[f"bus.{key}_address"] = server.address(f"{key}.*", "tls")
    deployment.overrides["bus.nats_ca_file"] = f"{folder}/ca.pem"
    proofs = {}
    for user in ("processor", "gpu-7", "decode-0", "prefill-0", "gateway"):
        path = folder / user
        path.write_text(f"{user}:{user}\n")
        path.chmod(0o600)
        proofs[user] = str(path)
    try:
        deployment.start_processor(bus__nats_credentials=proofs["processor"])
        worker = {"bus__nats_credentials": proofs["gpu-7"], "bus__nats_roles": "worker"}
        deployment.start_worker("gpu-7", **worker)
        other = deployment.start("other", [COMMAND, "worker", "--engine", "synthetic", "--id", "gpu-8"], **worker)
        other.wait_for("may not be worker gpu-8")
        liar = deployment.start("liar", [COMMAND, "worker", "--engine", "synthetic"], **worker, bus__nats_name="gpu-8")
        liar.wait_for('"not permitted by the nats server"')
        for name in ("decode-0", "prefill-0"):
            role, _, _ = name.partition("-")
            roles = "worker+handoff" if role == "prefill" else "worker"
            chosen = {"bus__nats_credentials": proofs[name], "bus__nats_roles": roles, "worker__role": role}
            handoffs = server.address(f"handoff-{name}", "tls")
            deployment.start_worker(name, **chosen, worker__handoff_address=handoffs)
        gateway = deployment.settings(
            bus__nats_credentials=proofs["gateway"], bus__nats_roles="client+observer", client__name="gateway"
        )
        async with Client(gateway) as client:
            await all_exact(ask(client, 8, 200), 200)
    finally:
        server.kill()
