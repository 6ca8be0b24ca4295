"""Published: a scheduler plugin that publishes all requests of an existing vLLM on the bus.

vLLM creates the plugin in its core process (`--scheduler-cls tokenbus.engines.vllm.scheduler`). vLLM's front end gets
the same answers as without the plugin. No fault of the plugin delays or fails a step of vLLM.
"""

import atexit
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenbus.bus import AddressError
from tokenbus.engines.vllm.columns import NO_ROWS, Rows, add_masks
from tokenbus.engines.vllm.compatibility import OF_MASKS, OF_ROUTED_EXPERTS, OF_SCHEDULER, check_members, load_vllm
from tokenbus.engines.vllm.configuration import check_limits, check_top_k, tokenizer_of
from tokenbus.engines.vllm.request_ids import RequestIds
from tokenbus.engines.vllm.requests import Request, Requests
from tokenbus.engines.vllm.routed_experts import SessionExperts, Spool, check_routed_experts
from tokenbus.engines.vllm.sessions import Sessions
from tokenbus.engines.vllm.weight_versions import follow_weight_versions, version_number
from tokenbus.logs import DeduplicatedLog, configure, logger
from tokenbus.settings import ENTRIES, Settings
from tokenbus.worker import NotRunningError
from tokenbus.worker.engine import EngineDescription
from tokenbus.worker.engine_output import session_events
from tokenbus.worker.publishing import publishing
from tokenbus_contracts.generated.request_pb2 import (
    ErrorCode,
    Generate,
    PromptScoring,
    RequestEvent,
    SamplingParameters,
)
from tokenbus_contracts.schema import bounds_in

_USED_OF_SCHEDULER = ("requests", "schedule", "update_from_output", "shutdown")
_MOST_STOPS = bounds_in(SamplingParameters.DESCRIPTOR.fields_by_name["stop"].GetOptions()).max_items
_EVERY_TOKEN = -1
"""Number by which a request to vLLM asks for the logprobs of the whole vocabulary."""
_log = logger("worker")


