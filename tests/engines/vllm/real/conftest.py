"""The real vLLM's tests are skipped where it is not installed, and fail there when `make test-vllm` asks for them."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.vllm.real.hosts import EngineHost, Host
from tests.engines.vllm.real.runs import LORA, arguments
from tests.engines.vllm.tiny_model import TEMPLATE, make, make_adapter

if TYPE_CHECKING:
    from tests.engines.vllm.real.servers import Servers

_HERE = Path(__file__).parent
_IS_INSTALLED = importlib.util.find_spec("vllm") is not None
# Before vLLM and its clients are imported, which read them once.
os.environ.update(
    HF_DATASETS_OFFLINE="1",
    HF_HUB_OFFLINE="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    NUMBA_DISABLE_JIT="1",  # what drafts by n-grams would be compiled for seconds in each process
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
    TORCHDYNAMO_DISABLE="1",  # and so would a function of the sampler
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # else all engines of a machine compute on the same core
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # a model runs in the process that steps it
    VLLM_LOGGING_STREAM="ext://sys.stderr",
    VLLM_NO_USAGE_STATS="1",
)
if _IS_INSTALLED:
    os.environ["TESTS_PRELOADED"] = "vllm.entrypoints.openai.api_server vllm.entrypoints.llm vllm.v1.worker.cpu_worker"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; warnings are vLLM's own."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            for mark in (pytest.mark.vllm, pytest.mark.filterwarnings("default")):
                item.add_marker(mark)


@pytest.fixture(autouse=True, scope="session")
def is_installed() -> None:
    if _IS_INSTALLED:
        return
    if os.environ.get("TOKENBUS_NEEDS_VLLM"):
        pytest.fail("vLLM is not installed: see requirements/vllm.txt")
    pytest.skip("vLLM is not installed; `make test-vllm` has it")


@pytest.fixture(scope="session")
def host(is_installed: None) -> Iterator[Host]:  # noqa: ARG001 - it comes first
    with closing(Host()) as made:
        yield made


@pytest.fixture(scope="session")
def model(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host(make, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def adapters(host: Host, model: Path) -> list[Path]:
    return [host(make_adapter, model.parent / name, seed) for seed, name in enumerate(("ada", "bob"))]


@pytest.fixture(scope="session")
def engine_of(model: Path) -> Iterator[Callable[..., EngineHost]]:
    """Return the one engine of the session that has certain options of vLLM's."""
    with ExitStack() as stack:

        @cache
        def made(*given: str) -> EngineHost:
            return stack.enter_context(closing(EngineHost(model, given)))

        yield made


@pytest.fixture(scope="session")
def engine_with_adapters(engine_of: Callable[..., EngineHost], adapters: Sequence[Path]) -> EngineHost:
    ada, bob = adapters
    modules = ["--lora-modules", f"ada={ada}", f'{{"name": "bob", "path": "{bob}"}}']
    return engine_of(*arguments(LORA), *modules)


@pytest.fixture(scope="session")
def servers(host: Host, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":
    from tests.engines.vllm.real.servers import CONTEXT, running  # noqa: PLC0415 - only where they are run

    folder = tmp_path_factory.mktemp("models")
    model = host(partial(make, context=CONTEXT, template=TEMPLATE), folder / "tiny")
    with running(model, host(make_adapter, folder / "ada", 0)) as both:
        yield both
