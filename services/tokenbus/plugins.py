"""Plugins: engines and tokenizers that installed distributions bring, found by the names of their entry points.

Only the one that is asked for is imported, so that a broken one does no harm to the others.
"""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

ENGINES = "tokenbus.engines"
"""The entry-point group of engines; each names a `worker.EngineKind`."""
TOKENIZERS = "tokenbus.tokenizers"
"""The entry-point group of tokenizers; each names a callable without arguments that returns a `Tokenizer`."""

END_NAME = "<|end|>"
"""What people see in place of an end token, which has no text and, outside a model's folder, no name."""

T = TypeVar("T")


class PluginError(RuntimeError):
    """A plugin is not installed, is installed twice, cannot be imported, or is not what its group promises."""


@runtime_checkable
class Tokenizer(Protocol):
    """Translates between text and token ids, as one engine does."""

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""


def names(group: str) -> list[str]:
    """Return the names of a group's installed plugins, without importing any of them."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load(group: str, name: str, kind: type[T]) -> T:
    """Import one plugin and return it; a PluginError of one line says why that cannot be."""
    found = list(entry_points(group=group, name=name))
    if not found:
        raise PluginError(f"{group}: one of {', '.join(names(group)) or 'none installed'}, got {name!r}")
    if len(found) > 1:
        values = " and ".join(sorted(entry.value for entry in found))
        raise PluginError(f"{group}: {name!r} is brought by more than one distribution: {values}")
    try:
        plugin = found[0].load()
    except Exception as error:
        why = " ".join(str(error).split())
        raise PluginError(f"{group}: {name!r} cannot be imported: {type(error).__name__}: {why}") from error
    if not isinstance(plugin, kind):
        raise PluginError(f"{group}: {name!r} must be an {kind.__name__}, got {type(plugin).__name__}")
    return plugin


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer: an object with `encode(text)`, `token_bytes(token_id)` and `vocabulary_size`.

    Args:
        name: Of an installed tokenizer: `ngram` or `bytes`, as the engines ngram and paddle have them; or the path of a
            model's folder, with a slash.

    Raises:
        PluginError: There is no such tokenizer, or it cannot be loaded.

    Example:
        tokenizer = tokenbus.load_tokenizer("ngram")
        token_ids = tokenizer.encode("Once upon a time")
        print(b"".join(map(tokenizer.token_bytes, token_ids)).decode())
    """
    if "/" in name:
        return _model_tokenizer(name)
    factory = load(TOKENIZERS, name, object)
    tokenizer = factory() if callable(factory) else factory
    if not isinstance(tokenizer, Tokenizer):
        raise PluginError(f"{TOKENIZERS}: {name!r} must give a Tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def _model_tokenizer(folder: str) -> Tokenizer:
    try:
        from tokenbus.model_files import ModelTokenizer  # noqa: PLC0415 - the extra models may be missing
    except ImportError as error:
        raise PluginError(f"a model's own tokenizer needs the extra models: {error}") from None
    try:
        return ModelTokenizer(Path(folder))
    except ValueError as error:
        raise PluginError(str(error)) from None
