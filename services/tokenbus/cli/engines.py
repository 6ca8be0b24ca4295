"""The option --engine of `tokenbus worker` and `tokenbus up`, which names an installed engine."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenbus.cli.arguments import Parser
from tokenbus.cli.configuration import load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.plugins import ENGINES, PluginError, names
from tokenbus.settings import Settings
from tokenbus.worker import Engine, EngineKind, engine_kind

DEFAULT_ENGINE = "ngram"


def declare_engine(parser: Parser, *, has_options: bool) -> None:
    """Declare `--engine` and, if `has_options`, the options of the chosen engine."""
    shown = "; --help shows its options" if has_options else ""
    parser.add_argument(
        "--engine",
        choices=names(ENGINES),
        default=DEFAULT_ENGINE,
        help=f"the engine that computes the tokens (default: {DEFAULT_ENGINE}){shown}",
    )
    parser.add_argument("--model", metavar="FOLDER", help="the folder of the model, for an engine that reads one")

    if has_options and {"-h", "--help"} & set(parser.given):
        listed = "\n".join(f"  {each}: {_summary(each)}" for each in names(ENGINES))
        parser.add_argument_group("engines", f"{listed}\n\nPackages add engines as entry points of `{ENGINES}`.")
    name = _chosen(parser.given)
    if name not in names(ENGINES):  # the parser will refuse the name
        return
    kind = engine_kind(name)
    parser.keeps_rest = kind.takes_rest
    if has_options:
        try:
            kind.declare(parser)
        except argparse.ArgumentError as error:
            raise CommandError(f"engine {name}: its options cannot be declared: {error}") from None


def _summary(name: str) -> str:
    try:
        return engine_kind(name).summary
    except PluginError as error:
        return f"({error})"


def load_engine_settings(options: argparse.Namespace) -> Settings:
    """Load the settings. The engine sets the default model name and whether a separate process publishes tokens."""
    kind = engine_kind(options.engine)
    if options.model and not kind.reads_model:
        name = "to name the model for clients, use --set worker.model=NAME"
        raise CommandError(f"--model: the engine {options.engine} reads no model folder; {name}", WRONG_USE)
    options.model = Path(options.model) if options.model else None
    settings = load_settings(options)
    if options.model and not settings.worker.model:
        settings = replace(settings, worker=replace(settings.worker, model=_model_name(options, kind)))
    is_apart = kind.publishes_apart and sys.platform == "linux"
    return replace(settings, worker=replace(settings.worker, publisher="process" if is_apart else "thread"))


def _model_name(options: argparse.Namespace, kind: EngineKind) -> str:
    try:
        return kind.model_name(getattr(options, "rest", ())) or str(options.model.resolve().name)
    except ValueError as error:
        raise CommandError(str(error), WRONG_USE) from None


def create_engine(options: argparse.Namespace, settings: Settings) -> Engine:
    """Create the chosen engine. Raises CommandError."""
    kind = engine_kind(options.engine)
    try:
        return kind.make(options, settings)
    except ValueError as error:
        raise CommandError(str(error), WRONG_USE) from None
    except (RuntimeError, ImportError) as error:  # damaged weights, or a missing device or package
        raise CommandError(str(error)) from None


def _chosen(given: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    try:
        return str(parser.parse_known_args(given)[0].engine)
    except argparse.ArgumentError:  # the parser will report `--engine` without a name
        return ""
