"""A package laid out like FastDeploy, without a model: its imports, its ops and the processes that it starts.

Its engine starts its workers through a shell, with protobuf's implementation in pure Python, and runs its token
processor in a thread: of its own process, or of one that multiprocessing started. Its own ops say so on stdout.
"""

import textwrap
from collections.abc import Iterable
from pathlib import Path

OPS = (
    *("get_output", "get_output_ep", "get_output_topk", "mtp_save_first_token", "save_output", "save_output_topk"),
    *("speculate_get_output", "speculate_get_output_topk", "speculate_save_output", "speculate_save_output_topk"),
)
"""The ops of FastDeploy's queue that its releases have in common."""
_OTHERS = ("save_output_dynamic", "get_output_dynamic", "get_output_kv_signal", "get_padding_offset")
"""Others that are compiled beside them."""
_FILES = {
    "__init__.py": """
        import logging

        logging.basicConfig(level=logging.INFO)  # as it configures the root logger before anything else
        """,
    "import_ops.py": """
        import functools
        import importlib
        import inspect
        import logging


        def import_custom_ops(package, module_name, global_ns):
            try:
                compiled = importlib.import_module(module_name, package=package)
            except Exception as error:
                logging.warning(f"{package} has no ops, it may be not compiled. {error}")
                return
            for name, op in inspect.getmembers(compiled):
                if not name.startswith("__"):
                    global_ns[name] = op
            for static in [name for name in global_ns if name.startswith("static_op_")]:
                name = static.removeprefix("static_op_")
                compiled = global_ns.get(name)
                global_ns[name] = unified(compiled, global_ns[static]) if compiled else global_ns[static]


        def unified(compiled, static):
            @functools.wraps(static)
            def op(*arguments):
                return compiled(*arguments)

            return op
        """,
    "model_executor/__init__.py": "",
    "model_executor/ops/__init__.py": "",
    "model_executor/ops/cute_dsl_ops/__init__.py": "",
    "model_executor/ops/triton_ops/__init__.py": "",
    "model_executor/ops/PLATFORM/__init__.py": """
        from fastdeploy.import_ops import import_custom_ops

        import_custom_ops("fastdeploy.model_executor.ops.PLATFORM", ".fastdeploy_ops", globals())
        """,
    "model_executor/pre_and_post_process.py": """
        import numpy as np

        from fastdeploy.model_executor.ops.PLATFORM import get_padding_offset, save_output, save_output_topk


        def post_process(step, is_last):
            preempted = np.zeros([4, 1], np.int32)
            tokens = np.arange(4 * step, 4 * step + 4).reshape(4, 1)
            save_output(tokens, np.array([not is_last]), preempted, 0, False)
        """,
    "output/__init__.py": "",
    "output/token_processor.py": """
        import numpy as np


        def process_sampling_results(got):
            from fastdeploy.model_executor.ops.PLATFORM import get_output, get_output_ep, get_output_topk

            tokens = np.full([514, 1], -2, np.int64)
            while tokens[0, 0] >= 0 or tokens[0, 0] == -2:
                get_output(tokens, 0, True)
                if tokens[0, 0] != -2:
                    got += tokens[2 : 2 + tokens[1, 0], 0].tolist()
        """,
    "worker/__init__.py": "",
    "worker/worker_process.py": """
        import sys

        from fastdeploy.model_executor.pre_and_post_process import post_process

        steps = int(sys.argv[1])
        for step in range(steps):
            post_process(step, step == steps - 1)
        """,
    "engine/__init__.py": "",
    "engine/common_engine.py": """
        import os
        import subprocess
        import sys
        import threading

        from fastdeploy.output.token_processor import process_sampling_results


        def serve(steps):
            got = []
            processor = threading.Thread(target=process_sampling_results, args=(got,))
            processor.start()
            worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../worker/worker_process.py")
            command = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python OMP_NUM_THREADS=3 "
            command += f"{sys.executable} -u {worker} {steps} 2>launch_worker.log"
            launched = subprocess.run(command, stdout=subprocess.PIPE, shell=True, preexec_fn=os.setsid, text=True)
            if launched.returncode:
                print("worker failed", flush=True)
                os._exit(1)
            processor.join()
            print(f"{launched.stdout}tokens {got}", flush=True)
        """,
    "entrypoints/__init__.py": "",
    "entrypoints/api_server.py": """
        import multiprocessing
        import signal
        import sys

        from fastdeploy.engine.common_engine import serve

        if __name__ == "__main__":
            how, steps, status = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
            if how == "wait":
                print("ready", flush=True)
                signal.sigwait([signal.SIGUSR1])
            if how == "thread":
                serve(steps)
            else:
                engine = multiprocessing.get_context(how).Process(target=serve, args=(steps,))
                engine.start()
                engine.join()
                status = status or engine.exitcode
            sys.exit(status)
        """,
}


def install(folder: Path, version: str = "2.6.0", platform: str = "gpu", ops: Iterable[str] = OPS) -> None:
    """Write the package into a folder, in the place of what is there; without ops, as where they were not compiled."""
    package = folder / "fastdeploy"
    for name, text in _FILES.items():
        path = package / name.replace("PLATFORM", platform)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace("PLATFORM", platform).lstrip("\n"))
    (package / "version.txt").write_text(f"fastdeploy GIT COMMIT ID: 0\nfastdeploy version: {version}\n")
    compiled = package / "model_executor" / "ops" / platform / "fastdeploy_ops.py"
    compiled.unlink(missing_ok=True)
    if names := tuple(ops):
        compiled.write_text("\n\n".join(map(_own, (*names, *_OTHERS, "static_op_save_output"))))


def _own(op: str) -> str:
    """Return an op of FastDeploy's own: it says its name, and a get has one slot with token 7, and no more to come."""
    gets = "\n    arguments[0][:3, 0] = -1, 1, 7" if "get_output" in op else ""
    return f"def {op}(*arguments):\n    print('own {op}', flush=True){gets}\n"
