"""The CUDA source: that it compiles, and agrees with the Python beside it. None of this needs a card."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus_gpu_ops import FaultReason, GpuUnavailableError
from tokenbus_gpu_ops.arguments import MAX_VOCABULARY
from tokenbus_gpu_ops.cuda import compile as compiling
from tokenbus_gpu_ops.cuda import launch
from tokenbus_gpu_ops.cuda.compile import KERNELS, SOURCE, kernel, macros_of, source
from tokenbus_gpu_ops.cuda.launch import _CALL_BYTES, _FEW, _PARTIAL_BYTES, _PLACE
from tokenbus_gpu_ops.extras import ITEM, MAX_MASK_BOUND, Sizes
from tokenbus_gpu_ops.plan import MAX_TOP_K

NVCC = shutil.which("nvcc")
KINDS = [
    ("bfloat16", True, True, "sm_90"),  # the largest
    *(
        pytest.param(*kind, marks=pytest.mark.nightly)
        for kind in (
            ("bfloat16", True, False, "sm_90"), ("bfloat16", False, False, "sm_90"),
            ("bfloat16", True, False, "sm_80"), ("float16", True, False, "sm_90"), ("float32", True, False, "sm_90"),
            ("bfloat16", True, True, "sm_80"), ("float16", True, True, "sm_90"), ("float32", True, True, "sm_90"),
        )
    ),
]  # fmt: skip


@pytest.mark.skipif(NVCC is None, reason="not run: nvcc, CUDA's compiler, is not installed here")
@pytest.mark.parametrize(("dtype", "with_alternatives", "with_extras", "architecture"), KINDS)
def test_every_kernel_compiles(
    dtype: str,
    with_alternatives: bool,  # noqa: FBT001
    with_extras: bool,  # noqa: FBT001
    architecture: str,
    tmp_path: Path,
) -> None:
    named = macros_of(dtype, with_alternatives=with_alternatives, with_extras=with_extras)
    macros = [f"-D{macro}" for macro in named]
    options = ["-std=c++17", "-cubin", f"-arch={architecture}", "-Werror", "all-warnings", "-Xptxas", "-v"]
    command = [str(NVCC), *options, *macros, "-o", str(tmp_path / "kernel.cubin"), str(KERNELS / SOURCE)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(re.findall(r"(\d+) bytes spill", run.stderr)) == {"0"}


def test_the_source_is_one_file_that_includes_nothing() -> None:
    text = source()
    assert "#include" not in text
    for header in KERNELS.glob("*.cuh"):
        first = next(
            line for line in header.read_text().splitlines() if line.startswith(("constexpr", "struct", "enum"))
        )
        assert text.count(first) == 1, header


def test_python_and_the_kernels_have_the_same_numbers() -> None:
    text = source()
    assert _number(text, r"CALL_BYTES = (\d+);") == _CALL_BYTES
    assert _number(text, r"THREADS_OF_BLOCK (\d+)") == launch.THREADS
    assert _number(text, r"MAX_STEPS = (\d+) / STEP") == launch.VECTORS_OF_GROUPS
    assert _number(text, r"FEW = (\d+);") == _FEW
    assert MAX_TOP_K < _FEW
    assert (_PLACE.itemsize, _PARTIAL_BYTES, ITEM.itemsize) == (32, 32, 32)
    assert _number(text, r"MOST_MASKED = (\d+);") == MAX_MASK_BOUND
    assert _number(text, r"EXTRA_COLUMNS = (\d+)") == len(Sizes._fields)
    most = launch.parts_of(1, MAX_VOCABULARY, 4, 1, with_alternatives=True)
    assert most <= _number(text, r"MAX_PARTS = (\d+);")
    for reason in FaultReason:
        assert _number(text, rf"{reason.name} = (\d+)") == reason


@pytest.mark.parametrize("rows", [1, 16, 100, 256, 5000])
@pytest.mark.parametrize("vocabulary", [1, 99, 50_257, 151_936, 1 << 24])
@pytest.mark.parametrize("with_alternatives", [False, True])
def test_parts_cover_a_row_and_fit_the_kernel(rows: int, vocabulary: int, with_alternatives: bool) -> None:  # noqa: FBT001
    for item_bytes in (2, 4):
        parts = launch.parts_of(rows, vocabulary, item_bytes, 132, with_alternatives=with_alternatives)
        each = launch.vectors_of_part(vocabulary, item_bytes, parts)
        assert each * parts * launch.VECTOR_BYTES >= vocabulary * item_bytes
        assert not with_alternatives or each <= launch.VECTORS_OF_GROUPS


def test_a_card_too_old_is_named() -> None:
    device = SimpleNamespace(name="Some card", compute_capability=(7, 5))
    with pytest.raises(GpuUnavailableError) as caught:
        kernel(device, "float32", with_alternatives=False)
    assert str(caught.value) == (
        "Some card has compute capability 7.5, and 8.0 or newer is needed; pass cpu_fallback=True to compute on the CPU"
    )


def test_kept_kernels_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiling.VARIABLE, raising=False)
    assert compiling.load("kernel") is None
    compiling.keep("kernel", b"machine code")
    (kept,) = (tmp_path / "tokenbus" / "kernels").iterdir()
    assert compiling.load("kernel") == b"machine code"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiling.load("kernel") is None
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(compiling.VARIABLE, str(tmp_path / "file"))
    compiling.keep("kernel", b"machine code")
    assert compiling.load("kernel") is None


def test_the_cache_follows_the_user_and_never_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are kept where XDG says, else in the home's cache; a relative XDG folder is ignored, as XDG wants."""
    monkeypatch.delenv(compiling.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert compiling.folder() == Path.home() / ".cache" / "tokenbus" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert compiling.folder() == Path("/caches/tokenbus/kernels")
    assert len({compiling.key_of("a", "bc"), compiling.key_of("ab", "c"), compiling.key_of("abc")}) == 3


def _number(text: str, pattern: str) -> int:
    (found,) = re.findall(pattern, text)
    return int(found)
