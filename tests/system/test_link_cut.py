"""Links that break between machines, through a proxy."""

from tests.support.proxy import Proxy
from tests.support.waiting import until
from tests.system.asking import all_exact, ask, begun
from tests.system.deployment import Deployment
from tests.system.inprocess import TCP, working
from tokenbus.client import Client
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.processor import Processor


async def test_connections_that_break_lose_nothing(deployment: Deployment) -> None:
    """Connections of a worker and of a client are reset again and again, and refused for a while: no token is lost.

    A step comes in six messages, so that most breaks are in the middle of one.
    """
    async with (
        Processor(deployment.settings(**TCP, processor__drain_timeout_ms=0)) as processor,
        Proxy(processor.workers_address) as workers,
        Proxy(processor.clients_address) as clients,
        working(deployment, SyntheticEngine(drafts=True, parts=3), bus__workers_address=workers.address),
        Client(deployment.settings(bus__clients_address=clients.address, client__drain_timeout_ms=0)) as client,
    ):
        asked = ask(client, 4, 1200)
        await begun(asked)
        for proxy in (workers, clients) * 2:
            proxy.cut()
            passed = proxy.passed
            proxy.restore()
            await until(lambda: proxy.passed > passed + 5000 or asked[-1].task.done())  # noqa: B023 - awaited here
        await all_exact(asked, 1200)
