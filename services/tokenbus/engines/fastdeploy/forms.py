"""Forms: describes how the ops of FastDeploy's releases differ, and finds the form of the installed release.

FastDeploy's token processor, which calls the get ops, changed within release 2.6 without a new version number.
So the layout is read from the installed token processor's source code, and other differences from the version number.
docs/fastdeploy.md shows the table of forms with FastDeploy's commits.
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
    """Differences between the ops of FastDeploy's releases."""

    name: str
    each_rank: bool
    """Whether both `speculate_save_output` ops save on ranks above 0 if `save_each_rank` is set."""
    packs_slots: bool
    """Whether `get_output_topk` returns slots | columns << 16, and `columns` ids per token (#7860, #7861)."""
    packs_flag: bool
    """Whether `speculate_get_output_topk` returns flag | columns << 8, and `columns` ids per token (#7883, #7884)."""


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
    """Facts about the installed FastDeploy."""

    version: str
    packs: tuple[bool, bool] | None
    """The values `packs_slots` and `packs_flag` of the token processor, or None if the source cannot be read."""


def chosen(name: str | None = None, environment: Mapping[str, str] = os.environ) -> Form:
    """Return and log the form that `name` or the environment selects, or by default the installed FastDeploy's form."""
    name = name or environment.get(FORM, "").strip()
    if name and name not in FORMS:
        raise SettingsError(FORM, f"one of {', '.join(FORMS)}", name)
    form, why, is_known = (FORMS[name], "set", True) if name else form_of(installed())
    log = _log.info if is_known else _log.warning
    log("FastDeploy form chosen", form=form.name, reason=why, setting=FORM)
    return form


def form_of(found: Installed | None) -> tuple[Form, str, bool]:
    """Return an installed FastDeploy's form (the newest if unknown), the reason, and whether the version is known."""
    if found is None:
        return NEWEST, "FastDeploy is not installed", True
    version = re.match(r"\d+\.\d+", found.version)
    release = version[0] if version else ""
    form, is_known = FORMS.get(release, NEWEST), release in FORMS
    if "dev" in found.version and (form.name == _NEWEST_RELEASE or (found.packs and found.packs[0])):
        form = NEWEST  # a build of the branch develop has the version of the previous release
    why = f"FastDeploy {found.version}" if is_known else f"unknown version {found.version} (known: 2.4, 2.5, 2.6)"
    if found.packs is None or form[2:] == found.packs:
        return form, why, is_known
    # Trust the values in the token processor's source: return a known form with these values, or a new form.
    read = (form.each_rank, *found.packs)
    as_read = next((other for other in FORMS.values() if other[1:] == read), Form(f"{form.name} as read", *read))
    return as_read, f"{why}, as its token processor reads", is_known


def installed() -> Installed | None:
    """Return facts about the installed FastDeploy without importing it, or None if there is none."""
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
