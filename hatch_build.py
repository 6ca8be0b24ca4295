"""The build's one step of its own: compile what is faster in C, and optional, where there is a C compiler."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = {
    "contracts/tokenbus_contracts/native/accept": "tokenbus_contracts/native/accept.so",
    "services/tokenbus/gateway/native/render": "tokenbus/gateway/native/render.so",
    "services/tokenbus/engines/fastdeploy/native/ops": "tokenbus/engines/fastdeploy/native/ops.so",
}
"""Each source, without its suffix, and where its library is installed."""
FLAGS = ("-O3", "-fno-trapping-math", "-fPIC", "-shared")


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the package's C code; without a compiler all is Python, and says so."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel then belongs to this platform, an editable install has libraries beside their sources."""
        if self.target_name != "wheel":
            return
        self._folder = tempfile.TemporaryDirectory()
        for name, installed in NATIVE.items():
            source = Path(self.root, f"{name}.c")
            library = Path(self._folder.name, f"{source.stem}.so")
            fault = compile_library(source, library)
            in_place = source.with_suffix(".so")
            if version == "editable":
                in_place.unlink(missing_ok=True)
            if fault:
                self.app.display_warning(f"tokenbus does in Python, slower, what {source.name} does: {fault}")
            elif version == "editable":
                shutil.move(library, in_place)
            else:
                # They are called through ctypes, so they depend on the platform but on no version of Python.
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"
                build_data["pure_python"] = False
                build_data["force_include"][str(library)] = installed

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled on the way."""
        del version, build_data, artifact_path
        if self.target_name == "wheel":
            self._folder.cleanup()


def compile_library(source: Path, library: Path) -> str:
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
