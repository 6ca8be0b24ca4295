"""ControlRoutes: vLLM's HTTP routes for controlling engines, which need the key of an operator."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.client import ControlError, Operator
from tokenbus.client.operator import MODES, States
from tokenbus.gateway.access import owner_of, visitor_of
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.gateway import Gateway
from tokenbus.gateway.request_body import read_body
from tokenbus.gateway.response import json_response
from tokenbus.gateway.validation import check, invalid, parse_json
from tokenbus.settings.errors import shown
from tokenbus_contracts.generated.control_pb2 import EngineState
from tokenbus_contracts.generated.logprob_batch_pb2 import ValueKind

_MOST_VERSION = 2**63 - 1
_SECONDS = 1800.0
_REQUEST_ID = re.compile(r"(?:[a-z]+[-_])*(?!0{16})([0-9a-f]{16})")
_PREFIX = re.compile(r"\A(?:generate-tokens-|chatcmpl-|cmpl-)")
"""Prefixes of the ids of answers."""
_OF_ADAPTERS = {"load_adapter.name": 400, "load_adapter.folder": 404, "unload_adapter.name": 404}
"""The HTTP status for a refused LoRA adapter, by the field that the engine's error names."""
_Arguments = Mapping[str, Any]
_Do = Callable[[Operator, _Arguments], Awaitable[object]]


