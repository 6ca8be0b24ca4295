"""The Kubernetes manifests: valid by its schemas, of one piece, and run as they are written down."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme
from ruamel.yaml import YAML

from tests.pages import ROOT, blocks
from tests.shell import command_lines
from tests.support.kubectl import kubectl_line, kustomized, objects_of
from tests.support.ports import reserved_port
from tests.support.waiting import MOST, wait_until
from tokenbus_services.cli.arguments import Parser
from tokenbus_services.settings import Settings

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("base", "gpu", "log")
VERSIONS = ("1.30", "1.37")
"""The oldest that has what the manifests use, and the newest that the package has."""
Manifest = dict[str, Any]


def rendered(name: str) -> list[Manifest]:
    return deepcopy(kustomized(FOLDER / name))


def of_kind(objects: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] in kinds]


def workloads(objects: list[Manifest]) -> list[Manifest]:
    return of_kind(objects, "StatefulSet", "Deployment")


def ours(objects: list[Manifest]) -> list[Manifest]:
    return [
        each for each in workloads(objects) if selects({"matchLabels": {"app.kubernetes.io/name": "tokenbus"}}, each)
    ]


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: Manifest) -> list[Manifest]:
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def main(workload: Manifest) -> Manifest:
    (container,) = pod(workload)["containers"]
    return dict(container)


def selects(selector: Manifest, workload: Manifest) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    matches = selector.get("matchLabels", {}).items() <= labels.items()
    return matches and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def ports(workload: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in main(workload)["ports"]}


def file_of(objects: list[Manifest], name: str, file: str) -> str:
    (found,) = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].rpartition("-")[0] == name]
    text: str = found["data"][file]
    return text


def environment(workload: Manifest, name: str) -> dict[str, str]:
    found = {}
    for variable in main(workload)["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        found[variable["name"]] = variable.get("value", name)
    return found


def loaded(objects: list[Manifest], workload: Manifest, folder: Path) -> Settings:
    path = folder / "settings.toml"
    path.write_text(file_of(objects, "settings", "settings.toml"))
    variables = environment(workload, f"{workload['metadata']['name']}-0")
    assert variables["TOKENBUS_SETTINGS"] == "/etc/tokenbus/settings/settings.toml"
    return Settings.load(environment=variables | {"TOKENBUS_SETTINGS": str(path)})


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


# What is written down.


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_hold_by_the_schemas(objects: list[Manifest], version: str) -> None:
    assert len(objects) >= 15
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    (wrong,) = [deepcopy(each) for each in workloads(objects) if each["kind"] == "Deployment"]
    pod(wrong)["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_what_kubectl_cannot_read_fails_here(tmp_path: Path) -> None:
    """A file that YAML 1.2 allows and kubectl refuses ends these tests with kubectl's own words."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / "log" / "nats.yaml"
    path.write_text(
        path.read_text().replace('path: "/healthz?js-server-only=true"', "path: /healthz?js-server-only=true")
    )
    assert list(YAML(typ="safe").load_all(path.read_text()))
    with pytest.raises(AssertionError, match=r"MalformedYAMLError: yaml: line 48: .* in File: nats\.yaml"):
        kustomized(path.parent)


def test_every_file_is_used() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(OVERLAYS)
    for name in OVERLAYS:
        (kustomization,) = objects_of((FOLDER / name / "kustomization.yaml").read_text())
        made = [file for each in kustomization.get("configMapGenerator", []) for file in each["files"]]
        patches = [each["path"] for each in kustomization.get("patches", [])]
        named = {"kustomization.yaml", *kustomization["resources"], *made, *patches} - {"../base"}
        assert {path.name for path in (FOLDER / name).iterdir()} == named


