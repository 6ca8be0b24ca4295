"""LLM: an engine and the bus in this process, for lists of prompts."""

import atexit
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, cast

from tokenbus_contracts import ContractError
from tokenbus_services.client import ControlError, Operator, RequestParameters
from tokenbus_services.client.operator import States
from tokenbus_services.client.parameters import Prompt
from tokenbus_services.offline.outputs import Outputs, Texts, model_tokenizer
from tokenbus_services.offline.requests import EngineLimits, Parameters, Requests
from tokenbus_services.offline.system import EmbeddedSystem
from tokenbus_services.settings import Settings
from tokenbus_services.worker import engine_kind, make_engine
from tokenbus_services.worker.engine import DescribesModel

Chat = Sequence[Mapping[str, Any]]
"""A chat's messages, each with `role` and `content`, as OpenAI's API has them."""


class LLM:
    """An engine and the bus in this process: prompts in, tokens and logprobs out as arrays.

    For batches, evaluation and rollouts, in the shape of vLLM's own `LLM`; no address is used and nothing else can
    connect. It may be used in a notebook, or wherever an event loop runs: it has one of its own. A call from another
    thread waits for the one before. It ends by `close`, by leaving `with`, when it is dropped, and with the process.

    Example:
        with tokenbus.LLM(engine="ngram") as llm:
            outputs = llm.generate(["In the evening", "At sea"], max_tokens=8, top_logprobs=2, seed=1)
        for output in outputs:
            print(output.text, output.token_ids, output.logprobs, output.finish_reason)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: str = "vllm",
        settings: Settings | None = None,
        **options: Any,  # noqa: ANN401 - the engine's own
    ) -> None:
        """Start the engine, and wait until it is ready.

        Args:
            model: The model's folder, for an engine that reads one.
            engine: An engine's name, as `tokenbus worker --engine` has it.
            settings: The limits, and how many requests are in flight (`worker.max_requests`); default: those of the
                environment and of the file that it names. Addresses and roles are not used.
            options: The engine's own options by name, as on its command line: `max_num_seqs=64, enforce_eager=True`.

        Raises:
            ValueError: An option, a limit or the model does not fit; one line says which.
            RuntimeError: Something that the engine needs is missing, and so does an ImportError say.
        """
        kind = engine_kind(engine)
        if kind.reads_model == (model is None):
            limit = f"the folder of a model, for the engine {engine}" if kind.reads_model else f"none for {engine}"
            raise ContractError("model", limit, model)
        folder = None if model is None else Path(model)
        settings = settings or Settings.load()
        self._tokenizer = kind.tokenizer if folder is None else f"{folder.resolve()}/"
        make = partial(make_engine, engine, model=folder, arguments=_arguments(options))
        self._system = EmbeddedSystem(make, settings, engine)
        made = self._system.engine
        context = made.max_model_tokens if isinstance(made, DescribesModel) else 0
        self._limits = EngineLimits(made.vocabulary_size, context, settings.limits.max_top_k)
        # After what the engine itself has registered, so that it is closed before that is called.
        atexit.register(self._system.close)

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        parameters: Parameters = None,
        *,
        n: int = 1,
        progress: bool = True,
        **common: Unpack[RequestParameters],
    ) -> Outputs:
        """Generate outputs for prompts, and return them in the order of the prompts.

        At most `worker.max_requests` requests are in flight, however many prompts there are. A KeyboardInterrupt aborts
        them, and the LLM can be used again.

        Args:
            prompts: Texts or sequences of token ids, or one text.
            parameters: What to generate, as `RequestParameters`: of all prompts, or a sequence with those of each.
            n: How many samples of each prompt; sample `i` has the seed plus `i`.
            progress: Whether a terminal shows how far it is.
            common: `RequestParameters` by name, as `max_tokens=8, top_logprobs=0`: of all prompts, where `parameters`
                leave them open.

        Returns:
            an `Outputs`: a sequence with `n` outputs of each prompt, above arrays over all tokens.

        Raises:
            ContractError: A prompt or a parameter breaks its bound, before anything is sent; a ValueError.
            RequestFailedError: A request failed; its reason begins with the prompt's place. The others are aborted.
            EngineBrokenError: The engine broke in an earlier call.
            RuntimeError: It was closed.

        Example:
            with tokenbus.LLM(engine="ngram") as llm:
                wanted = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}]
                outputs = llm.generate([[1, 2, 3], "At sea"], wanted, max_tokens=8, top_logprobs=0)
            assert outputs.logprobs.size == outputs.token_ids.size
        """
        requests = Requests(prompts, parameters, common, n)
        requests.check(self._limits)
        collected = self._system.generate(requests, shows_progress=progress)
        return collected.outputs(n, Texts(self._tokenizer, requests.stoppings))

    def chat(  # noqa: PLR0913 - each but the first two is given by name
        self,
        messages: Chat | Sequence[Chat],
        parameters: Parameters = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int = 1,
        progress: bool = True,
        **common: Unpack[RequestParameters],
    ) -> Outputs:
        """Generate the assistant's next message of chats, which the model's own template writes as prompts.

        Args:
            messages: A chat, or a sequence of them; each is a sequence of messages with `role` and `content`, a text.
            parameters: As in `generate`, and so are `n`, `progress`, `common`, what is returned, and what is raised.
            tools: The functions that the model may call, as OpenAI's API has them.
            chat_template_kwargs: What else the template may read, as `enable_thinking`; no name that it relies on, as
                `messages` or `eos_token`.
            n: As above.
            progress: As above.
            common: As above.

        Raises:
            ValueError: The model has no template, or it refuses a chat.
        """
        chats = cast("Sequence[Chat]", [messages] if messages and isinstance(messages[0], Mapping) else messages)
        tokenizer = model_tokenizer(self._tokenizer) if "/" in self._tokenizer else None
        if tokenizer is None or tokenizer.chat_template is None:
            raise ContractError("messages", "texts or token ids for generate, as there is no chat template", "chats")
        for name in filter(tokenizer.chat_template.reserves, chat_template_kwargs or {}):
            raise ContractError(f"chat_template_kwargs.{name}", "no name that the template relies on", "one")
        prompts = []
        for place, chat in enumerate(chats):
            try:
                text = tokenizer.chat_template.render(chat, tools, chat_template_kwargs or {})
            except ValueError as error:
                raise ValueError(f"messages[{place}]: {error}") from None
            prompts.append(tokenizer.encode_chat(text))
        return self.generate(prompts, parameters, n=n, progress=progress, **common)

    def update_weights(self, folder: str | Path, weight_version: int = 0) -> int:
        """Give the engine the weights in a folder, as safetensors, and return their version.

        A call that runs in another thread goes on with them. Without a version it is the next one.

        Raises:
            ControlError: The weights do not fit, which changes nothing; or the engine cannot take any.
            RuntimeError: It was closed.
        """
        path = str(Path(folder).resolve())

        async def update(operator: Operator) -> States:
            try:
                return await operator.update_weights(path, weight_version)
            except ControlError as error:
                if not any(state.weights_are_damaged for state in error.states.values()):
                    await operator.resume()
                raise

        return self._system.operate(update).weight_version

    def close(self) -> None:
        """Abort what runs, and end the engine with its processes; further calls raise RuntimeError."""
        atexit.unregister(self._system.close)
        self._system.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        # Without waiting: the garbage collector may call this in any thread.
        if hasattr(self, "_system"):
            atexit.unregister(self._system.close)
            self._system.stop()


def _arguments(options: Mapping[str, object]) -> list[str]:
    """Return an engine's options as its command line has them."""
    arguments = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        match value:
            case None:
                pass
            case bool():
                arguments.append(option if value else f"--no-{option.removeprefix('--')}")
            case Mapping():
                arguments += [option, json.dumps(value)]
            case list() | tuple():
                arguments += [option, *map(str, value)]
            case _:
                arguments += [option, str(value)]
    return arguments
