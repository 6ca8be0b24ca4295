"""Replaces FastDeploy's ops in a newly loaded module. `fastdeploy_switch` calls this module."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from types import ModuleType

from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.forms import installed
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy_switch import SWITCH
from tokenbus.logs import logger

_STATIC = "static_op_"
"""Prefix of the name of a static-graph op. FastDeploy may wrap such an op in an op without the prefix."""
_OF_THE_QUEUE = re.compile("(save|get)_output|save_first_token")
_OTHERS = {"get_output_kv_signal", "speculate_get_output_padding_offset"}
"""Ops that do not use the queue, although they are named like the queue's ops."""
_log = logger("worker")


def replace_ops(name: str) -> None:
    """Replace a module's save and get ops with ours. Importing any other op of the queue then raises ImportError.

    If only one op of a pair were replaced, every token would be lost. So if a module lacks a pair of save and get ops,
    because the ops were not compiled, importing any op of the queue raises ImportError with the reason.
    """
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):  # FastDeploy may insert an object whose attributes are all None
        fault = f"{SWITCH}: on needs a module {name}, got {type(module).__name__}"
        raise ImportError(fault, name=name)  # noqa: TRY004 - an import fails
    found = vars(module)
    ops = [op for op in fastdeploy.OPS if found.get(op) is not None]
    refused = {
        op: f"{SWITCH}: on replaces {len(ops)} ops of {name}, but Tokenbus has none to replace {op}"
        for op, value in found.items()
        if callable(value) and _is_of_the_queue(op)
    }
    if any("save_output" in op and op.replace("save", "get") in ops for op in ops):
        PROCESS.is_xpu = name.endswith(".xpu")
        for names in map(vars, (module, *_submodules(name))):
            for op in ops:
                names.update(dict.fromkeys({op, f"{_STATIC}{op}"} & names.keys(), getattr(fastdeploy, op)))
        engine = installed()
        version = engine.version if engine else "unknown"
        with _shown():
            _log.info(
                "FastDeploy's ops replaced", module=name, ops=len(ops), fastdeploy=version, form=PROCESS.form.name
            )
    else:
        missing = (
            f"{SWITCH}: on needs save_output and get_output, or another such pair, in {name} "
            f"({getattr(module, '__file__', None)}), got {', '.join(ops) or 'none: were its ops compiled?'}"
        )
        refused |= dict.fromkeys(fastdeploy.OPS, missing)
    _refuse(module, refused)
    for each in _submodules(name):
        _refuse(each, {op: reason for op, reason in refused.items() if op in vars(each)})


def _submodules(name: str) -> list[ModuleType]:
    """Return a module's loaded submodules. FastDeploy may load its compiled ops from a submodule."""
    below: list[object] = [module for other, module in list(sys.modules.items()) if other.startswith(f"{name}.")]
    return [module for module in below if isinstance(module, ModuleType)]


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show Tokenbus's log lines in this block, regardless of the engine's logging configuration."""
    ours = logging.getLogger("tokenbus")
    level, handler = ours.level, logging.NullHandler() if ours.hasHandlers() else logging.StreamHandler()
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


def _is_of_the_queue(op: str) -> bool:
    """Return whether an op uses FastDeploy's queue, but is not among the ops that Tokenbus replaces."""
    plain = op.removeprefix(_STATIC)
    return bool(_OF_THE_QUEUE.search(plain)) and plain not in {*fastdeploy.OPS, *_OTHERS}


def _refuse(module: ModuleType, refused: dict[str, str]) -> None:
    """Remove ops from a module. Importing a removed op raises ImportError with the op's reason."""
    found = vars(module)
    own = found.get("__getattr__")

    def missing(name: str) -> object:
        if name in refused:
            raise ImportError(refused[name], name=module.__name__)
        if own is not None:
            return own(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    for op in refused:
        found.pop(op, None)
    if refused:
        found["__getattr__"] = missing
