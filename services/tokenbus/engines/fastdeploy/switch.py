"""Replaces FastDeploy's ops in a module that has just been loaded; called by `fastdeploy_switch`."""

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
"""Prefix of an op for static graphs; FastDeploy may wrap that op under the plain name."""
_OF_THE_QUEUE = re.compile("(save|get)_output|save_first_token")
_OTHERS = {"get_output_kv_signal", "speculate_get_output_padding_offset"}
"""Ops with names like those of the queue that have nothing to do with it."""
_log = logger("worker")


def replace_ops(name: str) -> None:
    """Replace a module's save and get ops with ours; ops of the queue that we lack raise ImportError from now on.

    If one side were ours and the other FastDeploy's, every token would be lost. So a module without a pair of save and
    get ops (because the ops were not compiled) offers none of them: importing one raises ImportError with the reason.
    """
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):  # FastDeploy may put an object there of which every attribute is None
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
    """Return a module's submodules that are loaded: FastDeploy loads its compiled ops from one, and may import it."""
    below: list[object] = [module for other, module in list(sys.modules.items()) if other.startswith(f"{name}.")]
    return [module for module in below if isinstance(module, ModuleType)]


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Let Tokenbus's log lines appear in this block, however the engine has configured its own logging."""
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
    """Return whether an op uses FastDeploy's queue and has no counterpart here."""
    plain = op.removeprefix(_STATIC)
    return bool(_OF_THE_QUEUE.search(plain)) and plain not in {*fastdeploy.OPS, *_OTHERS}


def _refuse(module: ModuleType, refused: dict[str, str]) -> None:
    """Remove ops from a module; importing one raises ImportError with its reason."""
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
