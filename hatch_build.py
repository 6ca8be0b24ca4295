"""The build's one step of its own: compile the optional check of the contract, where there is a C compiler."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "contracts/tokenbus_contracts/native"
INSTALLED = "tokenbus_contracts/native/accept.so"
FLAGS = ("-O3", "-fno-trapping-math", "-fPIC", "-shared")


class NativeCheckHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles accept.c into the package; without a compiler the package is pure Python, and says so."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel then belongs to this platform, an editable install has the library beside its source."""
        if self.target_name != "wheel":
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, "accept.so")
        fault = _compile(Path(self.root, NATIVE, "accept.c"), library)
        in_place = Path(self.root, NATIVE, "accept.so")
        if version == "editable":
            in_place.unlink(missing_ok=True)
        if fault:
            self.app.display_warning(f"tokenbus checks messages in Python, which is slower: {fault}")
        elif version == "editable":
            shutil.move(library, in_place)
        else:
            # It is called through ctypes, so it depends on the platform but on no version of Python.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            build_data["force_include"][str(library)] = INSTALLED

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled on the way."""
        del version, build_data, artifact_path
        if self.target_name == "wheel":
            self._folder.cleanup()


def _compile(source: Path, library: Path) -> str:
    """Compile the library; return what went wrong, or nothing."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler"
    version = f"-DSOURCE_CRC32={zlib.crc32(source.read_bytes())}u"
    command = [*compiler.split(), *FLAGS, version, "-o", str(library), str(source)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - what CC names
    except OSError as error:
        return f"{compiler}: {error.strerror}"
    return (run.stderr.strip() or f"{compiler} ended with {run.returncode}") if run.returncode else ""
