"""tokenbus.testing: a whole bus, with scripted engines, in the process and the event loop of a test.

    import tokenbus.testing

    async def test_my_consumer():
        answer = tokenbus.testing.Answer(tokens=[5, 6, 7])
        async with tokenbus.testing.bus(tokenbus.testing.ScriptedEngine(answer)) as bus:
            assert await my_consumer(bus.client) == [5, 6, 7]

`tokenbus.pytest_plugin` has fixtures for pytest. The guide is docs/testing.md.
"""

from typing import TYPE_CHECKING

from tokenbus.on_use import loader

# Skip isort, which would write one statement for each name.
# isort: skip_file
if TYPE_CHECKING:
    from tokenbus.engines.synthetic import (
        SyntheticEngine as SyntheticEngine,
        TrueTokens as TrueTokens,
        true_tokens as true_tokens,
    )
    from tokenbus.testing.batches import RowShape as RowShape, batch as batch, row_shapes as row_shapes
    from tokenbus.testing.clock import ManualClock as ManualClock
    from tokenbus.testing.line import Line as Line
    from tokenbus.testing.scripted import Answer as Answer, ScriptedEngine as ScriptedEngine
    from tokenbus.testing.system import Bus as Bus, bus as bus
    from tokenbus.testing.worker import Worker as Worker
    from tokenbus_contracts.published.golden import GoldenMessage as GoldenMessage, golden_messages as golden_messages

_HOMES = {
    "tokenbus.testing.batches": "RowShape batch row_shapes",
    "tokenbus.testing.clock": "ManualClock",
    "tokenbus.testing.line": "Line",
    "tokenbus.testing.scripted": "Answer ScriptedEngine",
    "tokenbus.testing.system": "Bus bus",
    "tokenbus.testing.worker": "Worker",
    "tokenbus_contracts.published.golden": "GoldenMessage golden_messages",
    "tokenbus.engines.synthetic": "SyntheticEngine TrueTokens true_tokens",
}
"""The names by module. Modules are imported lazily, because only a few of them work on Python 3.10."""
__all__ = [name for defined in _HOMES.values() for name in defined.split()]
__getattr__ = loader(__name__, _HOMES, globals())
