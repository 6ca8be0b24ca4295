"""The gateway's OpenAPI document holds for whatever may be sent: made-up requests, right ones and wrong ones."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema

from tests.support.campaigns import IS_SOAK, many
from tests.support.waiting import MOST
from tests.system.bytewise import serving
from tests.system.deployment import Deployment
from tokenbus.engines.ngram import NgramEngine, NgramOptions

pytestmark = pytest.mark.xdist_group("gateway")
POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/inference/v1/generate", "/inspect", "/tokenize", "/detokenize"),
)
GETS = ("/v1/models", "/healthz", "/readyz", "/health", "/ping", "/version", "/load", "/bus")
# A body that is wrong may be too large first, which the checks do not take for a refusal.
CONFIG = SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": ["4xx", "5xx"]}}})


@pytest.fixture(scope="module")
def document() -> Iterator[BaseSchema]:
    url: Future[str] = Future()
    over = threading.Event()

    async def run() -> None:
        with TemporaryDirectory(prefix="tb") as folder:
            short = {"gateway__tokenizer": "ngram", "gateway__max_tokens": 12, "gateway__max_prompt_tokens": 200}
            engine = NgramEngine(NgramOptions(context=220))
            async with serving(Deployment(Path(folder)), engine, **short) as served:
                url.set_result(served.url)
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield schemathesis.openapi.from_url(f"{url.result(MOST)}/openapi.json", config=CONFIG)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("path", POSTS)
def test_made_up_requests_get_what_the_document_says(document: BaseSchema, path: str) -> None:
    for mode in GenerationMode:
        _hold(document, path, "POST", mode, many(250, 2 if path.endswith("batch") else 8))


def test_answers_without_a_body_are_what_the_document_says(document: BaseSchema) -> None:
    for path in GETS:
        _hold(document, path, "GET", GenerationMode.POSITIVE, 1)


def _hold(document: BaseSchema, path: str, method: str, mode: GenerationMode, count: int) -> None:
    @settings(
        max_examples=count,
        derandomize=not IS_SOAK,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(document[path][method].as_strategy(generation_mode=mode))
    def hold(case: "Case[Any]") -> None:
        # What holds between two fields, as that drafts come only with logprobs, no schema says: that may be refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    hold()
