"""A service that fails while it starts: the lines that `tokenbus up` shows of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_local import plan, read
from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import Child, ServiceEvent


async def test_last_output_is_shown() -> None:
    lines = [f"line {number}" for number in range(300)]
    child, events = await read("\n".join(lines).encode())
    child.status = 1
    with pytest.raises(CommandError, match=r"^mixed-0: ended with status 1 before it was ready: line 299$"):
        await child.ready(60)
    (output,) = events
    assert output.values["lines"] == lines[-100:]


async def test_service_that_fails_shows_what_it_wrote(folder: Path) -> None:
    events: list[ServiceEvent] = []
    child = Child(replace(plan(folder).services[0], arguments=("processor", "--no-such")), events.append)
    await child.start(folder)
    with pytest.raises(CommandError, match=r"^processor: ended with status 2 before it was ready: .*--no-such"):
        await child.ready(60)
    (shown,) = [event for event in events if event.event == "output"]
    assert "--no-such" in shown.text
    assert shown.values["lines"] == shown.text.splitlines()
