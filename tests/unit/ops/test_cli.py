"""The command itself, in processes of its own: what it says, and with which status it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvd import __version__
from kvd.cli import EX_CONFIG, EX_USAGE, build_parser, main
from kvd.config import describe

TIMEOUT_S = 60


def kvd(*args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(status, stdout, stderr) of `python -m kvd`."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvd", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


# --- through a real process


def test_a_mistake_in_the_settings_ends_with_78(tmp_path: Path) -> None:
    toml = tmp_path / "kvd.toml"
    toml.write_text("shm_threads = 0\n")
    status, out, err = kvd(
        "serve",
        "--config",
        str(toml),
        "--lisen=127.0.0.1:0",
        "--tcp-streams",
        "many",
        env={"KVD_INSECUR": "1"},
    )
    assert status == 78
    assert out == ""
    assert err.splitlines() == [
        "kvd: --lisen: unknown flag (did you mean --listen?)",
        "kvd: KVD_INSECUR: unknown setting (did you mean KVD_INSECURE?)",
        f"kvd: shm_threads in {toml}: must be a number from 1 to 64, got 0",
        "kvd: --tcp-streams: must be a whole number from 1 to 64, got 'many'",
    ]


def test_config_check_through_all_sources(tmp_path: Path) -> None:
    toml = tmp_path / "kvd.toml"
    toml.write_text('transport = "tcp"\nshm_threads = 3\n')
    status, out, err = kvd(
        "config",
        "check",
        "--config",
        str(toml),
        "--heartbeat-s=0.5",
        env={"KVD_SHM_THREADS": "4"},
    )
    assert (status, err) == (0, "")
    values = tomllib.loads(out)
    assert set(values) == {d.name for d in describe()}
    assert (values["transport"], values["shm_threads"], values["heartbeat_s"]) == ("tcp", 4, 0.5)
    assert "shm_threads = 4  # KVD_SHM_THREADS\n" in out


def test_config_check_names_mistakes() -> None:
    assert kvd("config", "check", "--device", "tpu") == (
        78,
        "",
        "kvd: --device: 'tpu' must be cpu, cuda:N or cuda:GPU-UUID\n",
    )


def test_a_reader_that_leaves_early_is_no_error() -> None:
    ended = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m kvd config check | true; :"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert ended.stderr == b""


def test_the_installed_script_is_this_command() -> None:
    script = Path(sys.executable).with_name("kvd")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    out = subprocess.run(
        [script, "version", "--json"], capture_output=True, timeout=TIMEOUT_S, check=True
    ).stdout
    versions = json.loads(out)
    assert versions["kvd"] == __version__
    assert versions["protocol"]


HEAVY = ("torch", "vllm", "zmq", "numpy", "aiohttp", "structlog", "uvloop", "connector_shim")


@pytest.mark.parametrize(
    "args", [["--help"], ["serve", "--help"], ["config", "check"], ["version"]]
)
def test_looking_at_the_command_loads_no_engine(args: Sequence[str]) -> None:
    code = f"""
import sys
from kvd.cli import main
try:
    main({list(args)!r})
except SystemExit:
    pass
print(sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert ended.stderr == "[]\n"
    assert ended.stdout


# --- in this process


def test_every_setting_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["serve", "--help"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for doc in describe():
        assert f" {doc.flag} " in text
        # Long words are broken at hyphens, so compare without them.
        assert doc.description.replace(" ", "") in text.replace(" ", "")
    for group in {doc.group for doc in describe()}:
        assert f"{group}:" in text


COMMANDS = (
    "", "serve", "demo", "bench", "config", "config check", "status", "transfers", "healthcheck",
    "drain", "release", "doctor", "keys", "keys init", "keys add", "keys list", "version",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as e:
        main([*command.split(), "--help"])
    assert e.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: kvd {command}")
    assert [line for line in lines if len(line) > 80] == []


def test_flags_take_a_value_both_ways() -> None:
    parser = build_parser()
    for args in (["--listen", "a:1"], ["--listen=a:1"]):
        assert parser.parse_args(["serve", *args]).listen == "a:1"
    assert parser.parse_args(["serve", "--insecure"]).insecure == "true"
    assert parser.parse_args(["serve", "--insecure=false"]).insecure == "false"
    assert parser.parse_args(["serve", "--metrics="]).metrics == ""
    assert parser.parse_args(["serve"]).listen is None


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["serve", "--listen"], EX_CONFIG, "--listen: expected one argument"),
        (["serve", "--lis", "x:1"], EX_CONFIG, "--lis: unknown flag (did you mean --listen?)"),
        (["serve", "extra"], EX_CONFIG, "extra: unexpected argument"),
        (["serve", "--config", "/nowhere.toml"], EX_CONFIG, "there is no file /nowhere.toml"),
        (["srve"], EX_USAGE, "invalid choice: 'srve'"),
        (["config"], EX_USAGE, "ACTION"),
        (["version", "--jsn"], EX_USAGE, "--jsn: unknown flag (did you mean --json?)"),
    ],
)
def test_mistakes_on_the_line(
    args: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert all(line.startswith("kvd: ") for line in captured.err.splitlines())


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == EX_USAGE
    out = capsys.readouterr().out
    for command in ("serve", "demo", "bench", "config", "version"):
        assert f"    {command} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"kvd {__version__}\n")


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_demo_and_bench_read_their_own_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvd.bench
    import kvd.demo

    seen: list[list[str]] = []
    module = kvd.demo if command == "demo" else kvd.bench

    def read(argv: Sequence[str]) -> int:
        seen.append(list(argv))
        return 3

    monkeypatch.setattr(module, "main", read)
    assert main([command, "--config", "transport=tcp", "--unknown"]) == 3
    assert seen == [["--config", "transport=tcp", "--unknown"]]


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(main.__globals__, "_WHOLE", {"demo": interrupted})
    assert main(["demo"]) == 130