class ControlRoutes:
    """Routes that apply a command to all workers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._one_at_a_time = asyncio.Lock()
        """Serializes weight updates. Otherwise a retry would mistake the earlier update's pause for an operator's."""

    def routes(self) -> list[Route]:
        posts: dict[str, _Do] = {
            "/pause": _pause,
            "/resume": _resume,
            "/abort_requests": self._abort_requests,
            "/inference/v1/abort_requests": self._abort_named,
            "/sleep": _sleep,
            "/wake_up": _wake_up,
            "/reset_prefix_cache": _reset_prefix_cache,
            "/init_weight_transfer_engine": _stage("init", "init_info", "Weight transfer initialized"),
            "/start_weight_update": _stage("start", "", "Weight update started"),
            "/update_weights": self._update_weights,
            "/finish_weight_update": _stage("finish", "", "Weight update finished"),
            "/shutdown_weight_transfer_engine": _stage("shutdown", "", "Weight transfer shut down"),
            "/update_weight_version": _update_weight_version,
            "/collective_rpc": _collective_rpc,
            "/load_lora_adapter": self._load_adapter,
            "/v1/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/adapters": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        gets: dict[str, _Do] = {
            "/is_paused": _described(lambda states: {"is_paused": all(each.is_paused for each in states.values())}),
            "/is_sleeping": _described(
                lambda states: {"is_sleeping": any(each.is_sleeping for each in states.values())}
            ),
            "/get_world_size": _described(lambda states: {"world_size": _processes(states)}),
            "/weight_info": _described(_weights),
            "/server_info": _server_info,
        }
        return [
            *(Route(path, self._handler(do), methods=["POST"]) for path, do in posts.items()),
            *(Route(path, self._handler(do)) for path, do in gets.items()),
            Route("/adapters/{lora_name}", self._handler(self._unload_adapter), methods=["DELETE"]),
        ]

    def _handler(self, do: _Do) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self._check_may(request)
            arguments: dict[str, Any] = request.path_params | dict(request.query_params)
            if tags := request.query_params.getlist("tags"):
                arguments["tags"] = tags
            if request.method == "POST":
                arguments |= await self._body(request)
            operator = Operator(self._gateway.client, timeout_seconds=_SECONDS, on_behalf_of=owner_of(request.scope))
            try:
                # A command continues even if the client disconnects.
                answer = await asyncio.shield(do(operator, arguments))
            except ApiError as error:
                raise error.renamed({name: f"query.{name}" for name in request.query_params}) from None
            except ControlError as error:
                raise _failed(error) from None
            except ValueError as error:
                raise ApiError(400, str(error), code="invalid_value") from None
            except TimeoutError:
                raise ApiError(503, "no processor answers", code="no_processor", retry_after_ms=1000) from None
            return json_response(answer)

        return handle

    async def _abort_requests(self, operator: Operator, arguments: _Arguments) -> object:
        if "request_ids" not in arguments:
            async with self._one_at_a_time:
                return await _abort_all(operator)
        return self._abort(_request_ids(arguments["request_ids"]))

    async def _abort_named(self, _operator: Operator, arguments: _Arguments) -> object:
        """Abort requests, given by their ids or by ids that clients chose. Ids of ended requests are ignored."""
        named, found = self._gateway.named, list[int]()
        for name in _texts(arguments, "request_ids"):
            match = _REQUEST_ID.fullmatch(name)
            found += named.get(name) or named.get(_PREFIX.sub("", name)) or ([int(match[1], 16)] if match else [])
        return self._abort(found)

    def _abort(self, request_ids: Sequence[int]) -> object:
        client = self._gateway.client
        if not client.is_connected:
            raise TimeoutError
        for request_id in request_ids:
            client.abort(request_id)
        return {"status": "aborted"}

    async def _load_adapter(self, operator: Operator, arguments: _Arguments) -> object:
        fields = ("name", "src") if "name" in arguments else ("lora_name", "lora_path")  # names in SageMaker or vLLM
        name, folder = (_text(arguments, field) for field in fields)
        try:
            await operator.load_adapter(name, folder, replace=_flag(arguments, "load_inplace"))
        except ControlError as error:
            raise _of_adapter(error) from None
        self._gateway.adapter_folders[name] = folder
        await self._gateway.learn_models(is_new=True)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload_adapter(self, operator: Operator, arguments: _Arguments) -> object:
        name = _text(arguments, "lora_name")
        try:
            await operator.unload_adapter(name)
        except ControlError as error:
            raise _of_adapter(error) from None
        self._gateway.adapter_folders.pop(name, None)
        await self._gateway.learn_models(is_new=True)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _update_weights(self, operator: Operator, arguments: _Arguments) -> object:
        """Update the weights from tensors, as in vLLM, or from a folder, as in prime-rl."""
        async with self._one_at_a_time:
            if "weight_dir" not in arguments:
                return await _update_by_transfer(operator, arguments)
            folder, version = _text(arguments, "weight_dir"), _version(arguments, "weight_version")
            return {"message": "Weights updated", **_weights(await operator.update_weights(folder, version))}

    def _check_may(self, request: Request) -> None:
        key, may = visitor_of(request.scope).caller.key, self._gateway.settings.gateway.control
        why = "not offered, as gateway.control is false and there is no API key that may"
        if key is not None:
            may = key.operator
            why = "an API key that may control engines, as `tokenbus api-keys add --operator` makes it, got another"
        if not may:
            raise ApiError(403, f"{request.url.path}: {why}", code="not_an_operator")

    async def _body(self, request: Request) -> dict[str, Any]:
        if not (request.headers.get("content-length", "0").strip("0") or "transfer-encoding" in request.headers):
            return {}
        gateway = self._gateway
        async with gateway.bodies.hold(owner_of(request.scope)) as held:
            data = await read_body(request, gateway.settings.gateway, held)
            value = parse_json(data)
        check(isinstance(value, dict), "body", "expected object", value)
        return {name: each for name, each in value.items() if each is not None}


def _failed(error: ControlError) -> ApiError:
    return ApiError(409 if error.states else 503, str(error), code="not_done_by_all")


def _of_adapter(error: ControlError) -> ApiError:
    """Return the error, with the status that vLLM uses, if no engine could load or unload an adapter."""
    kinds = {reason.partition(":")[0] for reason in error.failed.values()}
    if len(kinds) > 1 or error.states.keys() - error.failed.keys():
        return _failed(error)
    return ApiError(_OF_ADAPTERS.get(kinds.pop(), 500), str(error), code="not_done_by_all")


def _text(arguments: _Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(name, f"a text, got {'none' if value is None else shown(value)}")
    return value


def _texts(arguments: _Arguments, name: str) -> list[str]:
    texts: Any = arguments.get(name)
    are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    check(are_texts, name, "a list of texts", texts)
    return list(texts)


def _flag(arguments: _Arguments, name: str) -> bool:
    value = arguments.get(name, False)
    check(str(value).lower() in {"true", "false", "1", "0"}, name, "true or false", value)
    return str(value).lower() in {"true", "1"}


def _mode(arguments: _Arguments) -> str:
    mode = arguments.get("mode", "abort")
    check(isinstance(mode, str) and mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)
    return str(mode)


def _version(arguments: _Arguments, name: str) -> int:
    """Return a version given as a number or, as in vLLM, as a text. Return 0 if no version is given."""
    value = arguments.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:32])
    holds = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_VERSION
    check(holds, name, f"a whole number up to {_MOST_VERSION}, also as a text", arguments.get(name))
    return int(value)


def _described(read: Callable[[States], object]) -> _Do:
    async def do(operator: Operator, _: _Arguments) -> object:
        return read(await operator.describe())

    return do


def _processes(states: States) -> int:
    return sum(max(1, state.world_size) for state in states.values())


async def _pause(operator: Operator, arguments: _Arguments) -> object:
    mode = _mode(arguments)
    await operator.pause(mode, lease_seconds=_seconds(arguments, "lease_s"))
    if mode != "keep" and _flag(arguments, "clear_cache"):
        await operator.reset_prefix_cache()
    return {"status": "paused"}


def _seconds(arguments: _Arguments, name: str) -> float:
    given = arguments.get(name, 0)
    try:
        return float(given)
    except (TypeError, ValueError):
        raise invalid(name, f"a number of seconds, got {shown(given)}") from None


async def _collective_rpc(operator: Operator, arguments: _Arguments) -> object:
    args, kwargs = arguments.get("args", []), arguments.get("kwargs", {})
    check(isinstance(args, list), "args", "a list", args)
    check(isinstance(kwargs, dict), "kwargs", "an object", kwargs)
    method, seconds = _text(arguments, "method"), _seconds(arguments, "timeout")
    return {"results": await operator.collective_rpc(method, args, kwargs, timeout_seconds=seconds)}


async def _resume(operator: Operator, _: _Arguments) -> object:
    await operator.resume()
    return {"status": "resumed"}


def _request_ids(names: Any) -> list[int]:  # noqa: ANN401 - JSON
    check(isinstance(names, list), "request_ids", "a list of texts", names)
    found = []
    for name in names:
        match = _REQUEST_ID.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise invalid("request_ids", f"ids as in the header x-request-id of an answer, got {shown(name)}")
        found.append(int(match[1], 16))
    return found


async def _abort_all(operator: Operator) -> object:
    before = await operator.describe()
    await operator.pause("abort")
    if not any(state.is_paused for state in before.values()):
        await operator.resume()
    return {"status": "aborted"}


async def _sleep(operator: Operator, arguments: _Arguments) -> object:
    level = arguments.get("level", 1)
    check(str(level) in {"0", "1", "2"}, "level", "0, 1 or 2", level)
    await operator.sleep(int(level), _mode(arguments))
    return {"status": "sleeping", "level": int(level)}


async def _wake_up(operator: Operator, arguments: _Arguments) -> object:
    tags = None if arguments.get("tags") is None else _texts(arguments, "tags")
    states = await operator.wake_up(tags or ())
    sleeps = any(state.is_sleeping for state in states.values())
    return {"status": "sleeping" if sleeps else "awake", "tags": tags}


async def _reset_prefix_cache(operator: Operator, arguments: _Arguments) -> object:
    also_running = _flag(arguments, "reset_running_requests")
    try:
        await operator.reset_prefix_cache(also_running=also_running)
    except ControlError as error:
        return {"success": False, "error": str(error)}
    return {"success": True}


def _stage(stage: str, member: str, message: str) -> _Do:
    """Return the command for a stage of vLLM's weight transfer. The arguments are the body, or `member` of the body."""

    async def do(operator: Operator, arguments: _Arguments) -> object:
        if member:
            check(isinstance(arguments.get(member), dict | list), member, "an object", arguments.get(member))
        version = _version(arguments, "weight_version")
        given = arguments[member] if member else {k: v for k, v in arguments.items() if k != "weight_version"}
        await operator.transfer_weights(stage, given, version)
        return {"message": message}

    return do


