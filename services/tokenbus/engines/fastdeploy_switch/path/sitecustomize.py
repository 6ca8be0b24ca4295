"""Turns the switch on if Python reads no .pth file. `tokenbus fastdeploy` then puts this folder on PYTHONPATH.

Python imports only one `sitecustomize` at its start, so this module imports any `sitecustomize` that it hides.
"""

# ruff: noqa: INP001 - the folder is put on a path, and is not a package
import os
import sys

try:
    from tokenbus.engines.fastdeploy_switch import install
except ImportError:  # the engine started a Python of another environment
    pass
else:
    install()

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs every start
_OWN = sys.modules.pop(__name__)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]  # noqa: PTH100
try:
    __import__(__name__)
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
sys.modules.setdefault(__name__, _OWN)
