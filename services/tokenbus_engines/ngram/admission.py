"""Admission: a request as the engine runs it, or a ValueError with the field, the limit and the value."""

from dataclasses import dataclass

import numpy as np

from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters
from tokenbus_engines.ngram.counting import NOBODY
from tokenbus_engines.ngram.handoff import RequestState, read
from tokenbus_engines.ngram.model import WIDTH, Model
from tokenbus_engines.ngram.options import NgramOptions
from tokenbus_engines.ngram.stopping import Stopping
from tokenbus_engines.ngram.tokenizer import Tokenizer
from tokenbus_engines.sampling_parameters import max_tokens_of, seed_of, temperature_of, top_p_of

_COLDEST = 1e30
"""Beyond it nothing changes any more but that products overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, checked."""

    key: int
    prompt_tokens: int
    context: int
    """Where its prompt, and what was handed over with it, end."""
    emitted: list[int]
    """What another engine emitted already."""
    proposals: list[int]
    """What that engine's draft proposed after it."""
    end: int
    """How many tokens its output has at most."""
    seed: int
    coldness: float
    top_k: int
    top_p: float
    top_logprobs: int
    is_scored: bool
    wants_drafts: bool
    ignores_end: bool
    stopping: Stopping | None


def checked(
    generate: Generate, state: bytes | None, model: Model, tokenizer: Tokenizer, options: NgramOptions
) -> Asked:
    """Return what a request asks for, going on from another engine's state if there is one."""
    if not generate.request_key:
        raise ValueError("request_key: at least 1, got 0")
    sampling = generate.sampling
    coldness, top_k = _temperature(sampling, model.vocabulary_size)
    top_p = top_p_of(sampling)
    max_tokens = max_tokens_of(sampling)
    top_logprobs = generate.top_logprobs
    if top_logprobs > options.max_top_logprobs:
        raise ValueError(f"top_logprobs: at most {options.max_top_logprobs}, got {top_logprobs}")
    stopping = _stopping(sampling, model.vocabulary_size, tokenizer)
    prompt = _prompt(generate, tokenizer, options)
    end = min(max_tokens or options.context, options.context - len(prompt))
    handoff = _handed_over(state, options)
    context = model.contexts.of(prompt)
    if handoff is not None:
        if tokenizer.end_token in handoff.tokens and not sampling.ignore_end_token:
            raise ValueError("state.tokens: none that ends the request, got the end token")
        context = _gone_on(handoff, model, prompt, end, stopping)
        seed = handoff.seed
    else:
        seed = seed_of(sampling)
    return Asked(
        key=generate.request_key,
        prompt_tokens=len(prompt),
        context=context,
        emitted=handoff.tokens if handoff is not None else [],
        proposals=handoff.proposals if handoff is not None else [],
        end=end,
        seed=seed,
        coldness=coldness,
        top_k=top_k,
        top_p=top_p,
        top_logprobs=top_logprobs,
        is_scored=generate.HasField("top_logprobs"),
        wants_drafts=generate.include_draft_logprobs,
        ignores_end=sampling.ignore_end_token,
        stopping=stopping,
    )


def _temperature(sampling: SamplingParameters, vocabulary_size: int) -> tuple[float, int]:
    """Return what logprobs are multiplied by, and how many tokens are kept: at temperature 0 the first one."""
    temperature = temperature_of(sampling)
    if temperature == 0:
        return 1.0, 1
    return min(1 / temperature, _COLDEST), min(sampling.top_k or vocabulary_size, vocabulary_size)


def _stopping(sampling: SamplingParameters, vocabulary_size: int, tokenizer: Tokenizer) -> Stopping | None:
    for place, token_id in enumerate(sampling.stop_token_ids):
        if token_id >= vocabulary_size:
            raise ValueError(f"sampling.stop_token_ids[{place}]: below {vocabulary_size}, got {token_id}")
    for place, text in enumerate(sampling.stop):
        if not text:
            raise ValueError(f"sampling.stop[{place}]: at least 1 character, got none")
    if not sampling.stop and not sampling.stop_token_ids:
        return None
    return Stopping(tokenizer, sampling.stop, sampling.stop_token_ids)


def _prompt(generate: Generate, tokenizer: Tokenizer, options: NgramOptions) -> list[int]:
    """Return the prompt's tokens, which leave room for one more at least."""
    most = options.context - 1
    if generate.WhichOneof("prompt") == "tokens":
        name, ids = "tokens.token_ids", generate.tokens.token_ids
        if ids and max(ids) >= tokenizer.vocabulary_size:
            place, wrong = next((at, token) for at, token in enumerate(ids) if token >= tokenizer.vocabulary_size)
            raise ValueError(f"{name}[{place}]: below {tokenizer.vocabulary_size}, got {wrong}")
        prompt = list(ids)
    else:
        name, text = "text.text", generate.text.text
        least = tokenizer.least_tokens(len(text.encode()))
        if least > most:  # its tokens need not be counted
            raise ValueError(f"{name}: at most {most} tokens, got at least {least}")
        prompt = tokenizer.encode(text)
    if not prompt:
        raise ValueError(f"{name}: at least 1 token, got none")
    if len(prompt) > most:
        raise ValueError(f"{name}: at most {most} tokens, got {len(prompt)}")
    return prompt


def _handed_over(state: bytes | None, options: NgramOptions) -> RequestState | None:
    if state is None:
        if options.role == "decode":
            raise ValueError("state: a decode engine goes on from a prefill engine's, got none")
        return None
    if options.role == "prefill":
        raise ValueError("state: none for a prefill engine, got one")
    return read(state)


def _gone_on(handoff: RequestState, model: Model, prompt: list[int], end: int, stopping: Stopping | None) -> int:
    """Return the context that a request is in which another engine began, if that can be."""
    handoff.check(model, len(prompt))
    if len(handoff.tokens) >= end:
        raise ValueError(f"state.tokens: less than the {end} that the request may have, got {len(handoff.tokens)}")
    if stopping is not None and stopping.place_of_end(handoff.tokens) is not None:
        raise ValueError("state.tokens: none that ends the request, got one that does")
    context = model.contexts.of(prompt + handoff.tokens)
    at = np.array([context])
    for place, token in enumerate(handoff.proposals):
        # The draft proposes what is in its line: of anything else its probability, which verifying needs, is none.
        if model.places(model.drafts[at], np.array([token]))[0] >= WIDTH:
            raise ValueError(f"state.proposals[{place}]: a token that the draft proposes there, got {token}")
        at = model.contexts.after(at, np.array([token]))
    return context


def padded(proposals: list[int], count: int) -> list[int]:
    """Return so many proposals, with nobody where there are fewer."""
    return [*proposals[:count], *[NOBODY] * (count - len(proposals))]
