"""docs/training.md as it is: its loop, and TRL's asynchronous GRPO, whose weights go back after every step."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

import tokenbus
from tests.engines.vllm.real.hosts import Host, apart
from tests.engines.vllm.real.runs import SHARED, WHOLE, arguments
from tests.engines.vllm.real.servers import deployed
from tests.engines.vllm.tiny_model import make
from tests.pages import blocks, module_of
from tests.support.waiting import until
from tests.system.deployment import COMMAND

LOOP, AGENT, TRANSFER, TRAINER = blocks("python", of="docs/training.md")
RUNS = range(16)
STEPS = 10
CONTEXT = 512


def test_loop_on_the_page_trains(model: Path) -> None:
    """The reward rises; each batch is of the newest weights, by which the trainer's logprobs are the engine's."""
    assert sum(bool(line.strip()) for line in LOOP.text.splitlines()) <= 50
    with deployed() as deployment:
        deployment.start_processor(gateway__control=True)
        options = arguments({**WHOLE, "token_scores": True})
        command = [COMMAND, "worker", "--engine", "vllm", "--model", str(model), "--", *options]
        deployment.start("worker", command).wait_for('"connected"')
        printed = apart(looped, model, str(deployment.overrides["bus.clients_address"]))
    words = [line.split() for line in printed.splitlines() if " reward " in line]
    assert [each[:3] for each in words] == [
        [str(step), str(update), f"{{{step}}}"] for step in range(8) for update in range(2)
    ]
    rewards, least, most = (np.array([float(each[place]) for each in words]) for place in (4, 6, 7))
    assert rewards[-4:].mean() > rewards[0] + 0.15, rewards
    assert least[::2] == pytest.approx(1, abs=1e-3)
    assert most[::2] == pytest.approx(1, abs=1e-3)
    assert least[1::2].max() < 1 < most[1::2].min()


def looped(model: Path, clients_address: str) -> str:
    os.environ.pop("TOKENBUS_NEEDS_VLLM", None)  # of the tests, and no setting
    os.environ["TOKENBUS_BUS_CLIENTS_ADDRESS"] = clients_address
    loop: Any = module_of(LOOP, "loop")
    loop.MODEL = model
    with redirect_stdout(StringIO()) as printed:
        loop.main()
    return printed.getvalue()


def test_agent_on_the_page_is_trained_from_its_sessions(model: Path, tmp_path: Path) -> None:
    """Each session is one complete branch, and the trainer's logprobs are the recorded ones."""
    assert sum(bool(line.strip()) for line in AGENT.text.splitlines()) <= 45
    with deployed() as deployment:
        deployment.start_processor()
        command = [COMMAND, "worker", "--engine", "vllm", "--model", str(model), "--", *arguments(WHOLE)]
        deployment.start("worker", command).wait_for('"connected"')
        recording = tmp_path / "rollout.tokenbus"
        address = str(deployment.overrides["bus.clients_address"])
        recorder = deployment.start("record", [COMMAND, "record", str(recording), "--clients-address", address])
        recorder.wait_for('"connected"')
        rewards = apart(rolled_out, address)
        asyncio.run(until(lambda: recording.exists() and is_whole(recording)))
        recorder.terminate()
        printed = apart(trained_from, model, recording, rewards, tmp_path)
    lines = printed.splitlines()
    assert sorted(lines[::2]) == sorted(f"run-{run} complete" for run in RUNS)
    words = [line.split() for line in lines[1::2]]
    assert [each[0] for each in words] == ["24"] * len(RUNS)
    assert [float(value) for each in words for value in each[3:]] == pytest.approx([1.0] * 2 * len(RUNS), abs=1e-3)
    assert (tmp_path / "next" / "config.json").is_file()


def is_whole(recording: Path) -> bool:
    with suppress(tokenbus.RecordingError):  # an item is only half written yet
        return sum(session.is_complete for session in tokenbus.read_sessions(recording)) == len(RUNS)
    return False


def rolled_out(clients_address: str) -> dict[str, float]:
    os.environ.pop("TOKENBUS_NEEDS_VLLM", None)
    os.environ["TOKENBUS_BUS_CLIENTS_ADDRESS"] = clients_address
    module: Any = module_of(AGENT, "agent")
    return asyncio.run(module.roll_out())


def trained_from(model: Path, recording: Path, rewards: dict[str, float], folder: Path) -> str:
    os.environ.pop("TOKENBUS_NEEDS_VLLM", None)
    os.chdir(folder)
    module: Any = module_of(AGENT, "agent")
    module.MODEL, module.RECORDING = model, recording
    with redirect_stdout(StringIO()) as printed:
        module.train(rewards)
    return printed.getvalue()


