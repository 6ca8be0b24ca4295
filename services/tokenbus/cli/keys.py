"""tokenbus keys."""

import argparse
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tokenbus.bus import Role
from tokenbus.bus.allow_list import AllowListError, checked_name, new_key, read_keys, write_keys
from tokenbus.bus.keys import create_key, public_key
from tokenbus.bus.watched_files import locked
from tokenbus.cli.arguments import Parser
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.printable import printable, reason_of

_DESCRIPTION = """\
Create the keys of processes that communicate over TCP, and manage the allow-list, the file of keys that may connect to
the processor. The processor applies a change within a second, without a restart, and disconnects revoked keys.

Each process needs its own secret key, as bus.key_file: only its owner may read the file, and the key is never printed.
All processes but the processor need the processor's public key, as bus.server_key. PUBLIC is the path of a public key,
such as keys/worker-0.key, or the key's 40 characters.

  --role worker    publish tokens, as a worker whose id matches the patterns
  --role client    send requests, as a client whose name matches the patterns
  --role observer  watch the workers' streams (tap, record, the inspector)
  --role prompts   as an observer, see the prompts of sessions and scores of prompts
  --role operator  pause engines, change their weights and adapters

To rotate a key, add a second key under the same name, restart the process with it, and revoke the first by its PUBLIC.
A revoked key stays in the file, so that nobody can add it again.

examples:
  tokenbus keys make worker-0
  tokenbus keys add worker-0 keys/worker-0.key --role worker
  tokenbus keys add gateway keys/gateway.key --role client --role observer
  tokenbus keys revoke worker-0
"""
_VARIABLE = "TOKENBUS_BUS_ALLOWED_KEYS"
_DEFAULT = "keys/allowed.toml"


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    make, add, listing, revoke = parser.actions(
        make="create a process's key: NAME.key_secret and NAME.key in a folder; existing files stay",
        add="allow a key, with each given --role",
        list="show the allow-list",
        revoke="revoke a key and disconnect it",
    )
    make.add_argument("name", metavar="NAME", help="the name of both files")
    make.add_argument("--folder", type=Path, default=Path("keys"), metavar="DIR", help="the folder (keys)")
    add.add_argument("name", metavar="NAME", help="the key's name")
    add.add_argument("public", metavar="PUBLIC", help="the path of its public key, or the key's 40 characters")
    roles = [role.value for role in Role]
    add.add_argument("--role", action="append", required=True, choices=roles, help="a role; may be repeated")
    pattern = "allowed worker ids or client names, with * and ?; may be repeated (default: NAME)"
    add.add_argument("--names", action="append", metavar="PATTERN", help=pattern)
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    revoke.add_argument("key", metavar="NAME|PUBLIC", help="the key's name, or its public key")
    for each in (add, listing, revoke):
        default = os.environ.get(_VARIABLE) or _DEFAULT
        where = f"the allow-list (${_VARIABLE}, else {_DEFAULT})"
        each.add_argument("--file", type=Path, default=Path(default), metavar="PATH", help=where)


def run(options: argparse.Namespace) -> int:
    actions = {"make": _make, "add": _add, "list": _list, "revoke": _revoke}
    try:
        actions[options.action](options)
    except OSError as error:
        raise CommandError(f"{error.filename or options.file}: {reason_of(error)}", WRONG_USE) from None
    return 0


def _make(options: argparse.Namespace) -> None:
    try:
        public, secret = create_key(options.folder, checked_name(options.name))
    except ValueError as error:
        raise CommandError(f"make: {error}", WRONG_USE) from None
    except FileExistsError as error:
        existing = error.filename2 or error.filename
        raise CommandError(f"{existing}: exists already; a key is never replaced", WRONG_USE) from None
    print(f"secret  {printable(str(secret))}  for this process only: bus.key_file")
    print(f"public  {printable(str(public))}  for the other processes")
    print(f"key     {public_key(str(public)).decode()}")


def _add(options: argparse.Namespace) -> None:
    name, path = options.name, options.file
    try:
        public = public_key(options.public).decode()
    except ValueError as error:
        raise CommandError(f"add: PUBLIC: {error}, got {options.public!r}", WRONG_USE) from None
    try:
        key = new_key(name, public, dict.fromkeys(options.role), dict.fromkeys(options.names or [name]))
    except ValueError as error:
        raise CommandError(f"add: {error}", WRONG_USE) from None
    with locked(path):
        keys = read_keys(path) if path.exists() else []
        known = next((each for each in keys if each.public == public), None)
        if known is not None:
            why = "was revoked: make a new one" if known.revoked else "is in the list already: revoke it first"
            raise AllowListError(f"add: this key {why}, as {known.identity.name}")
        write_keys(path, [*keys, key])
    added = f"{', '.join(sorted(key.identity.roles))} as {', '.join(key.identity.names)}"
    print(printable(f"added {name}: {added} in {path}"))


def _revoke(options: argparse.Namespace) -> None:
    given, path = options.key, options.file
    try:
        public = public_key(given).decode()
    except ValueError:
        public = ""
    now = datetime.now(UTC).replace(microsecond=0)
    with locked(path):
        keys = read_keys(path) if path.exists() else []
        found = [key for key in keys if (key.public == public if public else key.identity.name == given)]
        live = [key for key in found if key.revoked is None]
        if not live:
            raise AllowListError(f"revoke: {'revoked already' if found else 'no such key'}: {given!r}")
        write_keys(path, [replace(key, revoked=now) if key in live else key for key in keys])
    count = f"{len(live)} {'key' if len(live) == 1 else 'keys'}"
    print(printable(f"revoked {live[0].identity.name}: {count} in {path}"))


def _list(options: argparse.Namespace) -> None:
    keys = read_keys(options.file)
    if options.json:
        rows = [
            {
                "name": key.identity.name,
                "public": key.public,
                "roles": sorted(key.identity.roles),
                "names": list(key.identity.names),
                "added": key.added.isoformat(),
                "revoked": None if key.revoked is None else key.revoked.isoformat(),
            }
            for key in keys
        ]
        print(json.dumps({"file": str(options.file), "keys": rows}, indent=2))
        return
    for key in keys:
        may = f"{','.join(sorted(key.identity.roles))}  {','.join(key.identity.names)}"
        state = f"revoked {key.revoked}" if key.revoked else f"added {key.added}"
        print(printable(f"{key.identity.name}  {key.public}  {may}  {state}"))
    if not keys:
        print("no key may connect")
