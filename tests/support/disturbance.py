"""What happens to a bus of tests while its client asks."""

from random import Random

from tokenbus.testing import Bus, Line


async def disturb(bus: Bus, line: Line, random: Random, *, turns: int, processors: int = 1) -> None:
    """Hold what is on its way to a client, and its acks, for some turns; then restart, cut, drop, or nothing."""
    line.hold()
    await bus.settle(random.randrange(turns))
    match random.randrange(4):
        case 0 | 1:
            await bus.restart_processor(random.randrange(processors))
        case 2:
            line.cut()
        case 3:
            line.drop(received=random.randrange(1, 3))
    line.release()
