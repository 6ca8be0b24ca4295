"""Forms: how the ops differ between FastDeploy's releases, and which form the installed release has.

FastDeploy's token processor reads what a get op fills in, and it changed within release 2.6 under one version number.
So the installed token processor's source decides the layout, and the version number decides the rest.
docs/fastdeploy.md has this table with the commits at which it was read.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from tokenbus_engines.fastdeploy_switch import FORM
from tokenbus_services.logs import logger
from tokenbus_services.settings import SettingsError

_log = logger("worker")


@dataclass(frozen=True, slots=True)
class Form:
    """How the ops of a release differ from those of others."""

    name: str
    each_rank: bool
    """Whether `speculate_save_output` and its form with scores save on a rank above 0 where `save_each_rank` is set."""
    packs_slots: bool
    """Whether `get_output_topk` fills in slots | columns << 16, and lines of so many columns (#7860, #7861)."""
    packs_flag: bool
    """Whether `speculate_get_output_topk` fills in flag | columns << 8, and only so many columns (#7883, #7884)."""


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


@dataclass(frozen=True, slots=True)
class Installed:
    """The FastDeploy that is installed."""

    version: str
    packs_slots: bool | None
    """Whether its token processor reads that; None if its source cannot be read."""
    packs_flag: bool | None


def chosen(name: str | None = None, environment: Mapping[str, str] = os.environ) -> Form:
    """Return the form to speak, and log it: `name`, else the environment's, else the installed FastDeploy's."""
    name = name or environment.get(FORM, "").strip()
    if name:
        if name not in FORMS:
            raise SettingsError(FORM, f"one of {', '.join(FORMS)}", name)
        form, why = FORMS[name], "set"
    else:
        form, why = form_of(installed())
    log = _log.warning if why.startswith("unknown") else _log.info
    log("FastDeploy form chosen", form=form.name, reason=why, setting=FORM)
    return form


def form_of(found: Installed | None) -> tuple[Form, str]:
    """Return an installed FastDeploy's form, and the reason; an unknown version has the newest form."""
    if found is None:
        return NEWEST, "FastDeploy is not installed"
    version = re.match(r"\d+\.\d+", found.version)
    release = version[0] if version else ""
    form = FORMS.get(release, NEWEST)
    if "dev" in found.version and (form.name == _NEWEST_RELEASE or found.packs_slots):
        form = NEWEST  # built from develop's sources, under the version of the release before
    read = _as_read(form, found)
    why = f"FastDeploy {found.version}"
    if release not in FORMS:
        why = f"unknown version {found.version} (known: 2.4, 2.5, 2.6)"
    return read, why if read is form else f"{why}, as its token processor reads"


def _as_read(form: Form, found: Installed) -> Form:
    """Return the form whose layouts are those that the installed token processor reads."""
    if found.packs_slots is None or found.packs_flag is None:
        return form
    read = replace(form, packs_slots=found.packs_slots, packs_flag=found.packs_flag)
    if read == form:
        return form
    for other in FORMS.values():  # the same release before or after a change
        if read == replace(other, name=form.name):
            return other
    return replace(read, name=f"{form.name} as read")


def installed() -> Installed | None:
    """Return the installed FastDeploy without importing it; None if there is none."""
    try:
        spec = find_spec("fastdeploy")
    except ValueError:  # what is loaded under that name came from no file
        spec = None
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place)
        lines = _text(folder / "version.txt").splitlines()
        versions = [line.partition(":")[2].strip() for line in lines if line.startswith("fastdeploy version:")]
        reader = _text(folder / "output" / "token_processor.py")
        return Installed(
            version=versions[-1] if versions else "unknown",
            packs_slots=bool(re.search(r">>\s*16", reader)) if reader else None,
            packs_flag=bool(re.search(r">>\s*8\b", reader)) if reader else None,
        )
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
