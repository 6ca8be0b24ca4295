"""The real vLLM's tests are skipped where it is not installed, and fail there when `make test-vllm` asks for them."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.engines.vllm.tiny_model import make

_HERE = Path(__file__).parent
_IS_INSTALLED = importlib.util.find_spec("vllm") is not None
# Before vLLM is imported, which reads them once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
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
