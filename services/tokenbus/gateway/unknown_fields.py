"""Unknown fields of request bodies, which are refused if the answer would lack something that the client expects."""

import difflib
from functools import cache, lru_cache
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from tokenbus.gateway.validation import invalid
from tokenbus.settings.errors import shown

NOT_OFFERED = frozenset({
    *("background", "chat_template", "content_parts", "conversation", "custom_logit_processor", "ebnf"),
    *("ec_transfer_params", "echo", "extra_body", "features", "guided_choice", "guided_grammar", "guided_json"),
    *("guided_regex", "input_embeds", "json_schema", "kv_transfer_params", "lora_path", "mcp_servers"),
    *("parameters", "previous_response_id", "prompt", "prompt_embeds", "regex", "repetition_detection"),
    *("return_hidden_states", "return_prompt_text", "sampling_params", "stop_regex", "suffix", "thinking_token_budget"),
    *("trace_decode_token_ids", "use_beam_search", "watermarking", "web_search_options"),
})  # fmt: skip
"""Fields of the APIs of OpenAI, vLLM and SGLang that would change the answer."""
MOST_UNKNOWN = 64
"""Maximum number of different unknown fields in a body. Each unknown field is compared with all known fields."""
_LOGPROBS = ("logprobs", "toplogprobs")
"""Fields about logprobs. An unknown name that only slightly resembles such a field is already refused."""
_MAX_NAME = 64
_NEAR, _LESS_NEAR = 0.85, 0.75
"""Minimum similarity as difflib's ratio: about one wrong letter in a short name, or two in a long name."""


def ignored_fields(body: Struct, given: dict[str, Any]) -> list[str]:
    """Return the unknown fields of a body that may be ignored, as paths without indices.

    Raises an ApiError for a field that is not offered, resembles a known field, or asks for logprobs. A null counts as
    an absent field.
    """
    search = _Search()
    search.look(body, given, "", "", is_option=True)
    return list(search.paths)


class _Search:
    """Collects the unknown fields of one body."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._checked: set[tuple[type, str, str]] = set()
        """Type, path and unknown field of each check. Items of a list share a path, so a check is made only once."""

    def look(self, body: Struct, given: dict[str, Any], where: str, path: str, *, is_option: bool) -> None:
        """Check an object and all objects within it. `where` is the object's path, and `path` omits its indices.

        Fewer unknown fields are refused without `is_option`, as in items of a list, which are parts of a conversation.
        """
        kind = type(body)
        known, of_objects = _fields_of(kind)
        for name, value in () if known.issuperset(given) else given.items():
            if name not in known and value is not None and (kind, path, name) not in self._checked:
                self._checked.add((kind, path, name))
                self._check(kind, name, value, where, is_option=is_option)
                self.paths[f"{path}{shown(name)[1:-1]}"] = None
        for name in of_objects:
            if name not in given:
                continue
            member, value = getattr(body, name), given[name]
            if isinstance(member, Struct):
                self.look(member, value, f"{where}{name}.", f"{path}{name}.", is_option=is_option)
            elif isinstance(member, list):
                for index, (each, item) in enumerate(zip(member, value, strict=True)):
                    if isinstance(each, Struct):
                        self.look(each, item, f"{where}{name}[{index}].", f"{path}{name}.", is_option=False)

    def _check(self, kind: type[Struct], name: str, value: object, where: str, *, is_option: bool) -> None:
        is_off = value is False or value in ("", [], {})
        if is_option and name in NOT_OFFERED and not is_off:
            raise invalid(f"{where}{name}", f"not offered, got {shown(value)}")
        if len(self._checked) > MOST_UNKNOWN:
            raise invalid("", f"at most {MOST_UNKNOWN} unknown fields, got more")
        asks_logprobs = _asks_logprobs(name)
        meant = _meant(kind, name)
        if not (asks_logprobs and value is False) and (meant is not None or (is_option and asks_logprobs)):
            hint = "" if meant is None else f" (did you mean {meant}?)"
            raise invalid(shown(f"{where}{name}")[1:-1], f"no such field{hint}, got {shown(value)}")


@cache
def _fields_of(kind: type[Struct]) -> tuple[frozenset[str | None], tuple[str, ...]]:
    names = frozenset({*kind.__struct_encode_fields__, kind.__struct_config__.tag_field})
    hints = get_type_hints(kind)
    return names, tuple(
        name
        for name, attribute in zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        if _has_object(hints[attribute])
    )


def _has_object(hint: Any) -> bool:  # noqa: ANN401 - a type
    return (isinstance(hint, type) and issubclass(hint, Struct)) or any(map(_has_object, get_args(hint)))


@lru_cache(maxsize=4096)
def _meant(kind: type[Struct], name: str) -> str | None:
    """Return the known field that a name resembles, regardless of underscores and capitals."""
    letters, known = _letters(name), _letters_of(kind)
    # Compare only names with the same first or last letter, because difflib is slow.
    alike = [each for each in known if each[:1] == letters[:1] or each[-1:] == letters[-1:]]
    near = difflib.get_close_matches(letters, alike, n=1, cutoff=_NEAR)
    return known[near[0]] if near else None


@lru_cache(maxsize=4096)
def _asks_logprobs(name: str) -> bool:
    letters = _letters(name)
    return "logprob" in letters or bool(difflib.get_close_matches(letters, _LOGPROBS, 1, _LESS_NEAR))


@cache
def _letters_of(kind: type[Struct]) -> dict[str, str]:
    return {_letters(each): each for each in kind.__struct_encode_fields__}


def _letters(name: str) -> str:
    return name[:_MAX_NAME].replace("_", "").replace("-", "").lower()
