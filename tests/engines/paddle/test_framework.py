"""Paddle: brought in late, and on terms that suit a service."""

import signal
import subprocess
import sys

import pytest

from tests.engines.paddle.needs import NEEDS_PADDLE
from tokenbus.engines.paddle import DeviceError, PaddleEngine, PaddleOptions

_MISSING = """
import sys
from tokenbus.engines.paddle import DeviceError, PaddleEngine
print(sorted({"paddle", "safetensors"} & sys.modules.keys()))
sys.modules["paddle"] = None
try:
    PaddleEngine()
except DeviceError as error:
    print(error)
"""


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_framework_is_imported_late_and_missed_in_one_line() -> None:
    imported, said = _printed(_MISSING).splitlines()
    assert imported == "[]"
    assert said.startswith("the engine needs paddle, of the extra paddle or gpu: ")


def test_option_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"^context: 2 to 65536, got 65537$"):
        PaddleOptions(context=65_537)
    with pytest.raises(ValueError, match=r"^max_top_logprobs: 0 to 127, got 128$"):
        PaddleOptions(max_top_logprobs=128)


class TestWithPaddle:
    pytestmark = NEEDS_PADDLE

    @pytest.mark.nightly
    def test_signals_stay_with_the_service(self) -> None:
        code = (
            "import signal, os; signal.signal(signal.SIGTERM, lambda *_: print('told to stop'))\n"
            "from tokenbus.engines.paddle import PaddleEngine\n"
            "PaddleEngine(); os.kill(os.getpid(), signal.SIGTERM)"
        )
        assert _printed(code) == "told to stop\n"

    def test_unknown_device_is_named(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        for device in ("gpu:77", "abacus"):
            with pytest.raises(DeviceError, match=f"^device {device}: .+") as error:
                PaddleEngine(PaddleOptions(device=device))
            assert "\n" not in str(error.value)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_more_drafts_than_heads_are_refused(self) -> None:
        with pytest.raises(ValueError, match="speculate: at most 3, the number of draft heads in the weights, got 4"):
            PaddleEngine(PaddleOptions(speculate=4))
