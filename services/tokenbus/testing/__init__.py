"""tokenbus.testing: a whole bus in the process and event loop of a test, with scripted engines.

    import tokenbus.testing

    async def test_my_consumer():
        answer = tokenbus.testing.Answer(tokens=[5, 6, 7])
        async with tokenbus.testing.bus(tokenbus.testing.ScriptedEngine(answer)) as bus:
            assert await my_consumer(bus.client) == [5, 6, 7]

`tokenbus.pytest_plugin` has fixtures for pytest. The guide: docs/testing.md.
"""

from typing import TYPE_CHECKING

from tokenbus.on_use import loader

if TYPE_CHECKING:
    from tokenbus.engines.synthetic import SyntheticEngine, TrueTokens, true_tokens
    from tokenbus.testing.batches import RowShape, batch, row_shapes
    from tokenbus.testing.clock import ManualClock
    from tokenbus.testing.line import Line
    from tokenbus.testing.scripted import Answer, ScriptedEngine
    from tokenbus.testing.system import Bus, bus
    from tokenbus.testing.worker import Worker
    from tokenbus_contracts.published.golden import GoldenMessage, golden_messages

__all__ = [
    "Answer",
    "Bus",
    "GoldenMessage",
    "Line",
    "ManualClock",
    "RowShape",
    "ScriptedEngine",
    "SyntheticEngine",
    "TrueTokens",
    "Worker",
    "batch",
    "bus",
    "golden_messages",
    "row_shapes",
    "true_tokens",
]

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
"""Imported lazily: engines and parts of a worker run on Python 3.10, a whole bus does not."""
__getattr__ = loader(__name__, _HOMES, globals())
