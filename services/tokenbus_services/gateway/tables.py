"""The requests that are taken, field by field: what is checked here is what the OpenAPI document says."""

from dataclasses import dataclass

from tokenbus_services.gateway.fields import Either, Field, Ids, Many, Number, Only, Table, Text, Truth, Whole
from tokenbus_services.settings import Settings

_MOST_CHARACTERS = 4_194_304
_MOST_STOPS = 16
_LONGEST_STOP = 64
"""In characters, of which none takes more than 4 of the 256 bytes that the contract allows."""
_LONGEST_NAME = 256
_LARGEST_SEED = 2**63 - 1
_LEAST_SEED = -(2**63)
_MOST_MESSAGES = 1024
_MOST_PARTS = 64
_HOTTEST = 100.0
COMPLETION_TOKENS = 16
"""As many as OpenAI's completions have where no number is given."""
INSPECTED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Tables:
    """What each route's body may hold."""

    completion: Table
    chat: Table
    inspection: Table


def tables_of(settings: Settings) -> Tables:
    """Return the tables, with the bounds that the settings give."""
    gateway, limits = settings.gateway, settings.limits
    stop = Text(1, _LONGEST_STOP)
    tokens = Whole(1, gateway.max_tokens)
    ids = Ids(gateway.max_prompt_tokens, limits.max_token_id)
    text = Text(1, _MOST_CHARACTERS)
    most_prompts = gateway.max_choices
    sampling = (
        Field("temperature", Number(0, _HOTTEST), "What logits are divided by; 0: always the most probable token."),
        Field("top_p", Number(0, 1, above=True), "The probability mass that is kept."),
        Field("stop", Either((stop, Many(stop, 0, _MOST_STOPS))), "What ends the text, and is cut off."),
        Field(
            "seed",
            Whole(_LEAST_SEED, _LARGEST_SEED),
            "What makes the choice repeatable; choice number i of an answer takes seed + i.",
        ),
    )
    common = (
        Field("model", Text(0, _LONGEST_NAME), "One of those that /v1/models lists.", required=True),
        *sampling,
        Field("n", Whole(1, gateway.max_choices), "How many choices each prompt has.", default=1),
        Field("stream", Truth(), "Whether the answer comes as server-sent events.", default=False),
        Field(
            "stream_options",
            Table((Field("include_usage", Truth(), "Whether a last chunk has the usage.", default=False),)),
            "Only where stream is true.",
        ),
        Field("include_draft_logprobs", Truth(), "Whether choices have draft_logprobs beside logprobs.", default=False),
        Field("return_token_ids", Truth(), "Whether choices have token_ids and prompt_token_ids.", default=False),
        Field("return_columns", Truth(), "Whether logprobs come as base64 columns instead.", default=False),
        Field("ignore_eos", Truth(), "Whether the model's own end of an answer is passed over.", default=False),
        Field("user", Text(0, _LONGEST_NAME), "Taken, and not used."),
        Field("frequency_penalty", Only((0,)), "Not offered: only 0 is taken."),
        Field("presence_penalty", Only((0,)), "Not offered: only 0 is taken."),
        Field("logit_bias", Only(({},)), "Not offered: only an empty object is taken."),
    )
    return Tables(
        completion=Table((
            *common,
            Field(
                "prompt",
                Either((text, Many(text, 1, most_prompts), ids, Many(ids, 1, most_prompts))),
                "A text, token ids, or several of either.",
                required=True,
            ),
            Field("max_tokens", tokens, "The most tokens of a choice.", default=COMPLETION_TOKENS),
            Field("logprobs", Whole(0, limits.max_top_k), "How many alternatives a token has; 0: its logprob alone."),
            Field("echo", Only((False,)), "Not offered: only false is taken."),
            Field("best_of", Only((1,)), "Not offered: only 1 is taken."),
            Field("suffix", Only(("",)), "Not offered: only an empty text is taken."),
        )),
        chat=Table((
            *common,
            Field("messages", Many(_message(text), 1, _MOST_MESSAGES), "The chat so far.", required=True),
            Field("max_completion_tokens", tokens, "The most tokens of a choice; absent: as many as fit."),
            Field("max_tokens", tokens, "The older name of max_completion_tokens."),
            Field("logprobs", Truth(), "Whether tokens have their logprobs.", default=False),
            Field("top_logprobs", Whole(0, limits.max_top_k), "How many alternatives each has; only with logprobs."),
            Field("response_format", Only(({"type": "text"},)), "Not offered: only text is taken."),
            Field("tools", Only(([],)), "Not offered: only an empty list is taken."),
            Field("store", Only((False,)), "Not offered: only false is taken."),
        )),
        inspection=Table((
            Field("prompt", text, "What to go on from.", required=True),
            *sampling,
            Field("max_tokens", tokens, "The most tokens.", default=INSPECTED_TOKENS),
            Field("top_logprobs", Whole(0, limits.max_top_k), "How many alternatives each token has.", default=10),
            Field("drafts", Truth(), "Whether rows have what the draft model proposed.", default=True),
        )),
    )  # fmt: skip


def _message(text: Text) -> Table:
    part = Table((
        Field("type", Only(("text",)), "What it is.", required=True),
        Field("text", Text(0, text.high), "The text.", required=True),
    ))  # fmt: skip
    # What OpenAI's own client sends back of an answer has these, without a value.
    absent = ("refusal", "annotations", "audio", "function_call", "tool_calls")
    content = Either((Text(0, text.high), Many(part, 1, _MOST_PARTS)))
    return Table((
        Field("role", Only(("system", "developer", "user", "assistant")), "Whose it is.", required=True),
        Field("content", content, "The text, or its parts.", required=True),
        Field("name", Text(0, _LONGEST_NAME), "Taken, and not used."),
        *(Field(name, Only((None,)), "Not offered: only null is taken.") for name in absent),
    ))  # fmt: skip
