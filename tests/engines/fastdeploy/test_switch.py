"""The switch replaces the ops in every process of a package laid out like FastDeploy, by command or variable."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.engines.fastdeploy import stand_in
from tests.support.waiting import MOST
from tokenbus.engines import fastdeploy
from tokenbus.engines.fastdeploy.switch import replace_ops

pytestmark = pytest.mark.xdist_group("fastdeploy_switch")  # what its tests share is made once
ROOT = Path(__file__).resolve().parents[3]
SERVER = ["-m", "fastdeploy.entrypoints.api_server"]
STEPS = 3
SWITCHED = f"tokens {list(range(4 * STEPS))}\n"
OWN = ["own get_output", *["own save_output"] * STEPS, "tokens [7]"]
OPS = "fastdeploy.model_executor.ops"


@dataclass
class Machine:
    """A Python environment with Tokenbus, beside which FastDeploy is installed in a folder of its own."""

    bin: Path
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        usual = {name: text for name, text in os.environ.items() if not name.startswith(("TOKENBUS_", "INFERENCE_"))}
        own = {"PATH": f"{self.bin}:{usual['PATH']}", "PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder)}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=usual | own | self.variables | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*command, **variables) as process:
            out, errors = process.communicate(timeout=MOST)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def tokenbus(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("tokenbus", "fastdeploy", "--", *command, **variables)

    def serve(self, how: str = "thread", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run FastDeploy's server, without the command."""
        return self.run("python", *SERVER, how, str(STEPS), "0", **variables)


def make_environment(folder: Path, *, with_switch: bool = True) -> Path:
    """Make a Python environment in which Tokenbus is installed as `make setup` does; return its folder of programs."""
    programs = folder / "bin"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    about = packages / "tokenbus-0.dist-info"
    for made in (programs, about):
        made.mkdir(parents=True)
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (programs / "python").symlink_to(base)
    ours = [ROOT / "contracts", ROOT / "gpu_ops", ROOT / "services", Path(np.__file__).parents[1]]
    (packages / "_tokenbus.pth").write_text("".join(f"{path}\n" for path in ours))
    if with_switch:
        shutil.copy(ROOT / "services" / "tokenbus_fastdeploy.pth", packages)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    listed = (f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in groups[group].items()) for group in groups)
    (about / "entry_points.txt").write_text("\n".join(listed))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenbus\nVersion: 0\n")
    program = programs / "tokenbus"
    program.write_text(f"#!{programs}/python\nfrom tokenbus.cli import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as made:
        yield make_environment(Path(made))


@pytest.fixture
def machine(programs: Path, folder: Path) -> Machine:
    stand_in.install(folder)
    return Machine(programs, folder)


def one_line(run: subprocess.CompletedProcess[str], status: int) -> str:
    """Return the one line with which a command ended that started nothing."""
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (status, "", 1), run
    return run.stderr.removesuffix("\n")


@pytest.mark.parametrize("how", ["thread", "fork", "spawn"])
def test_command_switches_every_process(machine: Machine, how: str) -> None:
    run = machine.tokenbus("python", *SERVER, how, str(STEPS), "0")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "ops replaced" in line]
    for part in (f"{OPS}.gpu", "2.6.0", "10"):
        assert part in line


