"""Compiles the package's CUDA source for the card in use, once for each user and type of card.

Compiled kernels are cached for each user, in one file for each source, compiler and card.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from tokenbus_gpu_ops.cuda.driver import core
from tokenbus_gpu_ops.errors import GpuUnavailableError

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
SOURCE = "logprobs.cu"
NAME = "token_logprobs"
OLDEST_CARD = (8, 0)
VARIABLE = "TOKENBUS_CACHE_DIR"
_MACROS = {"bfloat16": "LOGITS_BF16", "float16": "LOGITS_F16", "float32": "LOGITS_F32"}


def macros_of(dtype: str, *, with_alternatives: bool, with_extras: bool = False) -> list[str]:
    """Return the macros of the kernel for one type of logits. A kernel for extra scores also finds alternatives."""
    alternatives = ["WITH_ALTERNATIVES"] if with_alternatives or with_extras else []
    return [_MACROS[dtype], *alternatives, *(["WITH_EXTRAS"] if with_extras else [])]


def source() -> str:
    """Return the kernel's source. Each header is inlined once."""
    return _written_out(SOURCE, set())


def kernel(
    device: Any,  # noqa: ANN401 - the types of cuda-core
    dtype: str,
    *,
    with_alternatives: bool,
    with_extras: bool = False,
) -> Any:  # noqa: ANN401
    """Return the kernel for a card, cached or newly compiled, or raise GpuUnavailableError."""
    capability = tuple(device.compute_capability)
    if capability < OLDEST_CARD:
        wanted = ".".join(map(str, OLDEST_CARD))
        raise GpuUnavailableError(
            f"{device.name} has compute capability {'.'.join(map(str, capability))}, and {wanted} or newer is needed; "
            "pass cpu_fallback=True to compute on the CPU"
        )
    macros = macros_of(dtype, with_alternatives=with_alternatives, with_extras=with_extras)
    architecture = f"sm_{device.arch}"
    text = source()
    name = f"{'-'.join([NAME, *macros]).lower()}-{architecture}-{key_of(text, *macros, architecture, _compiler())}"
    code = load(name)
    if code is None:
        code = compiled(text, macros, architecture)
        keep(name, code)
    return core().ObjectCode.from_cubin(code).get_kernel(NAME)


def compiled(text: str, macros: list[str], architecture: str) -> bytes:
    """Compile the machine code for one architecture."""
    module = core()
    options = module.ProgramOptions(std="c++17", arch=architecture, define_macro=macros)
    try:
        program = module.Program(text, "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as error:
        # cuda-core raises different errors for a missing library and for a source that it cannot compile.
        raise GpuUnavailableError(
            f"the kernel for {architecture} could not be compiled: {error}; "
            "install tokenbus[gpu], or pass cpu_fallback=True to compute on the CPU"
        ) from error


def _compiler() -> str:
    module = core()
    try:
        from cuda.bindings import nvrtc

        version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    except (ImportError, RuntimeError, OSError) as error:
        raise GpuUnavailableError(f"NVRTC, CUDA's run-time compiler, is missing: {error}") from None
    return f"cuda-core {module.__version__}, NVRTC {version}"


def _written_out(name: str, seen: set[str]) -> str:
    seen.add(name)
    lines = []
    for line in (KERNELS / name).read_text().splitlines():
        included = line.removeprefix('#include "').removesuffix('"') if line.startswith('#include "') else None
        if included is None:
            lines.append("" if line == "#pragma once" else line)
        elif included not in seen:
            lines.append(_written_out(included, seen))
    return "\n".join(lines)


def folder() -> Path:
    """Return the folder of compiled kernels. The folder may not exist yet."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "tokenbus" / "kernels"


def key_of(*parts: str | bytes) -> str:
    """Return a hash of all inputs of a compilation, as the name of the compiled kernel."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def load(name: str) -> bytes | None:
    """Return a cached kernel, or None if it is missing or incomplete."""
    try:
        data = (folder() / name).read_bytes()
    except OSError:
        return None
    digest, kernel = data[:32], data[32:]
    return kernel if hashlib.sha256(kernel).digest() == digest else None


def keep(name: str, kernel: bytes) -> None:
    """Cache a kernel for the next process. After a failure, the next process compiles the kernel again."""
    with contextlib.suppress(OSError):
        where = folder()
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(kernel).digest() + kernel)
            Path(temporary).replace(where / name)  # atomic, so other processes see no partial file
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
