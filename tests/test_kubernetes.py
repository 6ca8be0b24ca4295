"""The Kubernetes base: the real kustomize renders it, and its objects hold by the schemas and by our own commands."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.pages import ROOT
from tests.shell import command_lines
from tests.support.kubectl import kustomized
from tokenbus.cli import gateway, processor, worker
from tokenbus.cli.arguments import Parser
from tokenbus.settings import Settings

BASE = ROOT / "deploy" / "kubernetes" / "base"
VERSIONS = ("1.30", "1.37")
"""The oldest that has what the manifests use, and the newest that the package has."""
COMMANDS = {"processor": processor, "worker": worker, "gateway": gateway}
Manifest = dict[str, Any]


def test_base(tmp_path: Path) -> None:
    """Each object is valid; each pod's settings load, its command parses, and its volumes are made."""
    objects = kustomized(BASE)
    check_schemas(objects)
    workloads = {each["metadata"]["name"]: each for each in objects if each["kind"] in ("StatefulSet", "Deployment")}
    assert set(workloads) == set(COMMANDS)
    (settings,) = [each for each in objects if each["kind"] == "ConfigMap"]
    (tmp_path / "settings.toml").write_text(settings["data"]["settings.toml"])
    page = " ".join(line.command for line in command_lines("docs/scaling.md"))
    made = {settings["metadata"]["name"], *re.findall(r"create (?:secret generic|configmap) (\S+)", page)}
    for name, workload in workloads.items():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        check_settings(container, tmp_path / "settings.toml")
        command, *arguments = container["args"]
        parser = Parser(prog=command)
        COMMANDS[name].declare(parser)
        parser.options(arguments)
        mounts = [each for one in (*pod["initContainers"], container) for each in one["volumeMounts"]]
        assert {each["name"] for each in mounts} == {each["name"] for each in pod["volumes"]}
        named = [each.get("secret", each.get("configMap", {})) for each in pod["volumes"]]
        assert {each.get("secretName", each.get("name")) for each in named} - {None} <= made
        assert {one["image"] for one in (*pod["initContainers"], container)} == {"tokenbus:0.1.0.dev0"}
    ports = {each["name"] for one in workloads.values() for each in _container(one)["ports"]}
    for policy in (each["spec"] for each in objects if each["kind"] == "NetworkPolicy"):
        ways = [*policy.get("ingress", []), *policy.get("egress", [])]
        assert {each["port"] for way in ways for each in way["ports"] if isinstance(each["port"], str)} <= ports


def check_schemas(objects: list[Manifest]) -> None:
    wrong = deepcopy(next(each for each in objects if each["kind"] == "Deployment"))
    _container(wrong)["readinesProbe"] = {}
    for version in VERSIONS:
        for each in objects:
            kubernetes_validate.validate(each, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
            kubernetes_validate.validate(wrong, version, strict=True)


def check_settings(container: Manifest, path: Path) -> None:
    variables = {each["name"]: each.get("value", "a-name") for each in container["env"]}
    assert variables["TOKENBUS_SETTINGS"] == "/etc/tokenbus/settings/settings.toml"
    Settings.load(environment=variables | {"TOKENBUS_SETTINGS": str(path)})


def _container(workload: Manifest) -> Manifest:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]