@pytest.mark.parametrize("how", ["thread", "fork", "spawn"])
def test_variable_switches_every_process(machine: Machine, how: str) -> None:
    files = {path: path.read_bytes() for path in machine.folder.rglob("*.py")}
    run = machine.serve(how, TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    assert {path: path.read_bytes() for path in machine.folder.rglob("*.py")} == files


@pytest.mark.parametrize("variables", [{}, {"TOKENBUS_FASTDEPLOY": "off"}])
def test_installed_tokenbus_changes_nothing_by_itself(machine: Machine, variables: Mapping[str, str]) -> None:
    run = machine.serve(**variables)
    assert (run.returncode, sorted(run.stdout.splitlines())) == (0, OWN), run.stderr
    assert "tokenbus" not in run.stderr


def test_off_goes_before_the_command(machine: Machine) -> None:
    run = machine.tokenbus("python", *SERVER, "thread", str(STEPS), "0", TOKENBUS_FASTDEPLOY="off")
    assert (run.returncode, sorted(run.stdout.splitlines())) == (0, OWN), run.stderr
    assert run.stderr.startswith("tokenbus: TOKENBUS_FASTDEPLOY=off: FastDeploy's own ops stay\n")


def test_misspelt_switch_starts_no_fastdeploy(machine: Machine) -> None:
    run = machine.serve(TOKENBUS_FASTDEPLOY="of")
    assert run.returncode == 1
    assert "ImportError: TOKENBUS_FASTDEPLOY: on or off, got 'of'" in run.stderr
    assert run.stdout == ""
    other = machine.run("python", "-c", "print('other')", TOKENBUS_FASTDEPLOY="of")
    assert (other.stdout, other.stderr) == ("other\n", "")


def test_fastdeploy_that_is_missing(machine: Machine) -> None:
    shutil.rmtree(machine.folder / "fastdeploy")
    line = one_line(machine.tokenbus("python", "-c", "print('started')"), 1)
    assert line.startswith(
        "tokenbus: TOKENBUS_FASTDEPLOY: on needs FastDeploy, got no package fastdeploy on the path of "
    )


def test_ops_that_are_elsewhere(machine: Machine) -> None:
    ops = machine.folder / "fastdeploy" / "model_executor" / "ops"
    shutil.rmtree(ops / "gpu")
    fault = f"TOKENBUS_FASTDEPLOY: on needs FastDeploy's ops, such as gpu or xpu in {ops}, got cute_dsl_ops, triton_ops"
    assert one_line(machine.tokenbus("python", *SERVER), 1) == f"tokenbus: {fault}"
    run = machine.serve(TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (1, "")
    assert f"ImportError: {fault}" in run.stderr


@pytest.mark.parametrize(("ops", "found"), [((), "none: were its ops compiled?"), (("save_output",), "save_output")])
def test_ops_that_are_not_there(machine: Machine, ops: tuple[str, ...], found: str) -> None:
    stand_in.install(machine.folder, ops=ops)
    run = machine.run("python", "-m", "fastdeploy.worker.worker_process", "1", TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (1, "")
    package = machine.folder / "fastdeploy" / "model_executor" / "ops" / "gpu" / "__init__.py"
    assert run.stderr.endswith(
        "ImportError: TOKENBUS_FASTDEPLOY: on needs save_output and get_output, or another such pair, in "
        f"{OPS}.gpu ({package}), got {found}\n"
    )
    offered = machine.run("python", "-c", f"from {OPS}.gpu import get_output", TOKENBUS_FASTDEPLOY="on")
    assert "ImportError: TOKENBUS_FASTDEPLOY: on needs" in offered.stderr


def test_upgrade_of_fastdeploy(machine: Machine) -> None:
    assert machine.serve(TOKENBUS_FASTDEPLOY="on").stdout == SWITCHED
    shutil.rmtree(machine.folder / "fastdeploy")
    stand_in.install(machine.folder, version="2.7.1", ops=(*stand_in.OPS, "mtp_save_first_token_with_topk"))
    run = machine.serve(TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "ops replaced" in line]
    assert "2.7.1" in line


@pytest.mark.parametrize("platform", ["xpu", "hardware_of_tomorrow"])
def test_ops_of_other_hardware(machine: Machine, platform: str) -> None:
    shutil.rmtree(machine.folder / "fastdeploy")
    stand_in.install(machine.folder, platform=platform)
    run = machine.tokenbus("python", *SERVER, "thread", str(STEPS), "0")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    assert f"{OPS}.{platform}" in run.stderr


@pytest.mark.parametrize(("platform", "saved"), [("gpu", 0), ("xpu", 1)])
def test_ranks_of_other_hardware(machine: Machine, platform: str, saved: int) -> None:
    """On XPU each save heeds `save_each_rank`, which since #7172 a GPU's does not: a rank has a reader of its own."""
    shutil.rmtree(machine.folder / "fastdeploy")
    stand_in.install(machine.folder, platform=platform)
    program = f"""if True:
        import numpy as np
        from {OPS}.{platform} import save_output
        from tokenbus.engines.fastdeploy import counts
        for each in (False, True):
            save_output(np.ones((2, 1), np.int64), np.array([True]), np.zeros(2, np.int32), 1, each)
        print(counts().get("saved", 0))
        """
    run = machine.run("python", "-c", program, TOKENBUS_FASTDEPLOY="on", TOKENBUS_WORKER_DRAIN_TIMEOUT_MS="0")
    assert run.stdout == f"{saved}\n", run.stderr


@pytest.mark.parametrize(
    ("command", "variables", "status", "line"),
    [
        ("--", {}, 2, "fastdeploy: a command behind --"),
        ("-- no-such-command", {}, 127, "no-such-command: command not found"),
        ("-- {folder}/damaged", {}, 126, "{folder}/damaged: exec format error"),
        ("-- {folder}/data", {}, 126, "{folder}/data: permission denied"),
        ("--form 1.0 -- python", {}, 2, "--form: one of 2.4, "),
        ("-- python", {"TOKENBUS_FASTDEPLOY": "of"}, 2, "TOKENBUS_FASTDEPLOY: on or off, got 'of'"),
        ("-- python", {"TOKENBUS_FASTDEPLOY_FORM": "1.0"}, 2, "TOKENBUS_FASTDEPLOY_FORM: one of 2.4, "),
        ("-- python", {"INFERENCE_MSG_QUEUE_ID": "x"}, 2, "INFERENCE_MSG_QUEUE_ID: a whole number from 0 "),
        ("-- python", {"INFERENCE_MSG_QUEUE_ID": ""}, 2, "INFERENCE_MSG_QUEUE_ID: a whole number from 0 "),
        ("-- python", {"INFERENCE_MSG_ID": "2"}, 2, "INFERENCE_MSG_ID: another number than 2"),
        (
            "-- python",
            {"FD_USE_GET_SAVE_OUTPUT_V1": "1"},
            2,
            "FD_USE_GET_SAVE_OUTPUT_V1: 0, as FastDeploy calls no op otherwise, got 1",
        ),
    ],
)
def test_command_that_is_not_started(
    machine: Machine, command: str, variables: dict[str, str], status: int, line: str
) -> None:
    for name, mode in (("damaged", 0o755), ("data", 0o644)):
        (machine.folder / name).write_text("no program\n")
        (machine.folder / name).chmod(mode)
    words = command.format(folder=machine.folder).split()
    found = one_line(machine.run("tokenbus", "fastdeploy", *words, **variables), status)
    assert found.startswith(f"tokenbus: {line.format(folder=machine.folder)}")


def test_signals_are_those_of_a_command_that_a_shell_starts(machine: Machine) -> None:
    """The command has SIGPIPE and SIGXFSZ at their defaults: it does not inherit that Python ignores them."""
    status = machine.tokenbus("grep", "SigIgn", "/proc/self/status").stdout
    ignored = int(status.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_status_and_signals_are_the_commands_own(machine: Machine) -> None:
    assert machine.tokenbus("python", *SERVER, "thread", "1", "7").returncode == 7
    with machine.start("tokenbus", "fastdeploy", "--", "python", *SERVER, "wait", "0", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=MOST)
    assert process.returncode == -signal.SIGTERM


def test_form_is_handed_on(machine: Machine) -> None:
    program = "import os; print(os.environ['TOKENBUS_FASTDEPLOY_FORM'], os.environ['TOKENBUS_FASTDEPLOY'])"
    run = machine.run("tokenbus", "fastdeploy", "--form", "2.4", "--", "python", "-c", program)
    assert run.stdout == "2.4 on\n", run.stderr


def test_scripts_of_the_engine(machine: Machine) -> None:
    module = "fastdeploy.entrypoints.api_server"
    program = machine.folder / "serve"
    program.write_text(f"#!{machine.python}\nimport runpy; runpy.run_module({module!r}, run_name='__main__')\n")
    script = machine.folder / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {program} thread {STEPS} 0\n")
    for path in (program, script):
        path.chmod(0o755)
    for command in ([str(program), "thread", str(STEPS), "0"], [str(script)]):
        run = machine.tokenbus(*command)
        assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr


def test_fastdeploy_that_is_not_installed_but_found(machine: Machine) -> None:
    (machine.folder / "serve.py").write_text("import fastdeploy; print('found')\n")
    machine.variables["PYTHONPATH"] = ""
    for command in (["-uX", "dev", "-m", "fastdeploy"], ["-Bmfastdeploy"], ["-W", "ignore", "serve.py"]):
        run = machine.tokenbus("python", *command)
        assert "tokenbus: " not in run.stderr
    assert run.stdout == "found\n", run.stderr
    away = machine.folder / "away"
    away.mkdir()
    refused = machine.tokenbus("sh", "-c", f"cd {away} && exec tokenbus fastdeploy -- python -m fastdeploy")
    assert "got no package fastdeploy on the path of" in refused.stderr


@pytest.mark.parametrize("configured", ["", "import logging; logging.basicConfig()\n"])
def test_lines_come_out_however_the_engine_logs(machine: Machine, configured: str) -> None:
    (machine.folder / "fastdeploy" / "__init__.py").write_text(configured)
    run = machine.serve(TOKENBUS_FASTDEPLOY="on")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    for said in ("FastDeploy's ops replaced", 'FastDeploy form chosen form="2.6-before-7861"'):
        assert len([line for line in run.stderr.splitlines() if said in line]) == 1, run.stderr


def test_compiled_ops_are_replaced_where_they_lie(machine: Machine) -> None:
    program = f"""if True:
        import {OPS}.gpu, {OPS}.triton_ops
        from {OPS}.gpu.fastdeploy_ops import save_output
        print(save_output.__class__.__module__, hasattr({OPS}.triton_ops, "save_output_v2"))
        """
    run = machine.tokenbus("python", "-c", program)
    assert run.stdout == "tokenbus.engines.fastdeploy.save_ops False\n", run.stderr


def test_package_without_init_is_refused(machine: Machine) -> None:
    shutil.rmtree(machine.folder / "fastdeploy" / "model_executor" / "ops" / "gpu")
    (machine.folder / "fastdeploy" / "model_executor" / "ops" / "LICENSE").touch()
    (machine.folder / "fastdeploy" / "__init__.py").unlink()
    run = machine.run("python", "-c", "import fastdeploy", TOKENBUS_FASTDEPLOY="on")
    ops = machine.folder / "fastdeploy" / "model_executor" / "ops"
    fault = f"TOKENBUS_FASTDEPLOY: on needs FastDeploy's ops, such as gpu or xpu in {ops}, got cute_dsl_ops, triton_ops"
    assert run.stderr.endswith(f"ImportError: {fault}\n")
    assert one_line(machine.tokenbus("python", *SERVER), 1) == f"tokenbus: {fault}"


def test_finder_of_an_old_kind(machine: Machine) -> None:
    program = f"""if True:
        import sys, types
        sys.meta_path.append(types.SimpleNamespace(find_module=lambda *_: None))
        import {OPS}.gpu
        try:
            import {OPS}.hardware_of_tomorrow
        except ModuleNotFoundError as error:
            print(error)
        """
    run = machine.run("python", "-W", "ignore", "-c", program, TOKENBUS_FASTDEPLOY="on")
    assert run.stdout == f"No module named '{OPS}.hardware_of_tomorrow'\n", run.stderr


def test_python_that_reads_no_pth_file(folder: Path) -> None:
    """Where Tokenbus is on PYTHONPATH alone the command switches as well; the `sitecustomize` there still runs."""
    stand_in.install(folder)
    bare = Machine(make_environment(folder / "bare", with_switch=False), folder)
    (folder / "sitecustomize.py").write_text("import sys; sys.own_sitecustomize = True\n")
    run = bare.tokenbus("python", *SERVER, "spawn", str(STEPS), "0")
    assert (run.returncode, run.stdout) == (0, SWITCHED), run.stderr
    seen = bare.tokenbus("python", "-c", "import sys; print(sys.own_sitecustomize)")
    assert seen.stdout == "True\n", seen.stderr
    (folder / "sitecustomize.py").unlink()
    assert bare.tokenbus("python", "-c", "print('alone')").stdout == "alone\n"


def test_python_that_prints_no_text(machine: Machine) -> None:
    (machine.folder / "sitecustomize.py").write_text("import os; os.write(2, b'\\xff\\n')\n")
    run = machine.run("sh", "-c", "tokenbus fastdeploy -- python -c 'print(1)' 2>/dev/null")
    assert run.stdout == "1\n"


@pytest.fixture(scope="module")
def bare() -> Iterator[Machine]:
    """An environment in which Tokenbus is on a path, and its .pth file is not installed."""
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as made:
        stand_in.install(Path(made))
        yield Machine(make_environment(Path(made, "bare"), with_switch=False), Path(made))


@pytest.mark.parametrize("flags", ["-E", "-I", "-S", "-uI", "-BE", "-X dev -I", "-W ignore -E", "-Xdev -bI"])
def test_python_that_cannot_be_switched(bare: Machine, flags: str) -> None:
    line = one_line(bare.tokenbus("python", *flags.split(), *SERVER), 1)
    assert line.startswith(f"tokenbus: {bare.python}: a Python that reads tokenbus_fastdeploy.pth or PYTHONPATH")


@pytest.mark.parametrize("first", ["{python} -I", "/usr/bin/env -S python -E", "{python} -Im"])
def test_script_that_cannot_be_switched(bare: Machine, first: str) -> None:
    program = bare.folder / "serve"
    program.write_text(f"#!{first.format(python=bare.python)}\nimport fastdeploy\n")
    program.chmod(0o755)
    command = [str(program)] if not first.endswith("m") else ["python", "-Im", "fastdeploy"]
    assert "a Python that reads tokenbus_fastdeploy.pth or PYTHONPATH" in one_line(bare.tokenbus(*command), 1)


def test_other_programs_load_nothing(machine: Machine) -> None:
    program = "import sys; print(*sys.modules)"
    off = machine.run("python", "-c", program)
    on = machine.run("python", "-c", program, TOKENBUS_FASTDEPLOY="on")
    ours = {"tokenbus", "tokenbus.on_use", "tokenbus.engines", "tokenbus.engines.fastdeploy_switch"}
    assert {*on.stdout.split()} - {*off.stdout.split()} == ours
    assert on.stderr == ""


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


def test_switch_off_of_edited_imports_where_fastdeploy_is_missing(machine: Machine) -> None:
    shutil.rmtree(machine.folder / "fastdeploy")
    program = "from tokenbus.engines.fastdeploy import OPS, Options; print(len(OPS)); "
    program += "from tokenbus.engines.fastdeploy import save_output"
    run = machine.run("python", "-c", program, TOKENBUS_FASTDEPLOY="off")
    assert run.stdout == "11\n"
    assert run.stderr.endswith(
        f"ImportError: cannot import name 'save_output' from '{OPS}.gpu', with TOKENBUS_FASTDEPLOY=off: "
        "No module named 'fastdeploy'\n"
    )
    unknown = machine.run("python", "-c", "from tokenbus.engines.fastdeploy import nothing", TOKENBUS_FASTDEPLOY="off")
    assert "ImportError: cannot import name 'nothing' from 'tokenbus.engines.fastdeploy'" in unknown.stderr


@pytest.fixture
def loaded() -> Iterator[ModuleType]:
    """A module with ops, as FastDeploy has just loaded it."""
    module = ModuleType(f"{OPS}.test")
    for op in (*stand_in.OPS, "static_op_save_output", "get_output_dynamic", "get_output_kv_signal"):
        setattr(module, op, lambda *_: None)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_names_of_ops(loaded: ModuleType) -> None:
    other = loaded.get_output_kv_signal
    replace_ops(loaded.__name__)
    for op in stand_in.OPS:
        assert getattr(loaded, op) is getattr(fastdeploy, op)
    assert loaded.static_op_save_output is fastdeploy.save_output
    assert loaded.get_output_kv_signal is other
    assert not hasattr(loaded, "mtp_save_first_token_with_topk")
    assert not hasattr(loaded, "__all__")


def test_op_of_the_queue_that_tokenbus_lacks(loaded: ModuleType) -> None:
    loaded.save_output_v2 = lambda *_: None  # type: ignore[attr-defined]
    loaded.get_output_logger = "no op"  # type: ignore[attr-defined]
    loaded.__getattr__ = {"own": "FastDeploy's"}.__getitem__  # type: ignore[method-assign]
    replace_ops(loaded.__name__)
    for op in ("save_output_v2", "get_output_dynamic"):
        with pytest.raises(ImportError) as refused:
            getattr(loaded, op)
        expected = f"on replaces 10 ops of {OPS}.test, and Tokenbus has none in the place of {op}"
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
    with pytest.raises(ImportError, match="Tokenbus has none in the place of save_output_v2"):
        assert compiled.save_output_v2
    assert not hasattr(compiled, "get_output")


def test_module_that_is_none() -> None:
    class NoneModule:
        def __getattr__(self, name: str) -> None:
            return None

    name = f"{OPS}.none"
    sys.modules[name] = NoneModule()  # type: ignore[assignment]
    try:
        with pytest.raises(ImportError) as refused:
            replace_ops(name)
    finally:
        del sys.modules[name]
    assert str(refused.value) == f"TOKENBUS_FASTDEPLOY: on needs a module {name}, got NoneModule"
    with pytest.raises(ImportError, match="got NoneType"):  # it removed itself
        replace_ops(name)
