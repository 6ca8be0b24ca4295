"""tokenbus api-keys."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tokenbus.cli.arguments import Parser, whole
from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.gateway.api_keys import KeysError, alone, made, read_keys, write_keys

_DESCRIPTION = """\
Create, list and revoke API keys in the file gateway.keys_file. A gateway with that setting requires the header
`Authorization: Bearer KEY`. It reads the file again when it changes, without a restart.

examples:
  tokenbus api-keys add batch --file keys.json --requests-per-minute 600 --concurrent 64
  tokenbus api-keys add page --file keys.json --origin https://app.example
  tokenbus api-keys revoke alice --file keys.json

The default limits of a key are gateway.key_requests_per_minute, and half of gateway.max_requests open requests.
"""


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    add, listing, revoke = parser.actions(
        add="create a key and print it once; the file stores only its hash. Logs show the ID",
        list="show the keys and their limits",
        revoke="remove keys and end their open requests",
    )
    add.add_argument("id", metavar="ID", help="the key's ID")
    add.add_argument("--requests-per-minute", type=whole(), metavar="N", help="limit of new requests")
    add.add_argument("--concurrent", type=whole(), metavar="N", help="limit of open requests, one per choice")
    origin = "the origin of a web page that uses the key; may be repeated"
    add.add_argument("--origin", action="append", default=[], help=origin)
    add.add_argument("--operator", action="store_true", help="allow to pause engines and change their weights")
    listing.add_argument("--json", action="store_true", help="print a JSON object for each key")
    revoke.add_argument("ids", nargs="+", metavar="ID", help="the key's ID")
    for each in (add, listing, revoke):
        declare_settings(each, {"--file": "gateway.keys_file"})


def run(options: argparse.Namespace) -> int:
    name = load_settings(options).gateway.keys_file
    if not name:
        raise CommandError("gateway.keys_file: no file; use that setting or --file", WRONG_USE)
    actions = {"add": _add, "list": _list, "revoke": _revoke}
    try:
        actions[options.action](Path(name), options)
    except KeysError as error:
        raise CommandError(f"{name}: {error}") from None
    return 0


def _add(path: Path, options: argparse.Namespace) -> None:
    limits = {name: getattr(options, name) for name in ("requests_per_minute", "concurrent", "operator")}
    try:
        clear, key = made(options.id, origins=tuple(map(str.lower, options.origin)), **limits)
    except KeysError as error:
        raise CommandError(str(error), WRONG_USE) from None
    with alone(path):
        write_keys(path, [*read_keys(path), key])
    print(clear)
    print(f"tokenbus: the key of {options.id} is shown only now; {path} has its hash", file=sys.stderr)


def _list(path: Path, options: argparse.Namespace) -> None:
    for key in read_keys(path):
        if options.json:
            print(json.dumps({name: value for name, value in asdict(key).items() if name != "sha256"}))
            continue
        limits = [
            f"{key.requests_per_minute} a minute" if key.requests_per_minute else "",
            f"{key.concurrent} open" if key.concurrent else "",
            "operator" if key.operator else "",
            *key.origins,
        ]
        print("  ".join([f"{key.id:16}", key.added, *filter(None, limits)]))


def _revoke(path: Path, options: argparse.Namespace) -> None:
    with alone(path):
        keys = read_keys(path)
        if missing := sorted(set(options.ids) - {key.id for key in keys}):
            raise KeysError(f"no key {', '.join(missing)}")
        write_keys(path, [key for key in keys if key.id not in options.ids])
