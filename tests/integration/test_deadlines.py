"""A deadline with the processor killed: worker and client each end the request by themselves."""

from tests.integration.asking import Asked, begun, wanted
from tests.integration.deployment import Deployment
from tests.integration.inprocess import working
from tests.integration.test_stopped import LONG, SHORT
from tests.services.worker.looped import events
from tests.support.waiting import until
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_engines.synthetic import SyntheticEngine
from tokenbus_services.client import Client

DEADLINE = ErrorCode.ERROR_CODE_DEADLINE


async def test_deadline_comes_without_a_processor(deployment: Deployment) -> None:
    """After the processor was killed a request ends with `deadline` at its client, which counts, and in the engine."""
    processor = deployment.start_processor(**SHORT)
    engine = SyntheticEngine()
    async with (
        working(deployment, engine, **SHORT) as publisher,
        Client(deployment.settings(**SHORT, client__drain_timeout_ms=0)) as client,
    ):
        await until(lambda: publisher.session.handshakes and client.sessions[0].handshakes)
        generate = wanted(LONG)
        generate.deadline_ms = 4000
        asked = Asked(client.generate(generate))
        await begun([asked])
        processor.kill()
        audit = await asked.ended()
        assert audit.is_exact, audit
        assert audit.error is not None
        assert (audit.error.code, audit.error.emitted_tokens) == (DEADLINE, audit.position)
        await until(lambda: not engine.has_work)
        errors = [event.error for event in events(publisher) if event.HasField("error")]
        assert [(error.request_key, error.code) for error in errors] == [(asked.tokens.request_id, DEADLINE)]