def test_selectors_find_their_pods(objects: list[Manifest]) -> None:
    for each in workloads(objects):
        assert [selects(each["spec"]["selector"], other) for other in workloads(objects)].count(True) == 1
        assert selects(each["spec"]["selector"], each)
        (constraint,) = pod(each)["topologySpreadConstraints"]
        assert selects(constraint["labelSelector"], each)
    services = {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}
    for service in services.values():
        (found,) = [each for each in workloads(objects) if selects({"matchLabels": service["spec"]["selector"]}, each)]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports(found))
    for each in of_kind(objects, "StatefulSet"):
        assert services[each["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    budgets = of_kind(objects, "PodDisruptionBudget")
    for each in workloads(objects):
        (budget,) = [one for one in budgets if selects(one["spec"]["selector"], each)]
        assert budget["spec"]["maxUnavailable"] < each["spec"]["replicas"]


def test_network_policies_allow_what_the_settings_need_and_no_more(objects: list[Manifest], tmp_path: Path) -> None:
    allowed = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        targets = [each for each in workloads(objects) if selects(policy["spec"]["podSelector"], each)]
        assert targets
        for direction, ways in (("from", policy["spec"].get("ingress", [])), ("to", policy["spec"].get("egress", []))):
            for way in ways:
                for peer in way[direction]:
                    others = [each for each in workloads(objects) if selects(peer.get("podSelector", {}), each)]
                    for port in way["ports"]:
                        if "podSelector" in peer and isinstance(port["port"], str):
                            for target, other in ((a, b) for a in targets for b in others):
                                listening = target if direction == "from" else other
                                assert port["port"] in ports(listening), policy["metadata"]["name"]
                                allowed.add((direction, *_names(target, other), port["port"]))
    needed = {
        ("from", "processor", "worker", "workers"),
        ("from", "processor", "gateway", "clients"),
        ("to", "worker", "processor", "workers"),
        ("to", "gateway", "processor", "clients"),
    }
    if len(workloads(objects)) > len(ours(objects)):
        needed |= {(way, "nats", "nats", "cluster") for way in ("from", "to")}
        for port in ("nats", "monitor"):
            needed |= {("from", "nats", "processor", port), ("to", "processor", "nats", port)}
    assert allowed == needed
    (first,) = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "nothing-else"]
    assert first["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (processor,) = [each for each in workloads(objects) if each["metadata"]["name"] == "processor"]
    found = loaded(objects, processor, tmp_path).bus
    assert (found.workers_address, found.clients_address) == tuple(
        f"tcp://0.0.0.0:{ports(processor)[name]}" for name in ("workers", "clients")
    )


def _names(*found: Manifest) -> list[str]:
    return [each["metadata"]["name"] for each in found]


def test_addresses_name_every_processor(objects: list[Manifest], tmp_path: Path) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    (processor,) = [each for each in workloads(objects) if each["metadata"]["name"] == "processor"]
    named = [f"processor-{place}.processor" for place in range(processor["spec"]["replicas"])]
    port = {each["name"]: each["port"] for each in services["processor"]["ports"]}
    for each in ours(objects):
        if each is not processor:
            bus = loaded(objects, each, tmp_path).bus
            assert bus.workers_address == ",".join(f"tcp://{name}:{port['workers']}" for name in named)
            assert bus.clients_address == ",".join(f"tcp://{name}:{port['clients']}" for name in named)


def test_pods_have_no_rights_and_time_to_end(objects: list[Manifest], tmp_path: Path) -> None:
    for each in workloads(objects):
        spec = pod(each)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        for container in containers(each):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {"requests", "limits"} <= set(container["resources"])
            assert re.fullmatch(r"[a-z/-]+:\d+\.\d+\.\d+(-alpine)?", container["image"])
    for each in ours(objects):
        spec, settings = pod(each), loaded(objects, each, tmp_path)
        before = main(each).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drains = {
            "processor": settings.processor.drain_timeout_ms,
            "worker": 2 * settings.worker.drain_timeout_ms,
            "gateway": settings.gateway.drain_timeout_ms + 5000,
        }
        longest = before + drains[each["metadata"]["name"]] / 1000 + settings.bus.linger_ms / 1000
        assert spec["terminationGracePeriodSeconds"] > longest


def made_by_the_page(folder: Path) -> list[Manifest]:
    lines = [each.command for each in command_lines("docs/scaling.md") if " create " in each.command]
    for name in ["password", *re.findall(r"--from-file=(\S+)", " ".join(lines))]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return [json.loads(kubectl_line(line, folder, "--dry-run=client", "--output=json")) for line in lines]


def test_volumes_are_there_and_steps_make_what_they_need(objects: list[Manifest], tmp_path: Path) -> None:
    """Each mount has a volume; each secret and ConfigMap is generated, or made by a line of docs/scaling.md.

    What containers read from it, by their arguments and variables, is among its files.
    """
    made = [*of_kind(objects, "ConfigMap"), *made_by_the_page(tmp_path)]
    assert {each["metadata"].get("namespace", "tokenbus") for each in made} == {"tokenbus"}
    files = {(each["kind"], each["metadata"]["name"]): set(each.get("data", {})) for each in made}
    for each in workloads(objects):
        volumes = {volume["name"]: volume for volume in pod(each)["volumes"]}
        mounts = [(container, mount) for container in containers(each) for mount in container["volumeMounts"]]
        claimed = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for _, mount in mounts} == set(volumes) | claimed
        for container, mount in mounts:
            volume = volumes.get(mount["name"], {})
            if "secret" in volume:
                assert read_from(mount, container) <= files["Secret", volume["secret"]["secretName"]]
            if "configMap" in volume:
                assert read_from(mount, container) <= files["ConfigMap", volume["configMap"]["name"]]


def read_from(mount: Manifest, container: Manifest) -> set[str]:
    words = [*container.get("command", []), *container.get("args", [])]
    words += [variable["value"] for variable in container.get("env", []) if "value" in variable]
    return {word.removeprefix(f"{mount['mountPath']}/") for word in words if word.startswith(f"{mount['mountPath']}/")}


def test_page_sets_the_image_of_every_container(objects: list[Manifest]) -> None:
    lines = " ".join(line.command for line in command_lines("docs/scaling.md"))
    found = re.findall(r"set image \w+/(\w+) (\w+)=\S+ (\w+)=", lines)
    assert found
    for workload, *names in found:
        (named,) = [each for each in workloads(objects) if each["metadata"]["name"] == workload]
        assert {container["name"] for container in containers(named)} == set(names)


def test_commands_are_the_programs(objects: list[Manifest]) -> None:
    from tokenbus_services.cli import gateway, processor, worker  # noqa: PLC0415 - each brings its libraries

    for each in ours(objects):
        command, *arguments = main(each)["args"]
        for given, fault in ((arguments, None), ([*arguments[:2], "--no-such-option"], SystemExit)):
            parser = Parser(prog=command)
            {"gateway": gateway, "processor": processor, "worker": worker}[command].declare(parser)
            with pytest.raises(fault) if fault else contextlib.nullcontext():
                parser.options(given)


def test_page_has_settings_and_variables_that_are_valid(tmp_path: Path) -> None:
    page = "docs/scaling.md"
    block = blocks("toml", of=page)[0].text
    path = tmp_path / "tokenbus.toml"
    path.write_text(block)
    given = dict(re.findall(r"`(TOKENBUS_\w+)=([^`]+)`", (ROOT / page).read_text()))
    assert given.keys() == {
        *("TOKENBUS_SETTINGS", "TOKENBUS_PROCESSOR_ID", "TOKENBUS_WORKER_ID"),
        *(f"TOKENBUS_BUS_{name}" for name in ("WORKERS_ADDRESS", "CLIENTS_ADDRESS", "ALLOWED_KEYS")),
    }
    bus = Settings.load(environment={"TOKENBUS_SETTINGS": str(path)}).bus
    assert len(bus.workers_address.split(",")) == len(bus.clients_address.split(","))
    own = Settings.load(environment=given | {"TOKENBUS_SETTINGS": str(path)}).bus
    assert bus.workers_address.startswith(own.workers_address)
    assert bus.clients_address.startswith(own.clients_address)


# The pods.


class Cluster:
    """The pods of a kustomization as processes, with names and ports that are this machine's own."""

    def __init__(self, name: str, folder: Path, cleanup: contextlib.ExitStack) -> None:
        self.folder = folder
        self.objects = rendered(name)
        self.pods: dict[str, tuple[Manifest, subprocess.Popen[bytes], Path]] = {}
        self._cleanup = cleanup
        self._ports: dict[tuple[str, str], int] = {}
        for line in command_lines("docs/scaling.md"):
            if line.command.startswith(("tokenbus keygen", "tokenbus keys", "tokenbus api-keys")):
                self._tokenbus(line.command)

    def _tokenbus(self, command: str) -> None:
        program = str(Path(sys.executable).with_name("tokenbus"))
        words = [program, *shlex.split(command)[1:]]
        run = subprocess.run(words, cwd=self.folder, check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr

    def start(self, workload: Manifest) -> None:
        for place in range(workload["spec"]["replicas"]):
            name = f"{workload['metadata']['name']}-{place}"
            at = self.folder / name
            at.mkdir()
            program, config = ("tokenbus", "settings") if workload in ours(self.objects) else ("nats-server", "nats")
            file = {"settings": "settings.toml", "nats": "nats.conf"}[config]
            (at / file).write_text(self._here(name, file_of(self.objects, config, file)))
            inherited = {key: value for key, value in os.environ.items() if not key.startswith("TOKENBUS_")}
            own = {key: self._here(name, value) for key, value in environment(workload, name).items()}
            arguments = [self._here(name, argument) for argument in main(workload)["args"]]
            command = [str(Path(sys.executable).with_name(program)), *arguments]
            log = at / "log"
            with log.open("wb") as output:
                process = subprocess.Popen(command, env=inherited | own, cwd=at, stdout=output, stderr=output)
            self._cleanup.callback(process.wait)
            self._cleanup.callback(process.kill)
            self.pods[name] = workload, process, log

    def answers(self, name: str, probe: str) -> bool:
        workload, process, log = self.pods[name]
        assert process.poll() is None, log.read_text()
        get = main(workload)[probe]["httpGet"]
        url = self._here(name, f"http://0.0.0.0:{ports(workload)[get['port']]}{get['path']}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=MOST) as answer:  # noqa: S310 - it is http
            return bool(answer.status == 200)
        return False

    def _here(self, name: str, text: str) -> str:
        """Return a text with the addresses and paths of this test."""

        def address(match: "re.Match[str]") -> str:
            host = name if match[1] == "0.0.0.0" else match[1].split(".")[0]  # noqa: S104 - it is what is written there
            return f"127.0.0.1:{self._port(host, match[2])}"

        text = re.sub(r"\b([\w-]+\.(?:processor|nats)|0\.0\.0\.0):(\d+)", address, text)
        mounts = {
            "/etc/tokenbus/settings": self.folder / name,
            "/etc/tokenbus/api-keys": self.folder,
            "/keys/own": self.folder / "keys",
            "/keys/public": self.folder / "keys",
            "/keys/nats": self.folder / "tls",
            "/etc/nats/config": self.folder / name,
            "/etc/nats/tls": self.folder / "tls",
            "/data": self.folder / name / "data",
        }
        # In one pass: what is put in may look like a mount itself.
        return re.sub(rf'(?<![^"])({"|".join(mounts)})(?=[/"]|$)', lambda match: str(mounts[match[1]]), text)

    def _port(self, host: str, port: str) -> int:
        if (host, port) not in self._ports:
            self._ports[host, port] = reserved_port(self._cleanup)
        return self._ports[host, port]


@pytest.fixture(params=["base", "log"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as cleanup:
        yield Cluster(request.param, tmp_path, cleanup)


def add_nats_secrets(folder: Path) -> None:
    (folder / "tls").mkdir()
    (folder / "users").mkdir()
    issued = trustme.CA()
    issued.cert_pem.write_to_path(str(folder / "tls" / "ca.crt"))
    own = issued.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(str(folder / "tls" / "tls.crt"))
    own.private_key_pem.write_to_path(str(folder / "tls" / "tls.key"))
    (folder / "users" / "passwords.conf").write_text('processor_password: "secret"\n')
    (folder / "keys" / "nats").write_text("processor:secret\n")
    (folder / "keys" / "nats").chmod(0o600)


def test_pods_pass_their_probes_and_find_each_other(cluster: Cluster) -> None:
    """With keys as the page makes them each pod passes all of its probes, a gateway's /readyz too: it has workers.

    A processor with a durable log listens only once that is there, on three servers that sync always.
    """
    add_nats_secrets(cluster.folder)
    for workload in reversed(workloads(cluster.objects)):
        cluster.start(workload)
    assert len(cluster.pods) == sum(each["spec"]["replicas"] for each in workloads(cluster.objects)) >= 6
    for name in cluster.pods:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            wait_until(partial(cluster.answers, name, probe))
    for is_ours in (True, False):  # the log's servers last: processors write to it until they end
        ending = [pod for pod in cluster.pods.values() if (pod[0] in ours(cluster.objects)) is is_ours]
        for _, process, _ in ending:
            process.send_signal(signal.SIGTERM)
        for _, process, log in ending:
            assert process.wait(MOST) == 0, log.read_text()
