"""vLLM's own API server, whose core is forked, as on a card, and so has the imports."""

import multiprocessing
import runpy
from functools import partial

if __name__ == "__main__":
    from vllm.v1.engine import utils

    utils.get_mp_context = partial(multiprocessing.get_context, "fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
