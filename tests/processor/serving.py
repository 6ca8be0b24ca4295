"""What the client tests share: a worker with requests, their client, and the frames that the client received."""

from typing import Any

from tests.in_process.bench import Bench, BenchClient, BenchWorker
from tests.in_process.builders import generate_of
from tokenbus_contracts.generated.client_pb2 import ClientFrame, Resume

SERVED = {"clients.detached_timeout_ms": 10_000}


def serving(*keys: int, **overrides: object) -> tuple[Bench, BenchWorker, BenchClient]:
    bench = Bench(SERVED | {name.replace("__", "."): value for name, value in overrides.items()})
    worker, client = bench.worker(), bench.client()
    for key in keys:
        client.ask(generate_of(key))
    return bench, worker, client


def places(client: BenchClient) -> list[tuple[int, int, int]]:
    found = [row for heard in client.outputs() for row in heard.batches[0].rows()]
    return [(row.request_id, row.position, row.token_ids.size) for row in found]


def resume(client: BenchClient, key: int, position: int, **fields: Any) -> None:  # noqa: ANN401 - as the message has them
    client.say(ClientFrame(resume=Resume(request_id=key, next_position=position, **fields)))
