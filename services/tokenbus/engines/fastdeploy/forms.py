"""Forms: how the ops differ between FastDeploy's releases, and which form the installed release has.

FastDeploy's token processor reads the output of a get op, and changed within release 2.6 without a new version number.
So the source of the installed token processor decides the layout, and the version number decides the rest.
docs/fastdeploy.md has this table with the commits at which it was read.
"""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tokenbus.engines.fastdeploy_switch import FORM
from tokenbus.logs import logger
from tokenbus.settings import SettingsError

_log = logger("worker")


class Form(NamedTuple):
    """How the ops of a release differ from those of other releases."""

    name: str
    each_rank: bool
    """Whether `speculate_save_output`, with or without scores, saves on ranks above 0 if `save_each_rank` is set."""
    packs_slots: bool
    """Whether `get_output_topk` returns its count as slots | columns << 16, and lines of that width (#7860, #7861)."""
    packs_flag: bool
    """Whether `speculate_get_output_topk` returns flag | columns << 8, and lines of that width (#7883, #7884)."""


FORMS = {
    form.name: form
    for form in (
        Form("2.4", each_rank=True, packs_slots=False, packs_flag=False),
        Form("2.5", each_rank=True, packs_slots=False, packs_flag=False),
        Form("2.6-before-7861", each_rank=False, packs_slots=False, packs_flag=False),
        Form("2.6-before-7884", each_rank=False, packs_slots=True, packs_flag=False),
        Form("2.6", each_rank=False, packs_slots=True, packs_flag=True),
        Form("develop", each_rank=False, packs_slots=True, packs_flag=True),
    )
}
NEWEST = FORMS["develop"]
_NEWEST_RELEASE = "2.6"


class Installed(NamedTuple):
    """The installed FastDeploy."""

    version: str
    packs: tuple[bool, bool] | None
    """Whether its token processor reads packed slots and a packed flag; None if its source cannot be read."""


def chosen(name: str | None = None, environment: Mapping[str, str] = os.environ) -> Form:
    """Return the form to use, and log it: `name`, else the environment's, else the installed FastDeploy's."""
    name = name or environment.get(FORM, "").strip()
    if name and name not in FORMS:
        raise SettingsError(FORM, f"one of {', '.join(FORMS)}", name)
    form, why, is_known = (FORMS[name], "set", True) if name else form_of(installed())
    log = _log.info if is_known else _log.warning
    log("FastDeploy form chosen", form=form.name, reason=why, setting=FORM)
    return form


def form_of(found: Installed | None) -> tuple[Form, str, bool]:
    """Return the form of an installed FastDeploy, the reason, and whether its version is known.

    If not, the newest form is used.
    """
    if found is None:
        return NEWEST, "FastDeploy is not installed", True
    version = re.match(r"\d+\.\d+", found.version)
    release = version[0] if version else ""
    form, is_known = FORMS.get(release, NEWEST), release in FORMS
    if "dev" in found.version and (form.name == _NEWEST_RELEASE or (found.packs and found.packs[0])):
        form = NEWEST  # built from the branch develop, which has the version of the previous release
    why = f"FastDeploy {found.version}" if is_known else f"unknown version {found.version} (known: 2.4, 2.5, 2.6)"
    if found.packs is None or form[2:] == found.packs:
        return form, why, is_known
    # The form of the same release before or after a change, if that is a known form; otherwise a new form.
    read = (form.each_rank, *found.packs)
    as_read = next((other for other in FORMS.values() if other[1:] == read), Form(f"{form.name} as read", *read))
    return as_read, f"{why}, as its token processor reads", is_known


def installed() -> Installed | None:
    """Return the installed FastDeploy without importing it; None if there is none."""
    try:
        spec = find_spec("fastdeploy")
    except ValueError:  # the loaded module has no file
        spec = None
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place)
        lines = _text(folder / "version.txt").splitlines()
        versions = [line.partition(":")[2].strip() for line in lines if line.startswith("fastdeploy version:")]
        reader = _text(folder / "output" / "token_processor.py")
        packs = bool(re.search(r">>\s*16", reader)), bool(re.search(r">>\s*8\b", reader))
        return Installed(versions[-1] if versions else "unknown", packs if reader else None)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
