"""Fields that a body has and its type has not: ignored, unless the answer would silently lack what they ask for."""

import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct

from tokenbus.gateway.validation import invalid
from tokenbus.settings.errors import shown

NOT_OFFERED = frozenset({
    *("background", "chat_template", "content_parts", "conversation", "custom_logit_processor", "ebnf"),
    *("ec_transfer_params", "echo", "features", "guided_choice", "guided_grammar", "guided_json"),
    *("guided_regex", "input_embeds", "json_schema", "kv_transfer_params", "lora_path", "mcp_servers"),
    *("previous_response_id", "prompt", "prompt_embeds", "regex", "repetition_detection"),
    *("return_hidden_states", "return_prompt_text", "stop_regex", "suffix", "thinking_token_budget"),
    *("trace_decode_token_ids", "use_beam_search", "watermarking", "web_search_options"),
})  # fmt: skip
"""Fields of OpenAI's API, vLLM's and SGLang's without which an answer would be another one."""
MOST_UNKNOWN = 64
"""Different unknown fields of a body: each is compared with all known ones."""
_MAX_NAME = 64
_NEAR = 0.85
"""Of difflib's ratio: one wrong letter in a short name, or two in a long one."""


def ignored_fields(body: Struct, given: dict[str, Any]) -> list[str]:
    """Return the unknown fields of a body, by their paths without indices, which may be ignored.

    Raises an ApiError for one that is not offered, that is nearly a known one, or that asks for logprobs. null stands
    for a field that is left out.
    """
    found: dict[str, None] = {}
    checked: set[tuple[type, str]] = set()
    for place, path, each, members, is_option in _objects(body, given, "", "", is_option=True):
        kind = type(each)
        known = {*kind.__struct_fields__, kind.__struct_config__.tag_field}
        for name, value in members.items():
            if name in known or value is None:
                continue
            where, path_name = f"{place}{name}", f"{path}{shown(name)[1:-1]}"
            if is_option and name in NOT_OFFERED and not _is_off(value):
                raise invalid(where, f"not offered, got {shown(value)}")
            checked.add((kind, name))
            if len(checked) > MOST_UNKNOWN:
                raise invalid("", f"at most {MOST_UNKNOWN} unknown fields, got more")
            meant, asks_logprobs = _meant(kind, name), "logprob" in _letters(name)
            if not (asks_logprobs and value is False) and (meant is not None or (is_option and asks_logprobs)):
                hint = "" if meant is None else f" (did you mean {meant}?)"
                raise invalid(shown(where)[1:-1], f"no such field{hint}, got {shown(value)}")
            found[path_name] = None
    return list(found)


def _objects(
    body: Struct, given: dict[str, Any], place: str, path: str, *, is_option: bool
) -> Iterator[tuple[str, str, Struct, dict[str, Any], bool]]:
    """Yield the objects of a body: where each is with and without indices, and whether it is in no list.

    An object in a list is a part of a conversation, which others wrote, and of which more is ignored.
    """
    yield place, path, body, given, is_option
    for name, value in given.items():
        member = getattr(body, name, None) if name in body.__struct_fields__ else None
        if isinstance(member, Struct):
            yield from _objects(member, value, f"{place}{name}.", f"{path}{name}.", is_option=is_option)
        elif isinstance(member, list) and isinstance(value, list):
            for index, (each, item) in enumerate(zip(member, value, strict=True)):
                if isinstance(each, Struct):
                    yield from _objects(each, item, f"{place}{name}[{index}].", f"{path}{name}.", is_option=False)


def _is_off(value: object) -> bool:
    return value is False or value in ("", [], {})


@lru_cache(maxsize=4096)
def _meant(kind: type[Struct], name: str) -> str | None:
    """Return the known field that a name is nearly; underscores and capitals do not count."""
    known = {_letters(each): each for each in kind.__struct_fields__}
    near = difflib.get_close_matches(_letters(name)[:_MAX_NAME], known, n=1, cutoff=_NEAR)
    return known[near[0]] if near else None


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
