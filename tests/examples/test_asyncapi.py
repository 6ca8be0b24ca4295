"""The AsyncAPI document, read by AsyncAPI's own parser."""

import json
import subprocess

import pytest

from tests.examples.programs import script
from tests.pages import ROOT
from tokenbus_contracts.published.asyncapi import asyncapi
from tokenbus_contracts.published.descriptors import Schema


@pytest.mark.nightly
def test_document_is_one_for_its_own_parser() -> None:
    """It finds no fault, and the channels, operations and messages that are in the document."""
    document = asyncapi(Schema.installed())
    command = script(ROOT / "tests" / "asyncapi" / "parse.js")
    run = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("messages") == len(document["components"]["messages"])
    assert found == {
        "faults": [],
        "version": "3.0.0",
        "channels": list(document["channels"]),
        "operations": [f"{each['action']} {name}" for name, each in document["operations"].items()],
    }
