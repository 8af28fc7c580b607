"""Addresses as operators write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.addresses import (
    HostPort,
    check_socket_path,
    default_socket_path,
    parse_bind,
    parse_host_port,
    parse_network,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:5555", "::1", 5555),
        ("tcp://[fd00::2]:65535", "fd00::2", 65535),
        ("decode-0.kvd.svc:7000", "decode-0.kvd.svc", 7000),
        (" 10.0.0.1:1 ", "10.0.0.1", 1),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    assert parse_host_port(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host"),
        (":5", "no host"),
        ("host", "no port; write host:port"),
        ("host:", "the port ''"),
        ("host:http", "the port 'http'"),
        ("host:65536", "from 0 to 65535"),
        ("host:-1", "the port '-1'"),
        ("host:\u0663", "the port"),
        ("::1:340", "brackets around an IPv6 address: [::1:340]"),
        ("fd00::1", "brackets"),
        ("[::1", "[address]:port"),
        ("[::1]5", "[address]:port"),
        ("[::1]", "no port"),
        ("[10.0.0.1]:5", "no IPv6 address"),
        ("[::zz]:5", "no IPv6 address"),
        ("a b:5", "neither an address nor a name"),
        ("user@host:5", "neither an address nor a name"),
        ("http://h:5", "brackets"),
        (f"{'h' * 256}:5", "255"),
    ],
)
def test_bad_host_and_port_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^(must|has)") as e:
        parse_host_port(text)
    assert says in str(e.value)


def test_a_default_port_may_be_left_out() -> None:
    assert parse_host_port("kv.example", default_port=0) == ("kv.example", 0)
    assert parse_host_port("[::1]", default_port=7) == ("::1", 7)


@pytest.mark.parametrize("at", [HostPort("::1", 5), HostPort("10.0.0.1", 0), HostPort("a.b", 9)])
def test_text_reads_back(at: HostPort) -> None:
    assert parse_host_port(str(at)) == at


@pytest.mark.parametrize(
    ("text", "expected"),
    [("*:5", "0.0.0.0:5"), ("localhost:5", "127.0.0.1:5"), ("[::]:0", "[::]:0")],
)
def test_bind_addresses(text: str, expected: str) -> None:
    assert str(parse_bind(text)) == expected


def test_a_name_cannot_be_bound() -> None:
    with pytest.raises(ValueError, match="must have an IP address of this host"):
        parse_bind("node7:5555")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_only_this_host_reaches(host: str, loopback: bool) -> None:
    assert HostPort(host, 1).is_loopback is loopback


def test_networks() -> None:
    assert str(parse_network("10.0.0.0/8")) == "10.0.0.0/8"
    assert str(parse_network("fd00::1")) == "fd00::1/128"
    with pytest.raises(ValueError, match=r"names a host within a network; write 10\.0\.0\.0/8"):
        parse_network("10.1.2.3/8")
    with pytest.raises(ValueError, match="'nonsense', which is no network"):
        parse_network("nonsense")


def test_socket_paths_end_at_107_bytes(tmp_path: Path) -> None:
    longest = "/tmp/" + "s" * 102
    assert check_socket_path(longest) == longest
    with pytest.raises(ValueError, match="has 108 bytes, more than the 107"):
        check_socket_path(longest + "s")
    # Bytes count, not characters.
    with pytest.raises(ValueError, match="has 121 bytes"):
        check_socket_path("/tmp/" + "é" * 58)


def test_a_socket_path_names_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the folder"):
        check_socket_path(str(tmp_path))


def test_the_default_socket_goes_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writable = {str(tmp_path), "/run"}
    monkeypatch.setattr("os.access", lambda path, _mode: str(path) in writable)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    monkeypatch.setattr("os.getuid", lambda: 1234)
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert default_socket_path(env) == "/run/kvd/kvd.sock"
    writable.discard("/run")
    assert default_socket_path(env) == f"{tmp_path}/kvd/kvd.sock"
    assert default_socket_path({}) == "/tmp/kvd-1234/kvd.sock"
