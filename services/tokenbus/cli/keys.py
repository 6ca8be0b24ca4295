"""tokenbus keys."""

import argparse
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tokenbus.bus import Role
from tokenbus.bus.allow_list import AllowedKey, AllowListError, checked_name, new_key, read_keys, write_keys
from tokenbus.bus.keys import create_key, public_key
from tokenbus.bus.watched_files import locked
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.printable import printable, reason_of

_DESCRIPTION = """\
Create the keys of processes that communicate over TCP, and manage the allow-list, the file of keys that may connect to
the processor. The processor applies a change within a second, without a restart, and disconnects revoked keys.

  make NAME            create a process's key: NAME.key_secret and NAME.key in a folder; existing files stay
  add NAME PUBLIC      allow a key, with each given --role
  list                 show the allow-list
  revoke NAME|PUBLIC   revoke a key and disconnect it

Each process needs its own secret key, as bus.key_file: only its owner may read the file, and the key is never printed.
All processes but the processor need the processor's public key, as bus.server_key. PUBLIC is the path of a public key,
such as keys/worker-0.key, or the key's 40 characters.

  --role worker    publish tokens, as a worker whose id matches the patterns
  --role client    send requests, as a client whose name matches the patterns
  --role observer  watch the workers' streams (tap, record, the inspector)
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
_BELONGS_TO = {"role": "add", "names": "add", "folder": "make", "json": "list"}
"""The action of each option."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.usage = f"{parser.prog} {{make,add,list,revoke}} [NAME] [PUBLIC] [options]"
    parser.add_argument("action", choices=("make", "add", "list", "revoke"), help="what to do")
    parser.add_argument("files", nargs="*", metavar="NAME|PUBLIC", help="the key's name; for add also its public part")
    parser.add_argument(
        "--role", action="append", choices=[role.value for role in Role], help="add: a role of the key; may be repeated"
    )
    parser.add_argument(
        "--names",
        action="append",
        metavar="PATTERN",
        help="add: allowed worker ids or client names, with * and ?; may be repeated (default: NAME)",
    )
    parser.add_argument("--folder", metavar="DIR", help="make: the folder for both files (keys)")
    parser.add_argument("--file", metavar="PATH", help=f"the allow-list (${_VARIABLE}, else {_DEFAULT})")
    parser.add_argument("--json", action="store_true", help="list: print one JSON document")


def run(options: argparse.Namespace) -> int:
    path = Path(options.file or os.environ.get(_VARIABLE) or _DEFAULT)
    for name, action in _BELONGS_TO.items():
        if getattr(options, name) and options.action != action:
            raise CommandError(f"--{name}: only with {action}, got {options.action}", WRONG_USE)
    try:
        if options.action == "make":
            _make(Path(options.folder or "keys"), options)
        elif options.action == "list":
            _expect(options, 0, "list: no names")
            _show(path, read_keys(path), as_json=options.json)
        else:
            done = _add(path, options) if options.action == "add" else _revoke(path, options)
            print(printable(f"{done} in {path}"))
    except OSError as error:
        raise CommandError(f"{error.filename or path}: {reason_of(error)}", WRONG_USE) from None
    return 0


def _make(folder: Path, options: argparse.Namespace) -> None:
    (name,) = _expect(options, 1, "make: NAME")
    try:
        public, secret = create_key(folder, checked_name(name))
    except ValueError as error:
        raise CommandError(f"make: {error}", WRONG_USE) from None
    except FileExistsError as error:
        existing = error.filename2 or error.filename
        raise CommandError(f"{existing}: exists already; a key is never replaced", WRONG_USE) from None
    print(f"secret  {printable(str(secret))}  for this process only: bus.key_file")
    print(f"public  {printable(str(public))}  for the other processes")
    print(f"key     {public_key(str(public)).decode()}")


def _add(path: Path, options: argparse.Namespace) -> str:
    name, given = _expect(options, 2, "add: NAME PUBLIC")
    if not options.role:
        raise CommandError(f"add: --role is missing: one or more of {', '.join(Role)}", WRONG_USE)
    try:
        public = public_key(given).decode()
    except ValueError as error:
        raise CommandError(f"add: PUBLIC: {error}, got {given!r}", WRONG_USE) from None
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
    return f"added {name}: {', '.join(sorted(key.identity.roles))} as {', '.join(key.identity.names)}"


def _revoke(path: Path, options: argparse.Namespace) -> str:
    (given,) = _expect(options, 1, "revoke: NAME or PUBLIC")
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
    return f"revoked {live[0].identity.name}: {len(live)} {'key' if len(live) == 1 else 'keys'}"


def _expect(options: argparse.Namespace, count: int, usage: str) -> list[str]:
    given: list[str] = options.files
    if len(given) != count:
        raise CommandError(f"{usage}, got {' '.join(map(repr, given)) or 'nothing'}", WRONG_USE)
    return given


def _show(path: Path, keys: list[AllowedKey], *, as_json: bool) -> None:
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
    if as_json:
        print(json.dumps({"file": str(path), "keys": rows}, indent=2))
        return
    for key in keys:
        may = f"{','.join(sorted(key.identity.roles))}  {','.join(key.identity.names)}"
        state = f"revoked {key.revoked}" if key.revoked else f"added {key.added}"
        print(printable(f"{key.identity.name}  {key.public}  {may}  {state}"))
    if not keys:
        print("no key may connect")
