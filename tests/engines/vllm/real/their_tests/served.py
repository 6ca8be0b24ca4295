"""A plugin of the pytest that runs vLLM's own HTTP tests: their fixture starts vLLM's server, or ours."""

import gc
import inspect
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

KIND, OUTCOMES = "SERVED_BY", "OUTCOMES_IN"
"""Variables that say which server is tested, and where the tests' outcomes are written."""
_FIRST = ["--max-num-batched-tokens", "16384"]
"""On a CPU vLLM itself fails where it splits a seeded request's prompt."""
_LAST = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 26)]
_PRELOADED = ["served", "tokenbus.cli.worker", "tokenbus.cli.gateway", "tokenbus.cli.processor"]
_PRELOADED += ["vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker"]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(_PRELOADED)
# For errors that come from another process, which no test here needs.
sys.modules.setdefault("tblib", SimpleNamespace(pickling_support=SimpleNamespace(install=bool)))  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that ask a server, and give the fixture's server our start and our end."""
    utils = import_module("tests.utils")  # vLLM's, not ours
    for remote in (utils.RemoteOpenAIServer, utils.RemoteLaunchRenderServer):
        remote._pre_download_model = lambda *_: None
        remote._start_server = _start
        remote._poll = lambda self: self.proc.exitcode
        remote._terminate_process_tree = _end
    for item in items:
        if isinstance(item, pytest.Function) and item.nodeid.startswith("tests/entrypoints/rl/"):
            item.module.server = _rl_server  # where they start vLLM's server by its command
    items[:] = [each for each in items if isinstance(each, pytest.Function) and _asks(each)]
    gc.freeze()  # they collect garbage after each test


def _asks(test: pytest.Function) -> bool:
    is_given = any(re.search("server|client", name) for name in test.fixturenames)
    return is_given or "RemoteOpenAIServer" in inspect.getsource(test.function)


@contextmanager
def _rl_server(extra_args: Sequence[str] = ()) -> Iterator[str]:
    """Yield the URL of a server as their reinforcement learning's tests want it, but for sleep, which no CPU has."""
    conftest, utils = import_module("tests.entrypoints.rl.conftest"), import_module("tests.utils")
    arguments = ["--max-model-len", "2048", "--served-model-name", "m", *extra_args]
    chosen = "VLLM_USE_V2_MODEL_RUNNER"
    environment = {"VLLM_SERVER_DEV_MODE": "1", chosen: os.environ[chosen]}
    with utils.RemoteOpenAIServer(conftest.MODEL_NAME, arguments, env_dict=environment) as server:
        yield server.url_root


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Write how a test ended, also where its fixture failed."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ[OUTCOMES]).open("a") as file:
            file.write(f"{report.outcome} {item.nodeid}\n")
    return report


def _start(
    server: Any,  # noqa: ANN401 - vLLM's
    model: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
) -> None:
    named = [] if "--served-model-name" in arguments else ["--served-model-name", model]
    given = [*_FIRST, *arguments, *named, *_LAST]
    server.sockets = tempfile.mkdtemp(prefix="tb-")
    server.proc = _processes.Process(target=_run, args=(server.sockets, _folder_of(model), given, environment or {}))
    server.proc.start()


def _end(server: Any) -> None:  # noqa: ANN401 - vLLM's
    with suppress(ProcessLookupError):
        os.killpg(server.proc.pid, signal.SIGKILL)
    server.proc.join()
    shutil.rmtree(server.sockets)


def _folder_of(model: str) -> str:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where vLLM is

    return model if Path(model).is_dir() else snapshot_download(model)


def _run(sockets: str, model: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    if os.environ[KIND] == "vllm":
        _serve_theirs(model, arguments)
    else:
        _serve_ours(Path(sockets), Path(model), arguments)


def _serve_theirs(model: str, arguments: list[str]) -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    # Its processes have the imports.
    utils.get_mp_context = multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    sys.argv = ["vllm", "--model", model, *arguments, "--enable-scale-out"]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _serve_ours(folder: Path, model: Path, arguments: list[str]) -> None:
    from tokenbus.gateway.api_keys import digest, made, write_keys  # noqa: PLC0415 - in the process that it is for

    options = dict(_grouped(arguments))
    settings = {
        "bus.workers_address": f"ipc://{folder}/w",
        "bus.clients_address": f"ipc://{folder}/c",
        "bus.heartbeat_timeout_ms": 20_000,
        "processor.metrics_address": "",
        "gateway.control": True,
        "gateway.address": f"{options.get('--host', ['127.0.0.1'])[0]}:{options['--port'][0]}",
        "gateway.tool_call_parser": options.get("--tool-call-parser", [""])[0],
        "gateway.tls_certificate": options.get("--ssl-certfile", [""])[0],
        "gateway.tls_key": options.get("--ssl-keyfile", [""])[0],
        "gateway.request_id_headers": "--enable-request-id-headers" in options,
        "gateway.return_tokens_as_token_ids": "--return-tokens-as-token-ids" in options,
        "gateway.force_include_usage": "--enable-force-include-usage" in options,
        "gateway.tokenizer": _with_template(model, folder, options.get("--chat-template", [""])[0]),
    }
    if key := options.get("--api-key", [os.environ.get("VLLM_API_KEY", "")])[0]:
        settings["gateway.keys_file"] = folder / "keys.json"
        write_keys(folder / "keys.json", [replace(made("theirs")[1], sha256=digest(key))])
    given = [
        part
        for key, value in settings.items()
        for part in ("--set", f"{key}={value}".replace("=True", "=true").replace("=False", "=false"))
    ]
    worker = ["--engine", "vllm", "--model", str(model), *given, "--", *_of_engine(arguments), "--token-scores"]
    for command in (["processor", *given], ["worker", *worker], ["gateway", *given]):
        if os.fork() == 0:
            from tokenbus.cli import main  # noqa: PLC0415 - in the process that it is for

            sys.exit(main(command))
    os.wait()
    os.killpg(0, signal.SIGKILL)  # their fixture waits for ever for a gateway without a worker


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [place for place, each in enumerate(arguments) if each.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(arguments)], strict=True):
        name, equals, value = arguments[start].partition("=")
        yield name.replace("_", "-"), [value] * bool(equals) + list(arguments[start + 1 : end])


def _of_engine(arguments: Sequence[str]) -> list[str]:
    """Return the options that a worker takes: those of vLLM's HTTP server are the gateway's business."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {*EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions, "--lora-modules"}
    return [part for name, values in _grouped(arguments) if name in known for part in (name, *values)]


def _with_template(model: Path, folder: Path, template: str) -> str:
    """Return the model's folder, or one of the same files with another chat template."""
    if not template:
        return str(model)
    copy = folder / "tokenizer"
    copy.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (copy / file.name).symlink_to(file)
    path = Path(template)
    (copy / "chat_template.jinja").write_text(path.read_text() if path.exists() else template)
    return str(copy)
