"""The gateway's OpenAPI document holds for whatever may be sent: made-up requests, right ones and wrong ones."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig

from tests.support.campaigns import IS_SOAK, many
from tests.system.serving import Served, served

pytestmark = pytest.mark.xdist_group("gateway")
POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/inference/v1/generate", "/inspect", "/tokenize", "/detokenize"),
)
# A body that is wrong may be too large first, which the checks do not take for a refusal.
CONFIG = SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": ["4xx", "5xx"]}}})
GETS = (
    "/v1/models",
    "/healthz",
    "/readyz",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/bus",
)


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """Run a system whose answers are short: the document's own bounds see to that, and the model's context."""
    with served(gateway__tokenizer="ngram", gateway__max_tokens=12, gateway__max_prompt_tokens=200) as system:
        system.start_worker("worker-0", "--engine", "ngram", "--steps-per-second", "0", "--context", "220")
        yield system


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
        *(("GET", path, GenerationMode.POSITIVE) for path in GETS),
    ],
)
def test_made_up_requests_get_what_the_document_says(
    small: Served, method: str, path: str, mode: GenerationMode
) -> None:
    document = schemathesis.openapi.from_url(f"{small.url}/openapi.json", config=CONFIG)
    cases = document[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=many(250, 25),
        derandomize=not IS_SOAK,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(cases)
    def hold(case: "Case[Any]") -> None:
        # What holds between two fields, as that drafts come only with logprobs, no schema says: that may be refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    hold()
