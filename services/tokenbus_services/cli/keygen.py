"""tokenbus keygen: a new key for one process, in two files."""

import argparse
from pathlib import Path

from tokenbus_services.bus.allow_list import NAME
from tokenbus_services.bus.keys import create_key, public_key
from tokenbus_services.cli.errors import WRONG_USE, CommandError
from tokenbus_services.printable import printable, reason_of

_DESCRIPTION = """\
Make a key for one process that speaks to others over tcp, in pyzmq's format: DIR/NAME.key_secret, which only its owner
may read and which that process needs as bus.key_file, and DIR/NAME.key, which is public. A folder that is not there is
made for its owner alone, and no file is ever replaced. The secret is never printed.

Every process has a key of its own: the processor, each worker, each gateway. The processor's public key is what the
others need as bus.server_key; theirs are what `tokenbus keys add` takes.

examples:
  tokenbus keygen --name processor                  keys/processor.key_secret and keys/processor.key
  tokenbus keygen --name worker-0 --folder /etc/tokenbus/keys
  tokenbus keys add worker-0 keys/worker-0.key --role worker
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("--name", default="tokenbus", help="what the key, and its files, are called (tokenbus)")
    parser.add_argument("--folder", default="keys", metavar="DIR", help="where its files are written (keys)")


def run(options: argparse.Namespace) -> int:
    """Write both files, and say which and what is public."""
    if not NAME.fullmatch(options.name):
        limit = "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        raise CommandError(f"--name: {limit}, got {options.name!r}", WRONG_USE)
    try:
        public, secret = create_key(Path(options.folder), options.name)
    except FileExistsError as error:
        there = error.filename2 or error.filename
        raise CommandError(f"{there}: there already; a key is never replaced", WRONG_USE) from None
    except OSError as error:
        raise CommandError(f"{options.folder}: {reason_of(error)}", WRONG_USE) from None
    print(f"secret  {printable(str(secret))}  for this process alone: bus.key_file")
    print(f"public  {printable(str(public))}  for others")
    print(f"key     {public_key(str(public)).decode()}")
    return 0
