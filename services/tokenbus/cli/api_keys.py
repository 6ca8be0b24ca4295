"""tokenbus api-keys."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tokenbus.cli.arguments import whole
from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.gateway.api_keys import ApiKey, KeysError, alone, made, read_keys, write_keys

_DESCRIPTION = """\
Create, list and revoke API keys in the file gateway.keys_file. A gateway with that setting requires the header
`Authorization: Bearer KEY`. It reads the file again when it changes, without a restart.

  add ID       create a key and print it once; the file stores only its hash. Logs show the ID
  list         show the keys and their limits
  revoke ID    remove keys and end their open requests

examples:
  tokenbus api-keys add batch --file keys.json --requests-per-minute 600 --concurrent 64
  tokenbus api-keys add page --file keys.json --origin https://app.example
  tokenbus api-keys revoke alice --file keys.json

The default limits of a key are gateway.key_requests_per_minute, and half of gateway.max_requests open requests.
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("action", choices=("add", "list", "revoke"), help="what to do")
    parser.add_argument("files", nargs="*", metavar="ID", help="the key's ID")
    parser.add_argument("--requests-per-minute", type=whole(), metavar="N", help="add: limit of new requests")
    parser.add_argument("--concurrent", type=whole(), metavar="N", help="add: limit of open requests, one per choice")
    parser.add_argument(
        "--origin", action="append", default=[], help="add: the origin of a web page that uses the key; may be repeated"
    )
    parser.add_argument("--operator", action="store_true", help="add: allow to pause engines and change their weights")
    parser.add_argument("--json", action="store_true", help="list: print a JSON object for each key")
    declare_settings(parser, {"--file": "gateway.keys_file"})


def run(options: argparse.Namespace) -> int:
    name = load_settings(options).gateway.keys_file
    if not name:
        raise CommandError("gateway.keys_file: no file; use that setting or --file", WRONG_USE)
    limits = (options.requests_per_minute, options.concurrent, options.operator, *options.origin)
    if options.action != "add" and any(limits):
        raise CommandError(f"{options.action}: limits are options of `add` only", WRONG_USE)
    path, ids = Path(name), options.files
    if (len(ids) != 1) if options.action == "add" else (bool(ids) == (options.action == "list")):
        wanted = {"add": "one ID", "list": "no ID", "revoke": "one ID or more"}[options.action]
        raise CommandError(f"{options.action}: {wanted}, got {len(ids)}", WRONG_USE)
    try:
        if options.action == "list":
            _list(read_keys(path), as_json=options.json)
        elif options.action == "add":
            _add(path, ids[0], options)
        else:
            _revoke(path, ids)
    except KeysError as error:
        raise CommandError(f"{name}: {error}") from None
    return 0


def _add(path: Path, key_id: str, options: argparse.Namespace) -> None:
    origins = tuple(origin.lower() for origin in options.origin)
    try:
        clear, key = made(
            key_id,
            requests_per_minute=options.requests_per_minute,
            concurrent=options.concurrent,
            origins=origins,
            operator=options.operator,
        )
    except KeysError as error:
        raise CommandError(str(error), WRONG_USE) from None
    with alone(path):
        write_keys(path, [*read_keys(path), key])
    print(clear)
    print(f"tokenbus: the key of {key_id} is shown only now; {path} has its hash", file=sys.stderr)


def _list(keys: tuple[ApiKey, ...], *, as_json: bool) -> None:
    for key in keys:
        facts = {name: value for name, value in asdict(key).items() if name != "sha256"}
        if as_json:
            print(json.dumps(facts))
        else:
            rate, most = key.requests_per_minute, key.concurrent
            limits = [
                *([f"{rate} a minute"] if rate else []),
                *([f"{most} open"] if most else []),
                *(["operator"] if key.operator else []),
                *key.origins,
            ]
            print("  ".join([f"{key.id:16}", key.added, *limits]))


def _revoke(path: Path, ids: list[str]) -> None:
    with alone(path):
        keys = read_keys(path)
        missing = sorted(set(ids) - {key.id for key in keys})
        if missing:
            raise KeysError(f"no key {', '.join(missing)}")
        write_keys(path, [key for key in keys if key.id not in ids])
