"""A small file system of a test's own, in a namespace, where the kernel permits such to its users."""

import shutil
import subprocess
from pathlib import Path

_REFUSALS = ("not permitted", "denied", "not supported", "No space left", "Invalid argument")
_TOOLS = ("unshare", "nsenter", "mount")
_HELD = "mount -t tmpfs -o size={size} tmpfs '{folder}' && echo held && exec cat"


def why_no_small_disk(folder: Path) -> str:
    """Say why no file system can be mounted here; empty where it can. Any other failure is raised."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    tried = subprocess.run(probe, check=False, capture_output=True, text=True)
    if tried.returncode and not any(each in tried.stderr for each in _REFUSALS):
        raise RuntimeError(tried.stderr)
    return tried.stderr.strip() if tried.returncode else ""


class SmallDisk:
    """A file system of some bytes at a folder, which processes see that are started with `before`."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self.before: list[str] = []
        """What runs a command where the file system is."""

    def __enter__(self) -> "SmallDisk":
        command = ["unshare", "-rm", "sh", "-c", _HELD.format(size=self._size, folder=self._folder)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline() == "held\n"
        except BaseException:
            self.__exit__()
            raise
        self.before = ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials", "--"]
        self._ballast = Path(f"/proc/{self._holder.pid}/root{self._folder}/ballast")
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate("")

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 65_536):
                    pass
            except OSError:
                return

    def make_room(self) -> None:
        self._ballast.unlink()