def scheduler(**given: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Create vLLM's scheduler, and publish its steps. An error ends the process with one line on standard error."""
    config = given["vllm_config"]
    try:
        vllm = load_vllm(OF_SCHEDULER)
        if has_masks(config):
            load_vllm(OF_MASKS)
        settings = settings_for(config)
        tokenizer = None
        if not config.model_config.skip_tokenizer_init:
            check_members(given["structured_output_manager"], ("tokenizer",))
            tokenizer = given["structured_output_manager"].tokenizer
        made = own_class(config)(**given)
        check_members(made, _USED_OF_SCHEDULER)
        if settings.worker.routed_experts_folder:
            load_vllm(OF_ROUTED_EXPERTS)
        configure(settings.log)
        follow_weight_versions(vllm.EngineCore)
        Published(vllm, config, settings, tokenizer).observe(made)
    except (ValueError, ImportError, AddressError, NotRunningError) as error:
        raise SystemExit(f"tokenbus: {error}") from None
    return made


def settings_for(config: Any) -> Settings:  # noqa: ANN401 - vLLM's VllmConfig
    """Load the settings with defaults for this vLLM, or raise ValueError."""
    found = Settings.load()
    rank, model = config.parallel_config.data_parallel_index, config.model_config
    here: dict[str, object] = {
        "worker.id": "vllm-0",
        "worker.model": str(model.served_model_name),
        "worker.drain_timeout_ms": 2000,  # vLLM allows its core process only some seconds to end
    }
    overrides = {key: value for key, value in here.items() if ENTRIES[key].value_in(found) == ENTRIES[key].default}
    found = Settings.load(overrides=overrides)
    if found.worker.role != "mixed":
        raise ValueError(f"worker.role: mixed for the engine vllm, got {found.worker.role}")
    if model.is_diffusion:
        raise ValueError("--scheduler-cls: tokenbus.engines.vllm.scheduler is not for diffusion models")
    check_limits(config, found)
    top_k = found.worker.top_logprobs
    check_top_k("worker.top_logprobs", top_k, config)
    check_routed_experts(config, found)
    most = min(found.limits.max_top_k, model.get_vocab_size())
    if top_k > most:
        raise ValueError(f"worker.top_logprobs: at most {most}, as limits.max_top_k or the vocabulary, got {top_k}")
    # Requests reach vLLM through its own front end, and publishing must never block vLLM.
    worker = replace(found.worker, max_requests=0, policy="fail", dp_rank=rank)
    return replace(found, worker=replace(worker, id=f"{worker.id}-{rank}") if rank else worker)


def own_class(config: Any) -> Callable[..., Any]:  # noqa: ANN401 - vLLM's VllmConfig
    """Return the scheduler class that vLLM would choose without `--scheduler-cls`."""
    chosen = copy(config.scheduler_config)
    chosen.scheduler_cls = None
    own: Callable[..., Any] = chosen.get_scheduler_cls()
    return own


def has_masks(config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether vLLM returns the sampling mask of each token, as vLLM 0.29 and later can."""
    return bool(getattr(config.model_config, "return_sampling_mask", False))


class Published:
    """Publishes a scheduler's steps from separate threads. Retention bounds the data that waits for a processor."""

    def __init__(self, vllm: SimpleNamespace, config: Any, settings: Settings, tokenizer: Any) -> None:  # noqa: ANN401
        """Start publishing, even without a processor. Raise AddressError or ValueError if a setting cannot be used."""
        model = config.model_config
        self._vllm = vllm
        self._tokenizer = tokenizer
        self._top_k, self._most_top_k = settings.worker.top_logprobs, settings.limits.max_top_k
        self._has_masks = has_masks(config)
        self._request_ids, self._sessions = RequestIds(), Sessions()
        self._requests = Requests(vllm, config)
        self._asked: dict[str, int] = {}
        """For each request with logprobs, the number of alternatives that the front end asked for."""
        self._choosing: set[str] = set()
        """Requests with `logprob_token_ids`."""
        self._ended: set[str] = set()
        """Requests that have ended on the bus, but continue in vLLM."""
        self._last_rows = NO_ROWS
        """Last rows of the requests that ended since the last step."""
        self._weight_version = 0
        self._repeated_log = DeduplicatedLog()
        self._experts: SessionExperts | None = None
        self._is_on = True
        # No adapters are announced, because requests do not come over the bus.
        described = EngineDescription(model.max_model_len, *tokenizer_of(Path(str(model.tokenizer)), tokenizer))
        with ExitStack() as stack:
            self._client, self._out = publishing(stack, settings, model.get_vocab_size(), described)
            if settings.worker.routed_experts_folder:
                self._experts = SessionExperts(Spool(settings.worker, self._client.epoch))
            self._running = stack.pop_all()
        # Close even if vLLM's core fails early. Functions of atexit would run only after the threads have ended.
        getattr(threading, "_register_atexit", atexit.register)(self.close)
        _log.info(
            "worker started",
            worker=settings.worker.id,
            epoch=self._client.epoch,
            engine="vllm",
            processor=settings.bus.workers_address,
        )

    def observe(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's Scheduler
        """Publish the steps of a scheduler until its shutdown."""
        schedule, update, shutdown = scheduler.schedule, scheduler.update_from_output, scheduler.shutdown

        def scheduled(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as vLLM calls it
            made = schedule(*arguments, **named)
            self._isolated(self._begin, made, scheduler.requests)
            return made

        def updated(scheduled: Any, computed: Any) -> Any:  # noqa: ANN401 - as above
            logprobs, computed.logprobs = computed.logprobs, self._for_front_ends(computed.logprobs)
            outputs = update(scheduled, computed)
            self._isolated(self._publish, scheduled, computed, logprobs, outputs)
            return outputs

        def shut_down() -> None:
            try:
                shutdown()
            finally:
                self.close()

        scheduler.schedule, scheduler.update_from_output, scheduler.shutdown = scheduled, updated, shut_down
        scheduler.note_weight_version = self._note_weight_version

    def close(self) -> None:
        """Publish the remaining steps and disconnect. The bus then ends the open requests."""
        self._is_on = False
        self._running.close()

    def _note_weight_version(self, name: str) -> None:
        self._weight_version = version_number(name)

    def _isolated(self, call: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - vLLM's
        """Call a function whose exceptions must not fail a step of vLLM. An exception ends publishing."""
        if not self._is_on:
            return
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 - a defect must not end vLLM
            self._is_on = False
            _log.exception("publishing stopped")
            threading.Thread(target=self.close, name="tokenbus-close", daemon=True).start()

    # Methods that run before each step of vLLM.

    def _begin(self, scheduled: Any, known: Mapping[str, Any]) -> None:  # noqa: ANN401 - vLLM's
        """Remove ended requests, and turn logprobs on for new requests by copying their sampling parameters."""
        # `finished_req_ids` is vLLM's only sign that a client has dropped its request.
        self._last_rows += self._requests.abort(scheduled.finished_req_ids)
        for name in scheduled.finished_req_ids:
            self._ended.discard(name)
            self._choosing.discard(name)
            self._asked.pop(name, None)
        if self._experts is not None:
            self._experts.remove(scheduled.finished_req_ids)
        for new in scheduled.scheduled_new_reqs:
            name, sampling = new.req_id, new.sampling_params
            if sampling is None:  # the request asks for an embedding
                continue
            # vLLM may schedule a preempted request as new again.
            if name not in self._requests and name not in self._ended:
                self._add(new, known[name])
            wanted = sampling.logprobs
            has_enough = wanted is not None and (wanted == _EVERY_TOKEN or wanted >= self._top_k)
            if not has_enough and not sampling.logprob_token_ids:
                new.sampling_params = copy(sampling)
                new.sampling_params.logprobs = self._top_k

    def _add(self, new: Any, request: Any) -> None:  # noqa: ANN401 - vLLM's NewRequestData and Request
        name, sampling = new.req_id, new.sampling_params
        detokenizer = None
        if sampling.stop and self._tokenizer is not None:
            detokenizer = self._vllm.IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        request_id = self._request_ids.id_of(name, sampling.extra_args)
        self._requests.add(
            name, Request(request_id, self._top_k, tuple(sampling.stop or ())[:_MOST_STOPS], detokenizer)
        )
        if sampling.num_logprobs is not None:
            self._asked[name] = sampling.num_logprobs
        if sampling.logprob_token_ids:
            self._choosing.add(name)
        # Without `skip_reading_prefix_cache`, vLLM does not score the cached part of a prompt.
        if sampling.prompt_logprobs is not None and sampling.skip_reading_prefix_cache:
            wanted = sampling.prompt_logprobs
            most = self._most_top_k if wanted == _EVERY_TOKEN else min(wanted, self._most_top_k)
            scoring = PromptScoring(top_logprobs=most)
            self._requests.prompts.add(name, Generate(request_id=request_id, prompt_scoring=scoring))
        # With `prompt_logprob_token_ids`, vLLM does not score the prompt's own tokens, which PromptScores requires.
        # Older versions of vLLM lack this parameter.
        if getattr(sampling, "prompt_logprob_token_ids", None) is not None:
            values = {"field": "prompt_logprob_token_ids", "request_id": request_id}
            self._repeated_log.begin("scores", _log.warning, "prompt scores not published", **values)
        prompt = new.prompt_token_ids if new.prompt_embeds is None else None
        if session := self._sessions.of(request_id, name, sampling.extra_args, prompt):
            self._out.admitted(request_id, len(session.tokens.token_ids), weight_version=self._weight_version)
            for event in session_events(session):
                self._out.publish_event(event)
            if self._experts is not None:
                self._experts.add(name, session, sampling)

    # Methods that run after each step of vLLM.

    def _for_front_ends(self, logprobs: Any) -> Any:  # noqa: ANN401 - vLLM's LogprobsLists, or None
        """Cut a step's logprobs to the largest number of alternatives that the front end asked for."""
        wanted = self._asked.values()
        return logprobs if logprobs is None or not wanted or min(wanted) < 0 else cut(logprobs, max(wanted))

    def _publish(self, scheduled: Any, computed: Any, logprobs: Any, by_client: Mapping[int, Any]) -> None:  # noqa: ANN401
        """Publish a step with all its logprobs, and cut each output's logprobs to the number that the client wants."""
        unpublished = self._requests.names_of(self._client.take_aborts())
        last_rows, self._last_rows = self._last_rows + self._requests.abort(unpublished), NO_ROWS
        for scores in self._requests.prompts.taken(computed.prompt_logprobs_dict):
            for chunk in scores.chunks():
                self._out.publish_event(RequestEvent(prompt_scores=chunk))
        outputs = list(chain.from_iterable(each.outputs for each in by_client.values()))
        rows, stopped = self._requests.rows_of(scheduled, computed.req_id_to_index, outputs)
        self._ended.update(stopped, unpublished)
        for prompt in self._requests.cached_prompts:
            self._out.admitted(*prompt, weight_version=self._weight_version)
        if self._experts is not None:
            self._experts.collect(outputs)
            for event in self._experts.ended(rows):
                self._out.publish_event(event)
        if rows := last_rows + rows:
            self._emit(rows, scheduled, logprobs, computed.sampling_masks if self._has_masks else None)
        if len(set(self._asked.values())) > 1:
            for output in outputs:
                if output.new_logprobs is not None:
                    output.new_logprobs = cut(output.new_logprobs, self._asked.get(output.request_id, _EVERY_TOKEN))

    def _emit(self, rows: Rows, scheduled: Any, logprobs: Any, masks: Any) -> None:  # noqa: ANN401
        if self._choosing and not self._choosing.isdisjoint(scheduled.num_scheduled_tokens):
            rows.top_ks[:] = 0  # these lines contain the chosen ids instead of the most probable tokens
        try:
            arrays = self._requests.arrays(rows, logprobs)
            if masks is not None:
                add_masks(arrays, rows, masks)
        except ValueError as error:  # vLLM's arrays do not match the rows
            request_ids = rows.request_ids.tolist()
            lost = self._requests.names_of(request_ids)
            self._requests.abort(lost)
            self._ended.update(lost)
            for request_id in request_ids:
                self._out.failed(request_id, ErrorCode.ERROR_CODE_ENGINE, str(error))
            return
        arrays.weight_version = self._weight_version
        self._out.emit(arrays)


def cut(logprobs: Any, alternatives: int) -> Any:  # noqa: ANN401 - vLLM's LogprobsLists
    """Cut logprobs to a number of alternatives, or keep all if the number is negative."""
    columns = alternatives + 1
    if columns <= 0 or columns >= logprobs.logprobs.shape[1]:
        return logprobs
    return logprobs._replace(
        logprob_token_ids=np.ascontiguousarray(logprobs.logprob_token_ids[:, :columns]),
        logprobs=np.ascontiguousarray(logprobs.logprobs[:, :columns]),
    )
