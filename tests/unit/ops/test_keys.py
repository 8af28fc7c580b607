"""The keys folder: what is made, what is refused, and which key belongs to which address."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from kvd import keys
from kvd.cli import main
from kvd.keys import KeyRing, KeysError, PeerKey


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.init(tmp_path / "keys")
    return tmp_path / "keys"


def other() -> bytes:
    return zmq.curve_keypair()[0]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_private_and_loads_again(folder: Path) -> None:
    assert [mode(folder / p) for p in (".", "peers", "kvd.key", "kvd.pub")] == [
        0o700,
        0o700,
        0o600,
        0o600,
    ]
    ring = keys.load(folder)
    assert zmq.curve_public(ring.secret) == ring.public
    assert ring.secret.decode() not in (folder / "kvd.pub").read_text()
    assert ring.secret.decode() not in repr(ring)
    # ZeroMQ's own reader understands the files.
    assert zmq.auth.load_certificate(folder / "kvd.key") == (ring.public, ring.secret)


def test_a_second_key_is_not_made_over_the_first(folder: Path) -> None:
    before = (folder / "kvd.key").read_bytes()
    with pytest.raises(KeysError, match="lock out"):
        keys.init(folder)
    assert (folder / "kvd.key").read_bytes() == before


@pytest.mark.parametrize(
    ("path", "right"), [(".", 0o750), ("kvd.key", 0o640), ("kvd.key", 0o604), ("peers", 0o707)]
)
def test_what_others_can_get_at_is_refused_with_the_fix(
    folder: Path, path: str, right: int
) -> None:
    keys.add(folder, "p", other())
    (folder / path).chmod(right)
    with pytest.raises(KeysError, match=rf"mode {right:04o}.*run: chmod [67]00 "):
        keys.load(folder)
    (folder / path).chmod(0o600 if path == "kvd.key" else 0o700)
    assert len(keys.load(folder).peers) == 1


def test_keys_are_added_listed_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = other()
    while key.startswith(b"-"):
        key = other()
    at = ["--keys", str(folder)]
    add = ["keys", "add", "decode-1", key.decode(), "--address", "10.0.0.5:7700, node7", *at]
    assert main(add) == 0
    assert main(["keys", "list", "--json", *at]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert listed["peers"] == [
        {"name": "decode-1", "public_key": key.decode(), "addresses": ["10.0.0.5:7700", "node7"]}
    ]
    assert main(["keys", "list", *at]) == 0
    assert key.decode() in capsys.readouterr().out
    assert main(["keys", "remove", "decode-1", *at]) == 0
    assert keys.load(folder).peers == ()
    assert main(["keys", "remove", "decode-1", *at]) == 78


def test_a_key_may_come_as_a_file(folder: Path, tmp_path: Path) -> None:
    ring = keys.init(tmp_path / "there")
    given = str(tmp_path / "there" / "kvd.pub")
    assert main(["keys", "add", "there", given, "--keys", str(folder)]) == 0
    assert keys.load(folder).name_of(ring.public) == "there"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["../up", "x" * 40], "letters, digits"),
        (["a", "short"], "there is no|40 characters|cannot read"),
        (["a", "~" * 40], "is no key"),
        (["a", "#" * 40], "is no key"),
    ],
)
def test_bad_names_and_keys_are_refused(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "add", *arguments, "--keys", str(folder)]) == 78
    import re

    assert re.search(says, capsys.readouterr().err)
    assert not list((folder / "peers").iterdir())


def test_the_same_key_or_name_twice_is_refused(folder: Path) -> None:
    key = other()
    keys.add(folder, "a", key)
    with pytest.raises(KeysError, match="a has that key already"):
        keys.add(folder, "b", key)
    with pytest.raises(KeysError, match="exists"):
        keys.add(folder, "a", other())


def test_files_that_are_no_keys_are_named(folder: Path) -> None:
    (folder / "peers" / "broken.pub").write_text("hello")
    with pytest.raises(KeysError, match=r"broken\.pub: has no public-key"):
        keys.load(folder)
    (folder / "peers" / "broken.pub").write_text("x" * 10_000)
    with pytest.raises(KeysError, match="larger than"):
        keys.load(folder)


def test_a_public_key_of_another_secret_is_refused(folder: Path) -> None:
    file = folder / "kvd.key"
    ring = keys.load(folder)
    file.write_text(file.read_text().replace(ring.public.decode(), other().decode()))
    with pytest.raises(KeysError, match="does not belong"):
        keys.load(folder)


def test_a_key_with_an_address_is_the_only_one_there() -> None:
    a, b, c = other(), other(), other()
    ring = KeyRing(
        other(),
        b"secret",
        (
            PeerKey("a", a, ("10.0.0.0/24",)),
            PeerKey("b", b, ("node7:7700", "10.0.1.1:1")),
            PeerKey("c", c),
        ),
    )

    def at(host: str, ip: str, port: int) -> list[str]:
        return [key.name for key in ring.candidates(host, ip, port)]

    assert at("10.0.0.9", "10.0.0.9", 5) == ["a"]
    assert at("node7", "10.9.9.9", 7700) == ["b"]
    assert at("NODE7", "10.9.9.9", 7700) == ["b"]
    assert at("10.0.1.1", "10.0.1.1", 1) == ["b"]
    # Neither host nor port of anybody: who has no address, or we ourselves.
    assert at("10.0.1.1", "10.0.1.1", 2) == ["c", keys.OWN]
    assert ring.name_of(c) == "c"
    assert ring.name_of(ring.public) == keys.OWN
    assert ring.name_of(other()) is None