_update_by_transfer = _stage("update", "update_info", "Weights updated")


async def _update_weight_version(operator: Operator, arguments: _Arguments) -> object:
    version = _version(arguments, "new_version")
    if not version:
        raise invalid("new_version", "a whole number from 1, also as a text, got none")
    await operator.set_weight_version(version)
    return {"success": True, "new_version": str(version)}


def _weights(states: States) -> dict[str, object]:
    versions = {name: state.weight_version for name, state in sorted(states.items())}
    common = set(versions.values())
    return {"weight_version": str(common.pop()) if len(common) == 1 else None, "workers": versions}


async def _server_info(operator: Operator, arguments: _Arguments) -> object:
    form = arguments.get("config_format", "json")
    check(form in ("json", "text"), "config_format", "json or text", form)
    states = await operator.describe()
    return {"vllm_config": vllm_config(list(states.values()), _processes(states))}


def vllm_config(states: Sequence[EngineState], processes: int) -> dict[str, object]:
    """Return the fields of vLLM's configuration that clients read, with the values that all engines share."""
    transfers = {state.weight_transfer for state in states}
    adapters, rank = (min(getattr(state, name) for state in states) for name in ("max_adapters", "max_adapter_rank"))
    kinds = {ValueKind.Name(state.value_kind).removeprefix("VALUE_KIND_").lower() for state in states}
    return {
        "model_config": {
            "dtype": _shared({f"torch.{state.dtype}" if state.dtype else "" for state in states}),
            "logprobs_mode": _shared(kinds - {"unspecified"}),
        },
        "parallel_config": {"data_parallel_size": 1, "world_size": processes},
        "weight_transfer_config": None if "" in transfers else {"backend": _shared(transfers)},
        "lora_config": {"max_loras": adapters, "max_lora_rank": rank} if adapters else None,
    }


def _shared(values: AbstractSet[str]) -> str:
    """Return the value that all engines share, or different values joined by commas."""
    return ", ".join(sorted(values - {""})) or "unknown"