def attention(query: Any, key: Any, value: Any, ends: Any, key_ends: Any, *_: int, **options: Any) -> Any:  # noqa: ANN401
    """Do on a CPU what the kernel does that TRL takes from a hub, for cards alone: each segment sees its path."""
    import torch

    assert options["causal"]
    assert options["window_size"] == (-1, -1)
    parts = []
    for (begin, end), (first, last) in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        seen = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
        heads = (each.transpose(0, 1) for each in (query[begin:end], key[first:last], value[first:last]))
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True
        )
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


def share_of_even(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [float(np.mean([token % 2 == 0 for token in ids])) for ids in completion_ids]


class Trained(NamedTuple):
    """What TRL said of each step, and what went over the bus meanwhile."""

    steps: Sequence[Mapping[str, float]]
    tokens: Sequence[tuple[int, int, int]]
    """Each with its request and the version of the weights, in the order in which they were published."""
    weight_info: Mapping[str, Any]


def train(url: str, folder: Path) -> list[Mapping[str, float]]:
    import torch
    from datasets import Dataset  # noqa: PLC0415
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: PLC0415

    kernels = ModuleType("kernels")
    kernels.__dict__["get_kernel"] = lambda *_, **__: SimpleNamespace(flash_attn_varlen_func=attention)
    sys.modules["kernels"] = kernels
    torch.cuda.get_device_name = lambda *_: "none"
    prompts = [[{"role": "user", "content": text}] for text in ("the cat", "a mat", "the bus", "words")]
    names: dict[str, Any] = {
        "AsyncGRPOConfig": partial(
            AsyncGRPOConfig, max_steps=STEPS, learning_rate=2e-4, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=16, max_staleness=1, bf16=False, use_cpu=True, gradient_checkpointing=False,
            report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        "AsyncGRPOTrainer": AsyncGRPOTrainer,
        "FolderTransfer": module_of(TRANSFER, "transfer").FolderTransfer,
        "Path": Path,
        "prompts": Dataset.from_dict({"prompt": prompts}),
        "reward": share_of_even,
    }  # fmt: skip
    text = TRAINER.text.replace("Qwen/Qwen2.5-0.5B", f"{folder}/tiny").replace("http://127.0.0.1:8000", url)
    exec(text.replace("/shared", str(folder)).replace('"out"', f'"{folder}/out"'), names)  # noqa: S102 - our own page
    names["trainer"].train()
    return [step for step in names["trainer"].state.log_history if "reward" in step]


@pytest.fixture(scope="module")
def trained(host: Host) -> Iterator[Trained]:
    from trl.chat_template_utils import qwen2_5_chat_template  # noqa: PLC0415 - only where vLLM is

    with deployed() as deployment:
        folder = deployment.folder
        (folder / "weights").mkdir()
        model = host(partial(make, context=CONTEXT, template=qwen2_5_chat_template), folder / "tiny")
        options = {**SHARED, "dtype": "float32", "max_model_len": CONTEXT, "max_num_batched_tokens": 2 * CONTEXT}
        options["served_model_name"] = str(model)
        up = [COMMAND, "up", "--engine", "vllm", "--model", str(model), "--json", "--set", "gateway.control=true"]
        event = json.loads(deployment.start("up", [*up, "--", *arguments(options)]).wait_for('"event": "up"'))
        to_bus = ["--clients-address", event["clients_address"]]
        recorder = deployment.start("record", [COMMAND, "record", str(folder / "steps"), *to_bus])
        steps = apart(train, event["gateway"], folder)
        recorder.terminate()
        batches = [item.batch for item in tokenbus.read_recording(folder / "steps") if item.batch is not None]
        tokens = [
            (row.request_id, batch.header.weight_version, token)
            for batch in batches
            for row in batch.rows()
            for token in row.token_ids.tolist()
        ]
        yield Trained(steps, tokens, httpx.get(f"{event['gateway']}/weight_info").json())


@pytest.mark.weekly
def test_trl_has_the_logprobs_that_it_computes_itself(trained: Trained) -> None:
    """Of the first step, which is trained on what its own weights sampled."""
    assert len(trained.steps) == STEPS
    assert trained.steps[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert trained.steps[0]["kl"] < 1e-6


@pytest.mark.weekly
def test_tokens_name_the_weights_that_trl_sent(trained: Trained) -> None:
    """Versions only rise, up to the last one that it sent; some requests live through an update."""
    versions = [version for _, version, _ in trained.tokens]
    assert versions == sorted(versions)
    assert versions[0] == 1
    assert versions[-1] >= STEPS
    assert trained.weight_info["weight_version"] == str(STEPS + 1)
    of_requests: dict[int, set[int]] = {}
    for request, version, _ in trained.tokens:
        of_requests.setdefault(request, set()).add(version)
    assert max(map(len, of_requests.values())) > 1
    first, last = (
        [token for _, version, token in trained.tokens if version in some] for some in ((1,), (STEPS, STEPS + 1))
    )
    assert share_of_even([last])[0] > share_of_even([first])[0] + 0.1
