"""The real vLLM's tests are skipped where it is not installed, and fail there when `make test-vllm` asks for them."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.vllm.tiny_model import TEMPLATE, make

if TYPE_CHECKING:
    from tests.engines.vllm.real.servers import Servers

_HERE = Path(__file__).parent
_IS_INSTALLED = importlib.util.find_spec("vllm") is not None
# Before vLLM and its clients are imported, which read them once.
os.environ.update(
    HF_DATASETS_OFFLINE="1",
    HF_HUB_OFFLINE="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # else all engines of a machine compute on the same core
    VLLM_NO_USAGE_STATS="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; warnings are vLLM's own."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            for mark in (pytest.mark.vllm, pytest.mark.filterwarnings("default")):
                item.add_marker(mark)


@pytest.fixture(autouse=True, scope="session")
def is_installed() -> None:
    """Skip without vLLM, or fail where it is required."""
    if _IS_INSTALLED:
        return
    if os.environ.get("TOKENBUS_NEEDS_VLLM"):
        pytest.fail("vLLM is not installed: see requirements/vllm.txt")
    pytest.skip("vLLM is not installed; `make test-vllm` has it")


@pytest.fixture(scope="session")
def model(is_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001 - it comes first
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def servers(is_installed: None, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":  # noqa: ARG001 - first
    """Run vLLM's own server and ours, with one model that has a chat template."""
    from tests.engines.vllm.real.servers import CONTEXT, running  # noqa: PLC0415 - only where they are run

    with running(make(tmp_path_factory.mktemp("models") / "tiny", context=CONTEXT, template=TEMPLATE)) as both:
        yield both
