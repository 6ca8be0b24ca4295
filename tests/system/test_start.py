"""Services that cannot start: one line that names what is wrong, status 2, and no traceback."""

import pytest

from tests.support.processes import run
from tests.support.waiting import MOST
from tests.system.deployment import COMMAND, Deployment


def _refusal(deployment: Deployment, *arguments: str) -> str:
    """Return the one line that a command says when it cannot start."""
    refused = run([COMMAND, *arguments], env=deployment.environment(), text=True, timeout=MOST)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert not refused.stdout
    return str(line)


@pytest.mark.parametrize("which", ["workers", "clients"])
def test_taken_address_is_named(deployment: Deployment, which: str) -> None:
    """Case 8: a processor at an address that another has says so, and the other goes on."""
    first = deployment.start_processor()
    mine, other = ("w", "c") if which == "workers" else ("c", "w")
    line = _refusal(
        deployment,
        "processor",
        f"--{which}-address=ipc://{deployment.folder}/{mine}",
        f"--{'clients' if which == 'workers' else 'workers'}-address=ipc://{deployment.folder}/{other}2",
    )
    assert f"ipc://{deployment.folder}/{mine}: taken" in line
    assert first.terminate() == 0


@pytest.mark.parametrize("which", ["workers", "clients"])
def test_missing_directory_is_named(deployment: Deployment, which: str) -> None:
    """A path in a directory that cannot be made, because the one above it does not exist, is named with the reason."""
    address = f"ipc://{deployment.folder}/missing/deeper/w"
    assert f"{address}: no such directory" in _refusal(deployment, "processor", f"--{which}-address={address}")


@pytest.mark.parametrize("service", ["processor", "worker"])
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("bus.heartbeat_timeout_ms=150", "bus.heartbeat_timeout_ms"),
        ("limits.max_rows=4096", "limits.max_rows"),
        ("bus.no_such_thing=1", "bus.no_such_thing"),
        ("bus.workers_address=udp://127.0.0.1:1", "bus.workers_address"),
    ],
)
def test_bad_setting_is_named(deployment: Deployment, service: str, setting: str, named: str) -> None:
    """A setting that cannot be is named, whichever service it was given to."""
    assert named in _refusal(deployment, service, "--set", setting)


def test_worker_cannot_connect_to_everywhere(deployment: Deployment) -> None:
    """An address that one can only listen at is refused by a peer that would connect to it."""
    assert "tcp://*:5570" in _refusal(deployment, "worker", "--workers-address", "tcp://*:5570")


def test_service_leaves_with_status_zero_when_asked(deployment: Deployment) -> None:
    """SIGTERM lets a worker and a processor leave in good order."""
    processor = deployment.start_processor()
    worker = deployment.start_worker()
    assert worker.terminate() == 0
    assert processor.terminate() == 0
