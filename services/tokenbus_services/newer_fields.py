"""Newer fields: what a request may have that peers of the schema's first minor would ignore, or refuse."""

from tokenbus_contracts.generated.request_pb2 import Generate

_MINOR_1 = 9
"""The first sampling parameter that minor 1 of the schema added."""
_STOP_IDS_BEFORE, _STOP_BYTES_BEFORE = 64, 256
"""The bounds of minor 0."""


def newer_field(generate: Generate) -> str:
    """Return the first field of a request that minor 0 lacks or bounds more tightly; an empty string: there is none."""
    sampling = generate.sampling
    if generate.HasField("prompt_scoring"):
        return "prompt_scoring"
    if generate.HasField("token_scoring"):
        return "token_scoring"
    if len(sampling.stop_token_ids) > _STOP_IDS_BEFORE:
        return "sampling.stop_token_ids"
    if any(len(text.encode()) > _STOP_BYTES_BEFORE for text in sampling.stop):
        return "sampling.stop"
    given = (field.name for field, value in sampling.ListFields() if field.number >= _MINOR_1 and value)
    return next((f"sampling.{name}" for name in given), "")
