"""Versions of vLLM that cannot be used, in one line each; with modules in the place of vLLM's own."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenbus.engines.vllm.compatibility import (
    OF_ENGINE,
    OF_MASKS,
    OF_SCHEDULER,
    Call,
    Members,
    VersionError,
    check,
    check_members,
    load_vllm,
)

USED = tuple(dict.fromkeys((*OF_ENGINE, *OF_SCHEDULER, *OF_MASKS)))
CALLS = [each for each in USED if isinstance(each, Call)]
MEMBERS = [each for each in USED if isinstance(each, Members)]


def stand_in(used: Call) -> Callable[..., None]:
    """Return a function that takes exactly what the engine gives."""
    names = [f"p{place}" for place in range(used.positional)]
    named = f"*, {', '.join(used.keywords.split())}" if used.keywords else ""
    scope: dict[str, Any] = {}
    exec(f"def function({', '.join(filter(None, [*names, named]))}): pass", scope)  # noqa: S102 - our own table's
    function: Callable[..., None] = scope["function"]
    return function


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put modules with everything that is used into the place of vLLM, and return the package."""
    package = ModuleType("vllm")
    package.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)

    def module(name: str) -> ModuleType:
        found = sys.modules.get(name)
        if found is None or found.__spec__ is not None:
            parent, _, last = name.rpartition(".")
            found = ModuleType(name)
            setattr(module(parent), last, found)
            monkeypatch.setitem(sys.modules, name, found)
        return found

    for used in CALLS:
        owner: Any = module(used.module)
        *path, last = used.name.split(".")
        for name in path:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        parts = [each for each in USED if f"{each.name}.".startswith(f"{last}.") and each.module == used.module]
        if not path and len(parts) > 1:  # a class
            found = stand_in(used._replace(positional=used.positional + 1))
            setattr(owner, last, type(last, (), {"__init__": found}))
        else:
            setattr(owner, last, stand_in(used))
    for each in MEMBERS:
        found = vars(module(each.module)).get(each.name) or type(each.name, (), {})
        setattr(module(each.module), each.name, found)
        for member in each.members.split():
            setattr(found, member, None)
    return package


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1.dev3+g123"])
@pytest.mark.usefixtures("vllm")
def test_supported_versions_are_loaded(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    assert load_vllm(OF_SCHEDULER).Scheduler is sys.modules["vllm.v1.core.sched.scheduler"].Scheduler
    parts = load_vllm()
    assert parts.EngineCore is sys.modules["vllm.v1.engine.core"].EngineCore
    assert parts.LogprobsLists
    assert parts.tokens_input


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "dev", "0.x"])
@pytest.mark.usefixtures("vllm")
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(VersionError, match=f"^vLLM: a version from 0.26 to 0.33, got {version}: no used call has "):
        check(version)


@pytest.mark.parametrize("used", CALLS, ids=lambda used: used.name)
@pytest.mark.usefixtures("vllm")
def test_changed_call_is_named(used: Call) -> None:
    owner: Any = sys.modules[used.module]
    *path, last = used.name.split(".")
    for name in path:
        owner = getattr(owner, name)
    setattr(owner, last, stand_in(used._replace(keywords=f"{used.keywords} brand_new")))
    for version in ("0.32.0", "0.40.0"):
        with pytest.raises(VersionError, match=f"{used.name} has changed: missing .*'brand_new'") as raised:
            check(version, USED)
        assert "\n" not in str(raised.value)
        assert version in str(raised.value)


@pytest.mark.parametrize("used", MEMBERS, ids=lambda used: used.name)
@pytest.mark.usefixtures("vllm")
def test_lacking_member_is_named(used: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a module."""
    first = used.members.split()[0]
    delattr(getattr(sys.modules[used.module], used.name), first)
    with pytest.raises(VersionError, match=f"{used.name} has no {first}$"):
        check("0.32.0", USED)
    monkeypatch.setitem(sys.modules, used.module, None)  # what Python refuses to import
    with pytest.raises(VersionError, match=" is missing: "):
        check("0.32.0", USED)


def test_member_that_an_object_lacks_is_named() -> None:
    check_members("text", ("upper",))
    with pytest.raises(VersionError, match=r"^vLLM: str\.step_fn is missing$"):
        check_members("text", ("upper", "step_fn"))


def test_vllm_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"^vLLM is not installed: pip install 'vllm>=0\.26,<0\.34'"):
        load_vllm()


def test_package_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        if name == "vllm":
            return SimpleNamespace(__version__="0.32.0")
        raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setattr("tokenbus.engines.vllm.compatibility.import_module", import_module)
    line = r"RuntimeError: operator torchvision::nms does not exist; on a CPU: pip uninstall torchvision .*"
    with pytest.raises(ImportError, match=rf"^vLLM cannot be imported: {line}$"):
        load_vllm()
