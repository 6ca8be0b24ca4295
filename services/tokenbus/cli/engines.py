"""The installed engines as `tokenbus worker` and `tokenbus up` offer them: by the names of their entry points."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenbus.cli.arguments import Parser
from tokenbus.cli.commands import summaries
from tokenbus.cli.configuration import load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.plugins import ENGINES, names
from tokenbus.settings import Settings
from tokenbus.worker import Engine, EngineKind, engine_kind

DEFAULT_ENGINE = "ngram"


def declare_engine(parser: Parser, *, has_options: bool) -> None:
    """Declare `--engine`, and if asked for the options of the engine that the command line names.

    The command keeps what follows `--` for an engine that takes it.
    """
    shown = "; with --help, its own options are shown" if has_options else ""
    parser.add_argument(
        "--engine",
        choices=names(ENGINES),
        default=DEFAULT_ENGINE,
        help=f"what computes the tokens ({DEFAULT_ENGINE}){shown}",
    )

    def declare_later(given: Sequence[str]) -> None:
        if has_options and {"-h", "--help"} & set(given):
            listed = "\n".join(f"  {each}: {summary}" for each, summary in summaries(ENGINES, EngineKind).items())
            parser.add_argument_group("engines", f"{listed}\n\nA package adds its own as entry points of `{ENGINES}`.")
        name = _chosen(given)
        if name not in names(ENGINES):  # the parser refuses it
            return
        kind = engine_kind(name)
        parser.keeps_rest = kind.takes_rest
        if has_options:
            try:
                kind.declare(parser)
            except argparse.ArgumentError as error:
                raise CommandError(f"engine {name}: its options cannot be declared: {error}") from None

    parser.declare_later = declare_later


def load_engine_settings(options: argparse.Namespace) -> Settings:
    """Return the settings as suits the chosen engine: `--model` may be a folder, and where it publishes is known."""
    kind = engine_kind(options.engine)
    settings = _with_model(options, kind) if kind.reads_model else load_settings(options)
    is_apart = kind.publishes_apart and sys.platform == "linux"
    return replace(settings, worker=replace(settings.worker, publisher="process" if is_apart else "thread"))


def _with_model(options: argparse.Namespace, kind: EngineKind) -> Settings:
    given = vars(options)
    folder = given.pop("worker.model")
    options.model = folder and Path(folder)
    settings = load_settings(options)
    if settings.worker.model or not folder:
        return settings
    try:
        name = kind.model_name(getattr(options, "rest", ())) or Path(folder).resolve().name
    except ValueError as error:
        raise CommandError(str(error), WRONG_USE) from None
    return replace(settings, worker=replace(settings.worker, model=name))


def made(options: argparse.Namespace, settings: Settings) -> Engine:
    """Make the chosen engine; a CommandError says in one line why that cannot be."""
    kind = engine_kind(options.engine)
    try:
        return kind.make(options, settings)
    except ValueError as error:
        raise CommandError(str(error), WRONG_USE) from None
    except (RuntimeError, ImportError) as error:  # weights that are damaged, a device or a package that is missing
        raise CommandError(str(error)) from None


def _chosen(given: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    try:
        return str(parser.parse_known_args(given)[0].engine)
    except argparse.ArgumentError:  # as `--engine` without a name: the command's own parser says so
        return ""
