"""A connector of vLLM's that moves the cache by files, where a decode worker is told that a prefill worker wrote it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector  # noqa: TID253 - for vLLM alone


class NamedCache(ExampleConnector):  # type: ignore[misc]
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        asked = request.kv_transfer_params or {}
        return super().request_finished(request, block_ids)[0], (
            {"written": request.num_prompt_tokens} if asked.get("do_remote_decode") else None
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:  # noqa: ANN401
        named = (request.kv_transfer_params or {}).get("written")
        return super().get_num_new_matched_tokens(request, num_computed_tokens) if named else (0, False)
