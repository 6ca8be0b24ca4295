"""The switch replaces FastDeploy's ops, by command or variable, in a package laid out like FastDeploy.

The import and the command run in this process. Real processes show that the switch reaches each process of the engine,
and what Python itself does at its start.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest

from tests.engines.fastdeploy import stand_in
from tests.engines.fastdeploy.bus import save, speaking
from tests.engines.fastdeploy.engine import whole
from tests.support.waiting import MOST
from tokenbus.cli import main
from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy.switch import replace_ops
from tokenbus.engines.fastdeploy_switch import install

pytestmark = pytest.mark.xdist_group("fastdeploy_switch")  # what its tests share is made once
ROOT = Path(__file__).resolve().parents[3]
SERVER = ["-m", "fastdeploy.entrypoints.api_server"]
STEPS = 3
SWITCHED = f"tokens {list(range(4 * STEPS))}\n"
OPS = "fastdeploy.model_executor.ops"
NO_SWITCH = "this Python must read tokenbus_fastdeploy.pth or PYTHONPATH"


# FastDeploy is imported in this process.


@pytest.fixture
def importing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    stand_in.install(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(PROCESS, "is_xpu", False)
    yield folder / "fastdeploy"
    fastdeploy.close()  # else this process speaks the form of the package in every later test
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastdeploy"]:
        del sys.modules[name]


def switch(monkeypatch: pytest.MonkeyPatch, value: str = "on") -> None:
    monkeypatch.setenv("TOKENBUS_FASTDEPLOY", value)
    install()


def refusal(name: str) -> str:
    with pytest.raises(ImportError) as refused:
        importlib.import_module(name)
    return str(refused.value)


@pytest.mark.parametrize("platform", ["gpu", "xpu", "hardware_of_tomorrow"])
def test_ops_are_replaced_wherever_they_are_imported(
    platform: str, importing: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The package and its compiled part have ours, of any hardware and release, and the package its own loader."""
    shutil.rmtree(importing)
    stand_in.install(importing.parent, "2.7.1", platform, (*stand_in.OPS, "mtp_save_first_token_with_topk"))
    switch(monkeypatch)
    with caplog.at_level("INFO"):
        worker: Any = importlib.import_module("fastdeploy.model_executor.pre_and_post_process")
    package, compiled = (sys.modules[f"{OPS}.{platform}{part}"] for part in ("", ".fastdeploy_ops"))
    assert worker.save_output is package.save_output is compiled.save_output is fastdeploy.save_output
    assert type(package.__loader__).__module__ == "_frozen_importlib_external"
    assert package.static_op_save_output is fastdeploy.save_output
    assert package.get_output_kv_signal.__module__ == compiled.__name__
    assert not hasattr(importlib.import_module(f"{OPS}.triton_ops"), "save_output")
    (line,) = [record.getMessage() for record in caplog.records if "ops replaced" in record.getMessage()]
    assert f'module="{OPS}.{platform}" ops=11 fastdeploy="2.7.1"' in line
    assert PROCESS.is_xpu == (platform == "xpu")


def test_each_rank_of_xpu_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On XPU each save heeds `save_each_rank`, which since #7172 a GPU's does not: a rank has a reader of its own."""
    for is_xpu in (False, True):
        monkeypatch.setattr(PROCESS, "is_xpu", is_xpu)
        with speaking("develop", folder):
            for each in (False, True):
                save("save_output", whole("save_output", 1, 1) | {"rank_id": 1, "save_each_rank": each})
            assert fastdeploy.counts().get("saved", 0) == is_xpu


