"""The deployment: its files agree with each other and with the code, and its services run as they are written down."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from tests.support.ports import reserved_port
from tests.support.processes import start
from tests.support.waiting import MOST, wait_until
from tests.system.programs import Program

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service and name != "keys"}
"""`keys` makes the others' keys at the first start, and ends."""
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


class Deployment:
    """Our services as processes, with hosts and ports that are this machine's own."""

    def __init__(self, folder: Path, cleanup: contextlib.ExitStack) -> None:
        self._folder = folder
        self._cleanup = cleanup
        self._ports: dict[tuple[str, str], int] = {}
        self.programs: dict[str, Program] = {}

    def start(self, name: str) -> None:
        entry: list[str] = json.loads(instructions("ENTRYPOINT")[0])
        program, arguments = entry[0], entry[1:] + SERVICES[name]["command"]
        assert program == "tokenbus"
        command = [str(Path(sys.executable).with_name(program)), *(self._here(name, text) for text in arguments)]
        process = start(command, self.environment(name), is_merged=True, folder=self._folder)
        self.programs[name] = self._cleanup.enter_context(Program(name, process))

    def environment(self, name: str) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")}
        given = dockerfile_environment() | SERVICES[name]["environment"]
        return environment | {key: self._here(name, _filled(value)) for key, value in given.items() if key != "PATH"}

    def make_keys(self) -> None:
        """Run what makes the keys, after an interrupted start and again, which must change nothing."""
        service = SERVICES["keys"]
        (script,) = service["command"]
        keys = self._folder / "keys"
        keys.mkdir()
        for target in [volume.split(":")[1] for volume in service["volumes"]]:
            (keys / Path(target).name).symlink_to(self._mounted("keys", target))
        (keys / "processor" / "made.toml").write_text("what was written up to")
        command = [*service["entrypoint"], script.replace("$$", "$").replace("/keys/", f"{keys}/")]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        before: dict[Path, str] = {}
        for _ in range(2):
            subprocess.run(command, env=environment, cwd=self._folder, check=True, capture_output=True, timeout=MOST)
            made = {path: path.read_text() for path in (self._folder / "volumes").rglob("*") if path.is_file()}
            assert len(made) == 9
            assert before in ({}, made)
            before = made

    def becomes_healthy(self, name: str) -> None:
        program, *arguments = SERVICES[name]["healthcheck"]["test"][1:]
        assert program == "python"
        command = [sys.executable, *(self._here(name, text) for text in arguments)]

        def is_healthy() -> bool:
            assert self.programs[name].is_running, self.programs[name].output
            return subprocess.run(command, check=False, capture_output=True).returncode == 0

        wait_until(is_healthy)

    def metrics(self, name: str) -> dict[tuple[str, str], float]:
        target = f"{name}:{_metrics_port(name)}"
        with urllib.request.urlopen(f"http://{self._here('prometheus', target)}/metrics", timeout=MOST) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return {
            (sample.name, " ".join(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    def until_told(self, service: str, name: str, label: str, value: float) -> None:
        wait_until(lambda: self.metrics(service).get((name, label)) == value)

    def _here(self, service: str, text: str) -> str:
        """Return a text with the hosts and ports, and the folder, of this test."""
        hosts = "|".join(SERVICES)

        def address(match: "re.Match[str]") -> str:
            host = match[1] if match[1] in SERVICES else service
            return f"127.0.0.1:{self._port(host, match[2])}"

        text = re.sub(rf"\b({hosts}|0\.0\.0\.0|127\.0\.0\.1):(\d+)", address, text)
        return re.sub(r'^/\w[^"]*|(?<=")/\w[^"]*', lambda path: self._mounted(service, path[0]), text)

    def _mounted(self, service: str, path: str) -> str:
        """Return where a path of a service is here: in the folder of the volume that it is mounted from, or its own."""
        for volume in SERVICES[service].get("volumes", []):
            source, target, *_ = volume.split(":")
            if path == target or path.startswith(f"{target}/"):
                at = self._folder / "volumes" / source
                at.mkdir(mode=0o700, parents=True, exist_ok=True)
                return f"{at}{path.removeprefix(target)}"
        return f"{self._folder / service}{path}"

    def _port(self, host: str, port: str) -> int:
        if (host, port) not in self._ports:
            self._ports[host, port] = reserved_port(self._cleanup)
        return self._ports[host, port]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with contextlib.ExitStack() as cleanup:
        yield Deployment(tmp_path, cleanup)


@pytest.mark.nightly
def test_services_become_healthy_and_find_each_other(deployment: Deployment) -> None:
    """Each of our services, run by its own command and variables, passes its own health check, and sees the others.

    The processor is started last: nothing in the file makes others wait for it. All leave when they are stopped.
    """
    deployment.make_keys()
    for name in ("worker", "gateway", "processor"):
        deployment.start(name)
    assert set(deployment.programs) == set(OURS)
    for name in OURS:
        deployment.becomes_healthy(name)
    deployment.until_told("processor", "tokenbus_peers", "worker connected", 1.0)
    deployment.until_told("worker", "tokenbus_worker_connected_processors", "worker-0", 1.0)
    deployment.until_told("gateway", "tokenbus_gateway_connected_processors", "", 1.0)
    assert ("tokenbus_stream_tokens_total", "worker-0") in deployment.metrics("processor")
    for name in ("gateway", "worker", "processor"):
        assert deployment.programs[name].terminate() == 0, name


def _metrics_port(name: str) -> str:
    address: str = SERVICES[name]["environment"][f"TOKENBUS_{name.upper()}_METRICS_ADDRESS"]
    return address.rpartition(":")[2]


def _filled(value: object) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
