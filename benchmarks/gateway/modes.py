"""What is asked of the gateway, with logprobs and without."""

from typing import Any

from benchmarks.programs import PROMPT

BASE = "none"
_COMPLETION: dict[str, Any] = {
    "model": "tokenbus",
    "prompt": PROMPT,
    "max_tokens": 256,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_CHAT = {key: value for key, value in _COMPLETION.items() if key != "prompt"} | {
    "messages": [{"role": "user", "content": PROMPT}],
    "logprobs": True,
}
MODES: dict[str, dict[str, Any]] = {
    BASE: _COMPLETION,
    "k = 0": _COMPLETION | {"logprobs": 0},
    "k = 20": _COMPLETION | {"logprobs": 20},
    "chat, k = 20": _CHAT | {"top_logprobs": 20},
    "columns, k = 20": _COMPLETION | {"logprobs": 20, "return_columns": True},
}
