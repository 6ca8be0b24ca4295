"""The deployment: its files agree with each other and with the code, and its script makes the keys that they name."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.waiting import MOST
from tokenbus.cli import gateway, processor, worker
from tokenbus.cli.arguments import Parser
from tokenbus.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service and name != "keys"}
"""`keys` makes the others' keys at the first start, and ends."""
COMMANDS = {"processor": processor, "worker": worker, "gateway": gateway}
# As Docker reads it: comments go first, then lines are joined.
DOCKERFILE = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
PROMETHEUS = YAML(typ="safe").load((ROOT / "deploy" / "prometheus.yml").read_text())


def instructions(word: str) -> list[str]:
    return re.findall(rf"^\s*{word} +(.+)$", DOCKERFILE, re.MULTILINE)


def dockerfile_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV")[1:] for pair in shlex.split(line))


# What is written down.


def test_the_file_holds_by_the_specification(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text((ROOT / "docker-compose.yml").read_text().replace("command: [worker", "comand: [worker"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    for path, status in ((ROOT / "docker-compose.yml", 0), (broken, 1)):
        run = subprocess.run([*check, str(path)], check=False, capture_output=True, text=True)
        assert run.returncode == status, run.stdout + run.stderr
    assert "'comand' was unexpected" in run.stdout


def test_services_have_no_rights_and_nothing_is_open_to_other_machines() -> None:
    images = [service["image"] for service in SERVICES.values()] + [line.split()[0] for line in instructions("FROM")]
    assert [image for image in images if not re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+[\w.-]*", image)] == []
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert instructions("USER") == ["tokenbus"]
    assert all(each["cap_drop"] == ["ALL"] and each["read_only"] for each in (*OURS.values(), SERVICES["keys"]))
    assert SERVICES["keys"]["network_mode"] == "none"
    for service in SERVICES.values():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert service["mem_limit"]
    for name, service in OURS.items():
        mounted = [volume.split(":")[0] for volume in service["volumes"]]
        assert [volume for volume in mounted if volume.endswith("-keys")] == [f"{name}-keys"]
        assert service["environment"]["TOKENBUS_BUS_KEY_FILE"] == f"/keys/{name}/{name}.key_secret"
        assert service["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
        assert service["restart"] == "unless-stopped"


def test_prometheus_asks_the_services_that_are_there() -> None:
    found: dict[str, tuple[str, str]] = {}
    for config in PROMETHEUS["scrape_configs"]:
        (discovered,) = config["dns_sd_configs"]
        assert discovered["type"] == "A"
        found |= {name: (config["job_name"], str(discovered["port"])) for name in discovered["names"]}
    assert found == {name: (name, _metrics_port(name)) for name in OURS}
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["prometheus"]["volumes"]}
    config = SERVICES["prometheus"]["command"][0].removeprefix("--config.file=")
    assert mounted[config] == "./deploy/prometheus.yml"
    for rules in PROMETHEUS["rule_files"]:
        assert (ROOT / mounted[str(Path(config).parent / rules)]).is_file()


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = YAML(typ="safe").load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "tokenbus.json").read_text()
    assert {panel["datasource"]["uid"] for panel in json.loads(dashboard)["panels"] if "datasource" in panel} == {
        source["uid"]
    }
    (provider,) = YAML(typ="safe").load((provisioning / "dashboards" / "tokenbus.yml").read_text())["providers"]
    grafana = SERVICES["grafana"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    assert mounted[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / mounted[str(home.parent)] / home.name).is_file()
    assert mounted["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"


# The image.


@pytest.mark.nightly
def test_the_image_can_be_built_from_what_it_copies(tmp_path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for line in instructions("COPY"):
        *sources, target = line.split()
        if sources[0].startswith("--from"):
            continue
        for source in sources:
            assert any(f"!{part}" in ignored for part in (source, *map(str, Path(source).parents))), source
            into = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(ROOT / source, into)
    (build,) = [line for line in instructions("RUN") if "hatchling build" in line]
    command = shlex.split(build.split("&&")[0])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tokenbus/cli/worker.py", "tokenbus_contracts/py.typed", "tokenbus_gpu_ops/py.typed"} <= set(names)


def test_the_image_is_made_of_locked_packages() -> None:
    installs = " ".join(instructions("RUN"))
    for lock in ("image", "build"):
        assert f"pip install --require-hashes --requirement requirements/{lock}.txt" in installs
    names = re.findall(r"^([a-z][\w-]*)==", (ROOT / "requirements" / "image.txt").read_text(), re.MULTILINE)
    assert {"cryptography", "jinja2", "nats-py", "tokenizers", "uvicorn"} <= set(names)


# The services.


def _made_keys(folder: Path) -> dict[str, str]:
    """Run what makes the keys, after an interrupted start and again, which must change nothing; return its files."""
    (script,) = SERVICES["keys"]["command"]
    for name in OURS:
        (folder / name).mkdir()
    (folder / "processor" / "made.toml").write_text("what was written up to")
    command = [*SERVICES["keys"]["entrypoint"], script.replace("$$", "$").replace("/keys/", f"{folder}/")]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    before: dict[str, str] = {}
    for _ in range(2):
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, timeout=MOST)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        made = {f"/keys/{path.relative_to(folder)}": path.read_text() for path in paths}
        assert len(made) == 9
        assert before in ({}, made)
        before = made
    return before


@pytest.mark.nightly
def test_services_find_each_other_with_the_keys_that_are_made(tmp_path: Path) -> None:
    """Each command parses, its settings load, its keys are made and allowed, and it is asked where it tells its health.

    tests/system starts such processes: what is written down about them is all that the file adds.
    """
    made = _made_keys(tmp_path)
    settings: dict[str, Settings] = {}
    for name, service in OURS.items():
        command, *arguments = service["command"]
        parser = Parser(prog=command)
        COMMANDS[name].declare(parser)
        parser.options(arguments)
        given = {key: _filled(value) for key, value in (dockerfile_environment() | service["environment"]).items()}
        settings[name] = Settings.load(environment=given)
        assert {value for value in given.values() if value.startswith("/keys/")} <= made.keys()
        assert f"{name}-keys:/keys/{name}" in SERVICES["keys"]["volumes"]
        assert any(volume.startswith(f"{name}-keys:/keys/{name}") for volume in service["volumes"])
        (url,) = re.findall(r"http://127.0.0.1:(\d+)/healthz", service["healthcheck"]["test"][-1])
        assert url == _metrics_port(name)
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["tokenbus"]
    own = settings["processor"].bus
    here = "//0.0.0.0:"
    assert settings["worker"].bus.workers_address == own.workers_address.replace(here, "//processor:")
    assert settings["gateway"].bus.clients_address == own.clients_address.replace(here, "//processor:")
    allowed = {key["name"]: key for key in tomllib.loads(made["/keys/processor/allowed.toml"])["key"]}
    names = {"worker": settings["worker"].worker.id, "gateway": settings["gateway"].client.name}
    for name, called in names.items():
        assert made[f"/keys/{name}/processor.key"] == made["/keys/processor/processor.key"]
        assert f'public-key = "{allowed[name]["public"]}"' in made[f"/keys/{name}/{name}.key"]
        assert any(fnmatch(called, pattern) for pattern in allowed[name]["names"])


def _metrics_port(name: str) -> str:
    address: str = SERVICES[name]["environment"][f"TOKENBUS_{name.upper()}_METRICS_ADDRESS"]
    return address.rpartition(":")[2]


def _filled(value: object) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
