"""Plugins: engines and tokenizers from entry points. Only requested plugins are imported."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

ENGINES = "tokenbus.engines"
"""The entry-point group of engines. Each entry is a `worker.EngineKind`."""
TOKENIZERS = "tokenbus.tokenizers"
"""The entry-point group of tokenizers. Each entry is a function without arguments that returns a `Tokenizer`."""

END_NAME = "<|end|>"
"""The name that people see for an end token that has neither a text nor a name."""

T = TypeVar("T")


class PluginError(RuntimeError):
    """A plugin is missing, installed twice, cannot be imported, or has the wrong type."""


@runtime_checkable
class Tokenizer(Protocol):
    """Translates between text and token ids."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be an incomplete character."""


def names(group: str) -> list[str]:
    """Return the names of the installed plugins of a group without importing the plugins."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load(group: str, name: str, kind: type[T]) -> T:
    """Import one plugin. Raises PluginError."""
    found = list(entry_points(group=group, name=name))
    if not found:
        raise PluginError(f"{group}: one of {', '.join(names(group)) or 'none installed'}, got {name!r}")
    if len(found) > 1:
        values = " and ".join(sorted(entry.value for entry in found))
        raise PluginError(f"{group}: {name!r} is installed by more than one distribution: {values}")
    try:
        plugin = found[0].load()
    except Exception as error:
        why = " ".join(str(error).split())
        raise PluginError(f"{group}: {name!r} cannot be imported: {type(error).__name__}: {why}") from error
    if not isinstance(plugin, kind):
        raise PluginError(f"{group}: {name!r} must be an {kind.__name__}, got {type(plugin).__name__}")
    return plugin


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer, which has `encode(text)`, `token_bytes(token_id)` and `vocabulary_size`.

    Args:
        name: The name of an installed tokenizer, such as `ngram` or `bytes` (of the engines ngram and paddle), or the
        path of a model's folder, with a slash.

    Raises:
        PluginError: The tokenizer does not exist or cannot be loaded.

    Example:
        tokenizer = tokenbus.load_tokenizer("ngram")
        token_ids = tokenizer.encode("Once upon a time")
        print(b"".join(map(tokenizer.token_bytes, token_ids)).decode())
    """
    if "/" in name:
        return _model_tokenizer(Path(name))
    if name not in (installed := names(TOKENIZERS)):
        found = f"one of {', '.join(installed)}, or the path of a model's folder, with a slash (./{name})"
        raise PluginError(f"tokenizer: {found}, got {name!r}")
    factory = load(TOKENIZERS, name, object)
    tokenizer = factory() if callable(factory) else factory
    if not isinstance(tokenizer, Tokenizer):
        raise PluginError(f"{TOKENIZERS}: {name!r} must give a Tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def _model_tokenizer(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise PluginError(f"{folder}: no such folder")
    try:
        from tokenbus.model_files import ModelTokenizer  # noqa: PLC0415 - the extra models may be missing
    except ImportError as error:
        raise PluginError(
            f"a model's own tokenizer needs the extra models (pip install 'tokenbus[models]'): {error}"
        ) from None
    try:
        return ModelTokenizer(folder)
    except ValueError as error:
        raise PluginError(str(error)) from None
