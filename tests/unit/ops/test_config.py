"""Where settings come from, which of them wins, and how mistakes are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cli import effective_toml
from kvd.config import NOT_SETTINGS, Settings, describe, load, load_with_origins
from kvd.core.config import CoreConfig
from kvd.errors import ConfigError


def mistakes(
    flags: dict[str, object] | None = None,
    toml: Path | None = None,
    env: dict[str, str] | None = None,
) -> list[str]:
    with pytest.raises(ConfigError) as e:
        load(flags or {}, str(toml) if toml else None, env or {})
    return e.value.detail.splitlines()


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "kvd.toml"


# --- precedence


def test_flags_win_over_environment_over_file_over_defaults(toml: Path) -> None:
    toml.write_text("shm_threads = 3\ntcp_streams = 3\nmax_clients = 3\n")
    env = {"KVD_SHM_THREADS": "4", "KVD_TCP_STREAMS": "4"}
    loaded = load_with_origins({"shm_threads": "5"}, str(toml), env)
    s = loaded.settings
    assert (s.shm_threads, s.tcp_streams, s.max_clients, s.max_jobs) == (5, 4, 3, 8)
    assert loaded.origins == {
        "shm_threads": "--shm-threads",
        "tcp_streams": "KVD_TCP_STREAMS",
        "max_clients": f"max_clients in {toml}",
    }


def test_the_environment_names_the_file_unless_a_flag_does(toml: Path, tmp_path: Path) -> None:
    toml.write_text("shm_threads = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("shm_threads = 7\n")
    assert load({}, None, {"KVD_CONFIG": str(toml)}).shm_threads == 3
    assert load({}, str(other), {"KVD_CONFIG": str(toml)}).shm_threads == 7


def test_an_empty_variable_is_a_value() -> None:
    assert load({}, None, {"KVD_METRICS": ""}).metrics == ""
    assert load({}, None, {}).metrics == "127.0.0.1:0"


def test_building_settings_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SHM_THREADS", "9")
    monkeypatch.setenv("SHM_THREADS", "9")
    assert Settings().shm_threads == 2


def test_the_given_environment_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SHM_THREADS", "9")
    assert load({}, None, {}).shm_threads == 2
    assert load({}, None, None).shm_threads == 9


def test_every_source_may_give_a_list(toml: Path) -> None:
    expected = ("10.0.0.0/8", "fd00::/8")
    toml.write_text('allow_peers = ["10.0.0.0/8", "fd00::/8"]\n')
    assert load({}, str(toml), {}).allow_peers == expected
    assert load({}, None, {"KVD_ALLOW_PEERS": "10.0.0.0/8, fd00::/8"}).allow_peers == expected
    assert load({"allow_peers": "10.0.0.0/8,fd00::/8"}, None, {}).allow_peers == expected


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "TRUE"])
def test_switches_in_the_environment(text: str) -> None:
    assert load({}, None, {"KVD_INSECURE": text}).insecure is True


# --- names that are not known


def test_unknown_names_are_refused_with_the_nearest(toml: Path) -> None:
    toml.write_text('lisen = "127.0.0.1:0"\ndata-listen = ""\n[section]\nx = 1\n')
    assert mistakes({"heartbeat": "1"}, toml, {"KVD_INSECUR": "1"}) == [
        "--heartbeat: unknown setting (did you mean --heartbeat-s?)",
        "KVD_INSECUR: unknown setting (did you mean KVD_INSECURE?)",
        f"lisen in {toml}: unknown setting (did you mean listen?)",
        f"data-listen in {toml}: unknown setting (did you mean data_listen?)",
        f"section in {toml}: unknown setting",
    ]


def test_variables_of_other_parts_are_no_mistakes() -> None:
    env = dict.fromkeys({*NOT_SETTINGS, "KVD_TEST_CACHE"} - {"KVD_CONFIG"}, "1")
    assert load({}, None, env) == load({}, None, {})


def test_service_links_of_kubernetes_are_no_mistakes() -> None:
    env = {
        "KVD_SERVICE_HOST": "10.0.0.1",
        "KVD_SERVICE_PORT": "9400",
        "KVD_SERVICE_PORT_METRICS": "9400",
        "KVD_PORT": "tcp://10.0.0.1:9400",
        "KVD_PORT_9400_TCP": "tcp://10.0.0.1:9400",
        "KVD_PORT_9400_TCP_PROTO": "tcp",
        "KVD_PORT_9400_TCP_PORT": "9400",
        "KVD_PORT_9400_TCP_ADDR": "10.0.0.1",
        "KVD_DECODE_SERVICE_HOST": "10.0.0.2",
        "KVD_DECODE_PORT": "tcp://10.0.0.2:9400",
    }
    assert load({}, None, env) == load({}, None, {})
    assert mistakes(env={"KVD_LISTEN_PORT": "9400"}) == [
        "KVD_LISTEN_PORT: unknown setting (did you mean KVD_LISTEN?)"
    ]


# --- values that are not allowed


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("shm_threads", "two", "must be a whole number from 1 to 64, got 'two'"),
        ("shm_threads", "0", "must be a number from 1 to 64, got '0'"),
        ("shm_threads", "1.5", "must be a whole number from 1 to 64, got '1.5'"),
        ("heartbeat_s", "nan", "must be a number from 0.05 to 60 (s), got 'nan'"),
        ("heartbeat_s", "inf", "must be a number from 0.05 to 60 (s), got 'inf'"),
        ("data_timeout_s", "0", "must be a number above 0 to 3600 (s), got '0'"),
        ("max_job_bytes", "32MiB", "must be a whole number from 4096 to 1099511627776 (bytes)"),
        ("insecure", "maybe", "must be true or false, got 'maybe'"),
        ("transport", "smh", "must be one of auto, shm, tcp, cuda_ipc, nccl, got 'smh'"),
        ("transport", "nccl", "nccl moves KV of GPUs, and device is cpu"),
        ("transport", "cuda_ipc", "cuda_ipc moves KV of GPUs, and device is cpu"),
        ("device", "cuda", "must be cpu, cuda:N or cuda:GPU-UUID"),
        ("device", "gpu", "must be cpu, cuda:N or cuda:GPU-UUID"),
        ("log_level", "loud", "must be one of debug, info, warning, error, got 'loud'"),
        ("log_format", "xml", "must be one of auto, json, console, got 'xml'"),
        ("listen", "127.0.0.1", "has no port; write 127.0.0.1:port"),
        ("listen", "::1:5", "must have brackets around an IPv6 address"),
        ("listen", "node7:5", "must have an IP address of this host, localhost or *"),
        ("metrics", "9400", "has no port"),
        ("data_listen", "127.0.0.1:70000", "from 0 to 65535"),
        ("advertise", "0.0.0.0", "must be an address that peers can connect to"),
        ("advertise", "*:5", "must be an address that peers can connect to"),
        ("allow_peers", "10.1.2.3/8", "write 10.0.0.0/8"),
        ("allow_peers", "everyone", "is no network"),
        ("tcp_congestion", "../../x", "must match"),
        ("socket", "/tmp/" + "s" * 103, "has 108 bytes, more than the 107"),
        ("peer_timeout_s", "1.5", "must be at least twice heartbeat_s (1), got 1.5"),
        ("min_job_bytes", "1073741824", "must not be above max_job_bytes (33554432)"),
        ("max_jobs_per_fetch", "9", "must not be above max_jobs (8), got 9"),
    ],
)
def test_bad_values_are_named_by_their_source(name: str, value: str, says: str, toml: Path) -> None:
    for flags, env, label in (
        ({name: value}, {}, f"--{name.replace('_', '-')}: "),
        ({}, {f"KVD_{name.upper()}": value}, f"KVD_{name.upper()}: "),
    ):
        [line] = mistakes(flags, None, env)  # type: ignore[arg-type]
        assert line.startswith(label)
        assert says in line
    toml.write_text(f'{name} = "{value}"\n')
    [line] = mistakes({}, toml)
    assert line.startswith(f"{name} in {toml}: ")
    assert says in line


def test_all_mistakes_are_told_at_once(toml: Path) -> None:
    toml.write_text("shm_threads = 0\nfoo = 1\n")
    lines = mistakes({"tcp_streams": "x"}, toml, {"KVD_DEVICE": "tpu"})
    assert sorted(line.partition(":")[0] for line in lines) == sorted(
        [f"foo in {toml}", f"shm_threads in {toml}", "--tcp-streams", "KVD_DEVICE"]
    )


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path, toml: Path) -> None:
    assert mistakes({}, tmp_path / "none.toml") == [
        f"--config: there is no file {tmp_path / 'none.toml'}"
    ]
    toml.write_text("listen = \n")
    [line] = mistakes({}, toml)
    assert line.startswith(f"--config: {toml} is not TOML: ")
    toml.write_bytes(b"\xff\xfe")
    [line] = mistakes({}, toml)
    assert line.startswith(f"--config: {toml} is not TOML: ")


# --- addresses that others can reach


@pytest.mark.parametrize("name", ["listen", "data_listen"])
@pytest.mark.parametrize("value", ["0.0.0.0:5", "10.0.0.1:5", "[::]:5", "[fd00::1]:5", "*:5"])
def test_a_reachable_address_needs_insecure(name: str, value: str) -> None:
    flags: dict[str, object] = {name: value, "advertise": "10.0.0.1"}
    [line] = mistakes(flags)
    assert line.startswith(f"--{name.replace('_', '-')}: ")
    assert "insecure = true" in line
    assert getattr(load({**flags, "insecure": True}, None, {}), name)


def test_metrics_may_be_reachable() -> None:
    assert load({"metrics": "*:9400"}, None, {}).metrics == "0.0.0.0:9400"


def test_a_wildcard_needs_something_to_advertise() -> None:
    [line] = mistakes({"listen": "*:5", "insecure": "true"})
    assert line.startswith("advertise: must be set")
    s = load({"listen": "*:5", "insecure": "true", "advertise": "node7"}, None, {})
    assert s.advertise_at == ("node7", 0)


# --- what others take from the tree


def test_parsed_addresses() -> None:
    s = load({"listen": "[::1]:5", "metrics": ""}, None, {})
    assert s.listen_at == ("::1", 5)
    assert s.data_listen_at == ("::1", 0)
    assert s.metrics_at is None
    assert s.advertise_at is None
    assert load({"data_listen": "127.0.0.2:7"}, None, {}).data_listen_at == ("127.0.0.2", 7)


@pytest.mark.parametrize(
    ("transport", "expected"), [("auto", ("shm", "tcp")), ("shm", ("shm",)), ("tcp", ("tcp",))]
)
def test_a_named_transport_is_the_only_one(transport: str, expected: tuple[str, ...]) -> None:
    assert load({"transport": transport}, None, {}).core().transports == expected


@pytest.mark.parametrize("device", ["cuda:0", "cuda:GPU-01234567-89ab-cdef-0123-456789abcdef"])
def test_a_gpu_has_transports_of_its_own(device: str) -> None:
    assert load({"device": device}, None, {}).transports == ("cuda_ipc", "nccl", "shm", "tcp")
    named = load({"device": device, "transport": "nccl"}, None, {})
    assert named.transports == ("nccl",)
    with pytest.raises(ConfigError, match="verify: checksums are made by the CPU"):
        load({"device": device, "verify": "crc"}, None, {})


def test_the_core_has_all_its_settings_here_with_the_same_defaults() -> None:
    assert Settings().core() == CoreConfig()
    changed: dict[str, object] = {
        "release_linger_s": 3.5,
        "max_offers": 7,
        "max_job_bytes": 2**26,
        "max_shm_job_bytes": 2**27,
        "max_jobs": 9,
    }
    core = dataclasses.asdict(load(changed, None, {}).core())
    assert {name: core[name] for name in changed} == changed


def test_a_job_that_is_checked_by_one_thread_is_no_larger_over_shm() -> None:
    core = load({"verify": "crc", "max_job_bytes": 2**23}, None, {}).core()
    assert (core.max_job_bytes, core.max_shm_job_bytes) == (2**23, 2**23)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().shm_threads = 3  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    docs = describe()
    assert [d.name for d in docs] == list(Settings.model_fields)
    for d in docs:
        assert d.description, d.name
        assert "\n" not in d.description
        assert d.group, d.name
        assert d.default, d.name
        assert d.unit == {"_s": "s", "es": "bytes"}.get(d.name[-2:], "") or not d.name.endswith(
            ("_s", "_bytes")
        )
    by_name = {d.name: d for d in docs}
    assert by_name["transport"].choices == ("auto", "shm", "tcp", "cuda_ipc", "nccl")
    assert by_name["data_listen"].flag == "--data-listen"
    assert by_name["data_listen"].env == "KVD_DATA_LISTEN"


# --- the effective settings as a file


def test_effective_settings_read_back(toml: Path) -> None:
    flags: dict[str, object] = {
        "listen": "[::1]:5",
        "allow_peers": "10.0.0.0/8,fd00::/8",
        "insecure": "true",
        "data_timeout_s": "0.5",
        "discovery_file": '/tmp/a "quoted" \\ name',
    }
    loaded = load_with_origins(flags, None, {})
    toml.write_text(effective_toml(loaded))
    assert load({}, str(toml), {}) == loaded.settings
    assert "insecure = true  # --insecure\n" in toml.read_text()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_reads_back(text: str) -> None:
    import tomllib

    loaded = load_with_origins({"discovery_file": text}, None, {})
    assert tomllib.loads(effective_toml(loaded))["discovery_file"] == text