@pytest.mark.parametrize(("ops", "found"), [((), "none: were its ops compiled?"), (("save_output",), "save_output")])
def test_ops_that_are_not_there(
    ops: tuple[str, ...], found: str, importing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(importing.parent, ops=ops)
    switch(monkeypatch)
    package = importing / "model_executor" / "ops" / "gpu" / "__init__.py"
    assert refusal("fastdeploy.model_executor.pre_and_post_process") == (
        "TOKENBUS_FASTDEPLOY: on needs save_output and get_output, or another such pair, in "
        f"{OPS}.gpu ({package}), got {found}"
    )
    with pytest.raises(ImportError, match="TOKENBUS_FASTDEPLOY: on needs"):
        assert sys.modules[f"{OPS}.gpu"].get_output


@pytest.mark.parametrize("has_init", [True, False])
def test_ops_that_are_elsewhere(has_init: bool, importing: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    ops = importing / "model_executor" / "ops"
    shutil.rmtree(ops / "gpu")
    (ops / "LICENSE").touch()
    if not has_init:
        (importing / "__init__.py").unlink()
    switch(monkeypatch)
    fault = f"TOKENBUS_FASTDEPLOY: on needs FastDeploy's ops, such as gpu or xpu in {ops}, got cute_dsl_ops, triton_ops"
    assert refusal("fastdeploy") == fault


@pytest.mark.usefixtures("importing")
def test_misspelt_switch_starts_no_fastdeploy(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, "of")
    assert refusal("fastdeploy") == "TOKENBUS_FASTDEPLOY: on or off, got 'of'"
    assert sys.meta_path[0].find_spec("other", None) is None


@pytest.mark.filterwarnings("ignore:.*find_spec")
@pytest.mark.usefixtures("importing")
def test_finder_of_an_old_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.meta_path.append(SimpleNamespace(find_module=lambda *_: None))
    switch(monkeypatch)
    importlib.import_module(f"{OPS}.gpu")
    assert refusal(f"{OPS}.hardware_of_tomorrow") == f"No module named '{OPS}.hardware_of_tomorrow'"


@pytest.fixture
def loaded() -> Iterator[ModuleType]:
    module = ModuleType(f"{OPS}.test")
    for op in (*stand_in.OPS, "static_op_save_output", "get_output_dynamic", "get_output_kv_signal"):
        setattr(module, op, lambda *_: None)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_op_of_the_queue_that_tokenbus_lacks(loaded: ModuleType) -> None:
    loaded.save_output_v2 = lambda *_: None  # type: ignore[attr-defined]
    loaded.get_output_logger = "no op"  # type: ignore[attr-defined]
    loaded.__getattr__ = {"own": "FastDeploy's"}.__getitem__  # type: ignore[method-assign]
    replace_ops(loaded.__name__)
    for op in ("save_output_v2", "get_output_dynamic"):
        with pytest.raises(ImportError) as refused:
            getattr(loaded, op)
        expected = f"on replaces 10 ops of {OPS}.test, but Tokenbus has none to replace {op}"
        assert str(refused.value) == f"TOKENBUS_FASTDEPLOY: {expected}"
    assert (loaded.own, loaded.get_output_logger) == ("FastDeploy's", "no op")


def test_submodules_with_ops(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, other = ModuleType(f"{OPS}.test.compiled"), ModuleType(f"{OPS}.test_other")
    for module in (loaded, compiled, other):
        vars(module).update(save_output=print, save_output_v2=print)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, f"{OPS}.test.hidden", None)
    vars(compiled).update(get_output_shape=print)
    replace_ops(loaded.__name__)
    assert (compiled.save_output, other.save_output) == (fastdeploy.save_output, print)
    assert (compiled.get_output_shape, other.save_output_v2) == (print, print)
    with pytest.raises(ImportError, match="Tokenbus has none to replace save_output_v2"):
        assert compiled.save_output_v2
    assert not hasattr(compiled, "get_output")


def test_module_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoneModule:
        def __getattr__(self, name: str) -> None:
            return None

    name = f"{OPS}.none"
    for module, got in ((NoneModule(), "NoneModule"), (None, "NoneType")):  # the latter: it removed itself
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(ImportError, match=f"^TOKENBUS_FASTDEPLOY: on needs a module {name}, got {got}$"):
            replace_ops(name)


# The command runs in this process, up to where the engine's would take its place. It asks real Pythons.


@dataclass
class Machine:
    """A Python environment with Tokenbus, beside which FastDeploy is installed in a folder of its own."""

    bin: Path
    folder: Path

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    @property
    def environment(self) -> dict[str, str]:
        usual = {name: text for name, text in os.environ.items() if not name.startswith(("TOKENBUS_", "INFERENCE_"))}
        path, folder = f"{self.bin}:{os.environ['PATH']}", str(self.folder)
        return usual | {"PATH": path, "PYTHONPATH": folder, "TMPDIR": folder}

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        environment, pipe = self.environment | variables, subprocess.PIPE
        return subprocess.Popen(command, env=environment, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*command, **variables) as process:
            out, errors = process.communicate(timeout=MOST)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def serve(self, how: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("python", *SERVER, how, str(STEPS), "0", **variables)


def make_environment(folder: Path, *, with_switch: bool = True) -> Path:
    venv.create(folder, symlinks=True)
    programs, (packages,) = folder / "bin", folder.glob("lib/*/site-packages")
    ours = [ROOT / "contracts", ROOT / "gpu_ops", ROOT / "services", Path(np.__file__).parents[1]]
    (packages / "_tokenbus.pth").write_text("".join(f"{path}\n" for path in ours))
    if with_switch:
        shutil.copy(ROOT / "services" / "tokenbus_fastdeploy.pth", packages)
    points = next(file for file in distribution("tokenbus").files or () if file.name == "entry_points.txt").locate()
    shutil.copytree(Path(points).parent, packages / "tokenbus-0.dist-info")
    program = programs / "tokenbus"
    program.write_text(f"#!{programs}/python\nfrom tokenbus.cli import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[bool, Path]]:
    with tempfile.TemporaryDirectory(prefix="tb") as made:
        yield {has: make_environment(Path(made, f"{has}"), with_switch=has) for has in (True, False)}


@pytest.fixture
def machine(programs: dict[bool, Path], folder: Path) -> Machine:
    stand_in.install(folder)
    return Machine(programs[True], folder)


@pytest.fixture
def bare(programs: dict[bool, Path], folder: Path) -> Machine:
    """A machine on which Tokenbus is on a path, and its .pth file is not installed."""
    stand_in.install(folder)
    return Machine(programs[False], folder)


class Started(NamedTuple):
    """What the command came to: its status and its line, or what took its place, and with which environment."""

    status: int
    line: str
    command: Sequence[str] = ()
    environment: Mapping[str, str] = {}


class _ReplacedError(BaseException):
    """The engine's command would have taken the place of this process."""


Command = Callable[..., Started]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(machine: Machine, *given: str, **variables: str) -> Started:
        taken: list[Any] = []

        def execve(program: str, command: list[str], environment: dict[str, str]) -> NoReturn:
            if program.endswith("damaged"):
                raise OSError(8, "Exec format error")
            taken.extend((command, environment))
            raise _ReplacedError

        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", machine.environment | variables)
            patch.chdir(machine.folder)
            patch.setattr(os, "execve", execve)
            patch.setattr(signal, "signal", lambda number, handler: signals.update({number: handler}))
            signals.clear()
            try:
                status = main(["fastdeploy", *given])
            except _ReplacedError:
                assert signals == {signal.SIGPIPE: signal.SIG_DFL, signal.SIGXFSZ: signal.SIG_DFL}
                return Started(0, capsys.readouterr().err, *taken)
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return Started(status, line)

    signals: dict[int, Any] = {}
    return run


@pytest.mark.parametrize(
    ("given", "variables", "status", "line"),
    [
        ("--", {}, 2, "fastdeploy: expected a command after --"),
        ("-- no-such-command", {}, 127, "no-such-command: command not found"),
        ("-- {folder}/damaged", {}, 126, "{folder}/damaged: exec format error"),
        ("-- {folder}/data", {}, 126, "{folder}/data: permission denied"),
        ("--form 1.0 -- python", {}, 2, "--form: one of 2.4, "),
        ("-- python", {"TOKENBUS_FASTDEPLOY": "of"}, 2, "TOKENBUS_FASTDEPLOY: on or off, got 'of'"),
        ("-- python", {"TOKENBUS_FASTDEPLOY_FORM": "1.0"}, 2, "TOKENBUS_FASTDEPLOY_FORM: one of 2.4, "),
        ("-- python", {"INFERENCE_MSG_QUEUE_ID": "x"}, 2, "INFERENCE_MSG_QUEUE_ID: a whole number from 0 "),
        ("-- python", {"INFERENCE_MSG_ID": "2"}, 2, "INFERENCE_MSG_ID: any number except 2"),
        ("-- python", {"FD_USE_GET_SAVE_OUTPUT_V1": "1"}, 2, "FD_USE_GET_SAVE_OUTPUT_V1: 0, as FastDeploy calls no op "),  # noqa: E501
    ],
)  # fmt: skip
def test_command_that_is_not_started(  # noqa: PLR0913, PLR0917 - a case
    given: str, variables: dict[str, str], status: int, line: str, machine: Machine, command: Command
) -> None:
    for name, mode in (("damaged", 0o755), ("data", 0o644)):
        (machine.folder / name).write_text("no program\n")
        (machine.folder / name).chmod(mode)
    found = command(machine, *given.format(folder=machine.folder).split(), **variables)
    assert found.status == status
    assert found.line.startswith(f"tokenbus: {line.format(folder=machine.folder)}")


def test_fastdeploy_that_is_missing_or_has_no_ops(machine: Machine, command: Command) -> None:
    ops = machine.folder / "fastdeploy" / "model_executor" / "ops"
    shutil.rmtree(ops / "gpu")
    fault = f"TOKENBUS_FASTDEPLOY: on needs FastDeploy's ops, such as gpu or xpu in {ops}, got cute_dsl_ops, triton_ops"
    assert command(machine, "--", "python", *SERVER)[:2] == (1, f"tokenbus: {fault}\n")
    shutil.rmtree(machine.folder / "fastdeploy")
    missing = command(machine, "--", "python", "-c", "print('started')")
    fault = "TOKENBUS_FASTDEPLOY: on needs FastDeploy, got no package fastdeploy on the path of "
    assert (missing.status, missing.line.startswith(f"tokenbus: {fault}")) == (1, True)


def test_switch_and_form_are_handed_on(machine: Machine, command: Command) -> None:
    found = command(machine, "--form", "2.4", "--", "python", *SERVER, "thread", "3")
    assert found.command == ["python", *SERVER, "thread", "3"]
    handed = {name: text for name, text in found.environment.items() if name.startswith(("TOKENBUS_", "PYTHONPATH"))}
    assert handed == {"TOKENBUS_FASTDEPLOY": "on", "TOKENBUS_FASTDEPLOY_FORM": "2.4", "PYTHONPATH": str(machine.folder)}
    off = command(machine, "--", "python", *SERVER, TOKENBUS_FASTDEPLOY="off")
    assert off.line == "tokenbus: TOKENBUS_FASTDEPLOY=off: FastDeploy's own ops stay\n"
    assert off.environment["TOKENBUS_FASTDEPLOY"] == "off"


def test_fastdeploy_is_looked_for_where_the_command_looks(machine: Machine, command: Command) -> None:
    (machine.folder / "serve.py").touch()
    program, script, away = (machine.folder / name for name in ("serve", "serve.sh", "away"))
    program.write_text(f"#!{machine.python}\nimport fastdeploy\n")
    script.write_text(f"#!/bin/sh\nexec {program}\n")
    for path in (program, script):
        path.chmod(0o755)
    (machine.folder / "sitecustomize.py").write_text("import os; os.write(2, b'\\xff\\n')\n")
    for given in (["-uX", "dev", "-m", "fastdeploy"], ["-Bmfastdeploy"], ["-W", "ignore", "serve.py"]):
        assert command(machine, "--", "python", *given, PYTHONPATH="").command == ["python", *given]
    for path in (program, script):
        assert command(machine, "--", str(path)).command == [str(path)]
    away.mkdir()
    found = command(Machine(machine.bin, away), "--", "python", "-m", "fastdeploy")
    assert "got no package fastdeploy on the path of" in found.line


@pytest.mark.parametrize(
    "given", ["-E x", "-S x", "-uI x", "-BE x", "-X dev -I x", "-W ignore -E x", "-Xdev -bI x", "-Im x", "serve"]
)
def test_python_that_cannot_be_switched(given: str, bare: Machine, command: Command) -> None:
    """By its options, or those in a script's first line."""
    program = bare.folder / "serve"
    program.write_text("#!/usr/bin/env -S python -E\nimport fastdeploy\n")
    program.chmod(0o755)
    words = [str(program)] if given == "serve" else ["python", *given.split()]
    found = command(bare, "--", *words)
    assert (found.status, found.line.startswith(f"tokenbus: {bare.python}: {NO_SWITCH}")) == (1, True)


# Processes of the engine, and Python at its start.


def test_command_switches_every_process(bare: Machine) -> None:
    """Also those that are spawned, and where Python reads no .pth file; the status is the engine's own."""
    run = bare.run("tokenbus", "fastdeploy", "--", "python", *SERVER, "spawn", str(STEPS), "7")
    assert (run.returncode, run.stdout) == (7, SWITCHED), run.stderr
    assert len([line for line in run.stderr.splitlines() if "ops replaced" in line]) == 1


def test_variable_switches_every_process(machine: Machine) -> None:
    """Also those that are forked, and no file of FastDeploy is changed."""
    files = {path: path.read_bytes() for path in machine.folder.rglob("*.py")}
    run = machine.serve("fork", TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    assert {path: path.read_bytes() for path in machine.folder.rglob("*.py")} == files


def test_signals_are_the_commands_own(machine: Machine) -> None:
    """The command takes the place of ours, with SIGPIPE and SIGXFSZ as a shell would give them."""
    with machine.start("tokenbus", "fastdeploy", "--", "python", *SERVER, "wait", "0", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (line,) = [line for line in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0") if "server" in line]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=MOST)
    assert (line, process.returncode) == (SERVER[1], -signal.SIGTERM)


def test_other_programs_load_the_switch_alone(machine: Machine) -> None:
    program = "import sys; print(*(name for name in sys.modules if name.partition('.')[0] in {'tokenbus', 'numpy'}))"
    ours = {"tokenbus", "tokenbus.on_use", "tokenbus.engines", "tokenbus.engines.fastdeploy_switch"}
    for value in ("on", "off"):
        run = machine.run("python", "-c", program, TOKENBUS_FASTDEPLOY=value)
        assert ({*run.stdout.split()}, run.stderr) == (ours, "")
    assert machine.run("python", "-c", program).stdout == "\n"


def test_own_ops_stay_without_the_switch(machine: Machine) -> None:
    program = f"import sys, {OPS}.gpu as ops; print(ops.save_output.__module__, 'tokenbus.engines' in sys.modules)"
    assert machine.run("python", "-c", program).stdout == f"{OPS}.gpu.fastdeploy_ops False\n"
    off = machine.run("python", "-c", program, TOKENBUS_FASTDEPLOY="off")
    assert off.stdout == f"{OPS}.gpu.fastdeploy_ops True\n", off.stderr


def test_lines_come_out_where_the_engine_does_not_log(machine: Machine) -> None:
    (machine.folder / "fastdeploy" / "__init__.py").write_text("")
    run = machine.run("python", "-c", f"import {OPS}.gpu", TOKENBUS_FASTDEPLOY="on")
    for said in ("FastDeploy's ops replaced", 'FastDeploy form chosen form="2.6-before-7861"'):
        assert len([line for line in run.stderr.splitlines() if said in line]) == 1, run.stderr


def test_sitecustomize_that_is_hidden_runs(folder: Path) -> None:
    """The command puts a `sitecustomize` of its own on the path, where Python reads no .pth file."""
    path = [ROOT / "services" / "tokenbus" / "engines" / "fastdeploy_switch" / "path", ROOT / "services", folder]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "TOKENBUS_FASTDEPLOY": "on"}
    program = "import sys; print(getattr(sys, 'own', None), sys.modules['tokenbus.engines.fastdeploy_switch'].__name__)"
    for own in ("None", "here"):
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout == f"{own} tokenbus.engines.fastdeploy_switch\n"
        (folder / "sitecustomize.py").write_text("import sys; sys.own = 'here'\n")


def test_tokenbus_that_was_half_removed(folder: Path) -> None:
    programs = make_environment(folder / "left")
    for path in (folder / "left").rglob("_tokenbus.pth"):
        path.unlink()
    left = Machine(programs, folder)
    run = left.run("python", "-c", "print('starts')")
    assert (run.stdout, run.stderr) == ("starts\n", "")
    run = left.run("python", "-c", "print('starts')", TOKENBUS_FASTDEPLOY="on")
    said = "tokenbus_fastdeploy.pth: No module named 'tokenbus': TOKENBUS_FASTDEPLOY has no effect"
    assert (run.stdout, {*run.stderr.splitlines()}) == ("starts\n", {said})  # a venv's Python reads its files twice


def test_off_gives_edited_imports_the_ops_that_were_there(folder: Path) -> None:
    """An op that FastDeploy lacks, and FastDeploy itself, are missed when one asks for them, and not before."""
    module = folder / "fastdeploy" / "model_executor" / "ops" / "gpu.py"
    module.parent.mkdir(parents=True)
    module.write_text("def save_output(*arguments):\n    print('theirs', *arguments)\n")
    program = """if True:
        import os
        from tokenbus.engines.fastdeploy import OPS, Options, save_output
        save_output(1, len(OPS))
        for name in ("get_output_ep", "nothing", "get_output"):
            if name == "get_output":
                os.environ["TOKENBUS_FASTDEPLOY_OPS"] = "no_such_module"
            try:
                exec(f"from tokenbus.engines.fastdeploy import {name}")
            except ImportError as error:
                print(error)
        """
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "TOKENBUS_FASTDEPLOY": "off"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    said = run.stdout.splitlines()
    assert said[0] == "theirs 1 11", run.stderr
    assert said[1].startswith(
        f"cannot import name 'get_output_ep' from '{OPS}.gpu', with TOKENBUS_FASTDEPLOY=off: its "
    )
    assert said[2].startswith("cannot import name 'nothing' from 'tokenbus.engines.fastdeploy'")
    missing = "cannot import name 'get_output' from 'no_such_module', with TOKENBUS_FASTDEPLOY=off: No module named "
    assert said[3].startswith(missing)
