"""Settings: where they come from, what is refused, and the page that says so."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tokenbus.settings import ENTRIES, SECTIONS, Entry, Settings, SettingsError, WorkerSettings
from tokenbus.settings.__main__ import page
from tokenbus_contracts import Limits
from tokenbus_contracts.generated import client_pb2, stream_pb2
from tokenbus_contracts.schema import bounds_in

ROOT = Path(__file__).resolve().parents[2]
WHOLE = [entry for entry in ENTRIES.values() if type(entry.default) is int]
ENDPOINTS = "tcp://HOST:PORT, ipc://PATH or memory://NAME"
ENDPOINTS += ", or a comma-separated list of up to 64 different ones"


def key_of(entry: Entry) -> str:
    return entry.key


def load(**environment: str) -> Settings:
    return Settings.load(environment=environment)


def refusal(**environment: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load(**environment)
    return str(refused.value)


def test_every_field_is_an_entry() -> None:
    assert list(SECTIONS) == [item.name for item in fields(Settings)]
    described = [(section, item) for section, maker in SECTIONS.items() for item in fields(maker) if item.metadata]
    assert [key for key in ENTRIES if not key.startswith("limits.")] == [
        f"{name}.{item.name}" for name, item in described
    ]
    assert len({entry.variable for entry in ENTRIES.values()}) == len(ENTRIES)
    assert all(entry.meaning and entry.valid for entry in ENTRIES.values())


def test_order_of_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text('[worker]\nid = "of-file"\nmodel = "of-file"\nmax_requests = 3\n')
    environment = {"TOKENBUS_WORKER_ID": "of-variable", "TOKENBUS_WORKER_MODEL": "of-variable"}
    worker = Settings.load(file, environment, {"worker.id": "of-override"}).worker
    assert (worker.id, worker.model, worker.max_requests, worker.top_logprobs) == ("of-override", "of-variable", 3, 0)
    (tmp_path / "other").write_text('[worker]\nid = "other"\n')
    assert Settings.load(environment={"TOKENBUS_SETTINGS": str(tmp_path / "other")}).worker.id == "other"
    assert Settings.load(file, {"TOKENBUS_SETTINGS": str(tmp_path / "other")}).worker.id == "of-file"
    not_given = Settings.load(file, environment, {"worker.id": None, "worker.max_requests": "4"}).worker
    assert (not_given.id, not_given.max_requests) == ("of-variable", 4)
    for value in ("70000", 70000):
        with pytest.raises(SettingsError, match=r"^processor\.max_workers: 1 to 65536 workers, got 70000$"):
            Settings.load(environment={}, overrides={"processor.max_workers": value})


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=key_of)
def test_every_setting_is_read_from_every_source(entry: Entry, tmp_path: Path) -> None:
    default = entry.default
    text = str(default).lower() if isinstance(default, bool) else str(default)
    literal = f'"{default}"' if isinstance(default, str) else text
    (tmp_path / "file").write_text(f"[{entry.section}]\n{entry.name} = {literal}\n")
    from_file = Settings.load(tmp_path / "file", {})
    from_variable = Settings.load(environment={entry.variable: text})
    from_override = Settings.load(environment={}, overrides={entry.key: text})
    for settings in (from_file, from_variable, from_override):
        value = entry.value_in(settings)
        assert (value, type(value)) == (default, type(default))


@pytest.mark.parametrize("entry", WHOLE, ids=key_of)
def test_every_bound_of_a_number(entry: Entry) -> None:
    low, high = map(int, entry.valid.split()[::2][:2])
    for value in (low, high):
        assert entry.convert(value) == value
    for value in (low - 1, high + 1):
        assert refusal(**{entry.variable: str(value)}) == f"{entry.variable}: {entry.valid}, got {value}"
        with pytest.raises(ValueError, match=rf"^{entry.key}: .*, got {value}$"):
            replace(getattr(Settings(), entry.section), **{entry.name: value})


@pytest.mark.parametrize(
    ("variable", "value", "valid"),
    [
        ("WORKER_ID", "", "text of 1 to 64 bytes"),
        ("WORKER_ID", "é" * 33, "text of 1 to 64 bytes"),
        ("WORKER_ID", "\udcff", "text of 1 to 64 bytes"),
        ("WORKER_ROLE", "decoder", "one of mixed, prefill, decode"),
        *(("PROCESSOR_MAX_WORKERS", value, "1 to 65536 workers") for value in ("half", "1.5", "nan", "inf")),
        *(("PROCESSOR_MAX_WORKERS", value, "1 to 65536 workers") for value in ("", " 1", "\uff11", "0x10")),
        ("BUS_INSECURE", "maybe", "true or false"),
        ("LOG_LEVEL", "trace", "one of debug, info, warning, error"),
        ("BUS_WORKERS_ADDRESS", "127.0.0.1:5570", ENDPOINTS),
        ("BUS_WORKERS_ADDRESS", "tcp://127.0.0.1", ENDPOINTS),
        ("BUS_WORKERS_ADDRESS", "tcp://127.0.0.1:65536", ENDPOINTS),
        ("BUS_WORKERS_ADDRESS", "ipc://", ENDPOINTS),
        ("BUS_WORKERS_ADDRESS", "ipc:///a\nb", ENDPOINTS),
        ("PROCESSOR_METRICS_ADDRESS", "9470", "HOST:PORT, or empty"),
        ("PROCESSOR_METRICS_ADDRESS", "localhost:*", "HOST:PORT, or empty"),
    ],
)
def test_value_out_of_range(variable: str, value: object, valid: str) -> None:
    assert refusal(**{f"TOKENBUS_{variable}": str(value)}) == f"TOKENBUS_{variable}: {valid}, got {value!r}"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *(("bus.workers_address", each, each) for each in ("tcp://127.0.0.1:*", "tcp://[::1]:0", "ipc:///tmp/x")),
        *(("processor.metrics_address", each, each) for each in ("", "0.0.0.0:65535")),
        ("bus.workers_address", "memory://x", "memory://x"),
        ("worker.id", "é" * 32, "é" * 32),
        *(("bus.insecure", each, True) for each in ("true", "TRUE", "1")),
        *(("bus.insecure", each, False) for each in ("False", "0")),
    ],
)
def test_value_at_the_edge(key: str, text: str, value: object) -> None:
    assert ENTRIES[key].value_in(load(**{ENTRIES[key].variable: text})) == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bus = 3", "bus: a table of settings, got 3"),
        ("[buss]\ninsecure = true", "buss: no such setting; did you mean bus?"),
        (
            "[bus]\nheartbeat_timeout = 1",
            "bus.heartbeat_timeout: no such setting; did you mean bus.heartbeat_timeout_ms?",
        ),
        ("insecure = true", "insecure: no such setting"),
        *(
            (f"[processor]\nmax_workers = {value}", f"processor.max_workers: 1 to 65536 workers, got {shown}")
            for value, shown in {"'1'": "'1'", "1.0": "1.0", "true": "True", "70000": "70000"}.items()
        ),
        ("[bus]\ninsecure = 1", "bus.insecure: true or false, got 1"),
        ("[worker]\nid = 1", "worker.id: text of 1 to 64 bytes, got 1"),
        ("[limits]\nmax_rows = 1025", "limits.max_rows: 0 to 1024 rows, got 1025"),
    ],
)
def test_file_with_a_fault(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "tokenbus.toml").write_text(text)
    with pytest.raises(SettingsError) as refused:
        Settings.load(tmp_path / "tokenbus.toml", {})
    assert str(refused.value) == f"{tmp_path}/tokenbus.toml: {line}"


@pytest.mark.parametrize(
    "contents",
    [b"[bus", b"\xff", b"a = 1\na = 2", b"x = " + b"9" * 5000, b"x = " + b"[" * 100_000, b"#" * (2**20 + 1), None],
    ids=["cut", "no UTF-8", "twice", "many digits", "deep", "large", "missing"],
)
def test_file_that_is_no_settings_file(contents: bytes | None, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "file").write_bytes(contents)
    with pytest.raises(SettingsError, match=rf"^{tmp_path}/file: a settings file .*$") as refused:
        Settings.load(environment={"TOKENBUS_SETTINGS": str(tmp_path / "file")})
    assert "\n" not in str(refused.value)


def test_unknown_keys() -> None:
    line = refusal(TOKENBUS_BUS_KEYFILE="1")
    assert line == "TOKENBUS_BUS_KEYFILE: no such setting; did you mean TOKENBUS_BUS_KEY_FILE?"
    assert refusal(TOKENBUS_QQQ="1") == "TOKENBUS_QQQ: no such setting"
    fixed = "a constant of the code, which cannot be set"
    assert refusal(TOKENBUS_BUS_LINGER_MS="1") == f"TOKENBUS_BUS_LINGER_MS: {fixed}"
    with pytest.raises(SettingsError, match=rf"^gateway\.max_text_bytes: {fixed}$"):
        Settings.load(environment={}, overrides={"gateway.max_text_bytes": 1})
    with pytest.raises(SettingsError, match=r"^worker\.ids: no such setting; did you mean worker\.id\?$"):
        Settings.load(environment={}, overrides={"worker.ids": "w0"})
    assert load(TOKENBUS="1", PATH="x", TOKENBUS_PURE_PYTHON="1", TOKENBUS_CACHE_DIR="x") == Settings()


@pytest.mark.parametrize("key", ["worker.retention_bytes", "clients.buffer_bytes", "durable_log.max_bytes"])
def test_sizes_hold_a_message(key: str) -> None:
    variable, most = ENTRIES[key].variable, Limits.default().max_message_bytes
    assert ENTRIES[key].value_in(load(**{variable: str(most)})) == most
    assert refusal(**{variable: str(most - 1)}) == (f"{variable}: at least {most}, the largest message, got {most - 1}")


def test_what_follows_from_other_settings() -> None:
    for timeout, interval in {"600": 200, "3000": 1000, "60000": 1000}.items():
        assert load(TOKENBUS_BUS_HEARTBEAT_TIMEOUT_MS=timeout).bus.heartbeat_interval_ms == interval
    raised = load(TOKENBUS_CLIENTS_MAX_CLIENTS="5000", TOKENBUS_PROCESSOR_MAX_WORKERS="200")
    assert (raised.most_connections, Settings().most_connections) == (5200, 4096)
    sized = load(TOKENBUS_WORKER_RETENTION_BYTES=str(2**25), TOKENBUS_GATEWAY_MAX_REQUESTS="5000")
    assert (sized.worker.most_items, sized.gateway.most_connections) == (2048, 20_000)
    assert load(TOKENBUS_LIMITS_MAX_TOKENS_PER_ROW="5").limits.max_draft_tokens_per_row == 5


def test_error_is_one_printable_line() -> None:
    line = refusal(TOKENBUS_WORKER_ROLE="\x1b[31m\nred" + "x" * 1000)
    assert line.isprintable()
    assert len(line) < 250
    with pytest.raises(SettingsError, match="a number with too many digits to print"):
        WorkerSettings(max_requests=10**5000)


def test_bounds_are_the_schemas() -> None:
    hello: Any = stream_pb2.Hello.DESCRIPTOR.fields_by_name
    welcome: Any = stream_pb2.Welcome.DESCRIPTOR.fields_by_name
    client: Any = client_pb2.ClientHello.DESCRIPTOR.fields_by_name
    most = bounds_in(welcome["heartbeat_timeout_ms"].GetOptions()).max
    assert ENTRIES["bus.heartbeat_timeout_ms"].valid.endswith(f" to {most} ms")
    texts = {"worker.id": hello["worker_id"], "worker.model": hello["model"], "client.name": client["name"]}
    for key, wire in texts.items():
        bounds = bounds_in(wire.GetOptions())
        assert ENTRIES[key].valid == f"text of {bounds.min_bytes} to {bounds.max_bytes} bytes"
    names = [name.removeprefix("WORKER_ROLE_").lower() for name in stream_pb2.WorkerRole.keys()]  # noqa: SIM118
    assert ENTRIES["worker.role"].valid == f"one of {', '.join(names[1:])}"


def test_page_is_fresh() -> None:
    text = page()
    assert text == (ROOT / "docs" / "settings.md").read_text()
    assert all(f"- `{entry.name}` (" in text and entry.meaning in text for entry in ENTRIES.values())
