"""The keys folder: this daemon's key pair, and the public keys of the daemons that it trusts.

    FOLDER/kvd.key          our secret key; nobody else may read it (0600)
    FOLDER/kvd.pub          our public key, to be given to the others
    FOLDER/peers/NAME.pub   public keys of others; each may say at which addresses it is found

Files are in the format of ZeroMQ's certificates, so that other tools can read them. The folder is
0700: whoever can write to it decides who is trusted.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvd.addresses import HostPort, parse_host_port, parse_ip, parse_network
from kvd.errors import ConfigError

SECRET_FILE = "kvd.key"
PUBLIC_FILE = "kvd.pub"
PEERS_FOLDER = "peers"
MAX_FILE = 4096
MAX_PEERS = 1024
MAX_ADDRESSES = 64
OWN = "(own)"
"""The name of our own key among the authorised ones."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r'\s*([a-z-]+)\s*=\s*"([^"]*)"\s*')


class KeysError(ConfigError):
    """A keys folder that cannot be used; the text names the file and the way out."""


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One daemon, or several with the same key. No addresses: it may be found anywhere."""

    name: str
    public: bytes
    """40 characters of Z85."""
    addresses: tuple[str, ...] = ()
    """Each host, host:port, address or network."""

    def is_at(self, host: str, ip: str, port: int) -> bool:
        """Whether one of its addresses covers this one."""
        return any(_covers(address, host, ip, port) for address in self.addresses)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """What a keys folder holds. Our own key is trusted too: only we have its secret."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: tuple[PeerKey, ...] = ()

    def name_of(self, public: bytes) -> str | None:
        """Whose key it is; None for a stranger's."""
        for key in self.peers:
            if key.public == public:
                return key.name
        return OWN if public == self.public else None

    def candidates(self, host: str, ip: str, port: int) -> list[PeerKey]:
        """Keys that a daemon at this address may have, best first.

        Those whose addresses cover it are the only ones, if there are any. Else it is one that
        names no address, or our own.
        """
        named = [key for key in self.peers if key.is_at(host, ip, port)]
        if named:
            return named
        return [*(k for k in self.peers if not k.addresses), PeerKey(OWN, self.public)]


def _covers(address: str, host: str, ip: str, port: int) -> bool:
    if address.lower() == host.lower():
        return True
    try:
        network = parse_network(address)
    except ValueError:
        at = parse_host_port(address, default_port=0)
        same = at.host.lower() == host.lower() or parse_ip(at.host) == parse_ip(ip)
        return same and at.port in (0, port)
    found = parse_ip(ip)
    return found is not None and found.version == network.version and found in network


# --- reading --------------------------------------------------------------------------------


def load(folder: str | Path) -> KeyRing:
    """Reads and checks a keys folder. Raises KeysError."""
    root = Path(folder)
    check_private(root, is_folder=True)
    secret_file = root / SECRET_FILE
    check_private(secret_file, is_folder=False)
    values = _read(secret_file)
    secret = _key(secret_file, values, "secret-key")
    import zmq  # only who has keys needs it: `kvd --help` loads nothing heavy

    public = zmq.curve_public(secret)
    if values.get("public-key", public.decode()) != public.decode():
        raise KeysError(f"{secret_file}: its public key does not belong to its secret key")
    return KeyRing(public, secret, load_peers(root))


def load_peers(folder: Path) -> tuple[PeerKey, ...]:
    """The authorised peers, by name. Raises KeysError."""
    peers = folder / PEERS_FOLDER
    if not peers.exists():
        return ()
    check_private(peers, is_folder=True)
    found: list[PeerKey] = []
    for path in sorted(peers.glob("*.pub")):
        if len(found) >= MAX_PEERS:
            raise KeysError(f"{peers}: more than {MAX_PEERS} keys")
        found.append(read_public(path))
    by_key: dict[bytes, str] = {}
    for key in found:
        if key.public in by_key:
            raise KeysError(
                f"{peers}: {by_key[key.public]} and {key.name} are the same key; remove one"
            )
        by_key[key.public] = key.name
    return tuple(found)


def read_public(path: Path) -> PeerKey:
    """A public key's file; its name is the key's. Raises KeysError."""
    values = _read(path)
    addresses = tuple(a.strip() for a in values.get("address", "").split(",") if a.strip())
    try:
        check_addresses(addresses)
    except ValueError as e:
        raise KeysError(f"{path}: address {e}") from None
    return PeerKey(path.stem, _key(path, values, "public-key"), addresses)


def check_private(path: Path, *, is_folder: bool) -> None:
    """That nobody else can read or write it. Raises KeysError naming the command that helps."""
    try:
        found = path.stat()
    except FileNotFoundError:
        made_by = "kvd keys init" if path.name != PEERS_FOLDER else "kvd keys add"
        raise KeysError(f"keys: there is no {path}; make it with: {made_by}") from None
    except OSError as e:
        raise KeysError(f"keys: cannot look at {path}: {os.strerror(e.errno or 0)}") from None
    if stat.S_ISDIR(found.st_mode) != is_folder:
        raise KeysError(f"keys: {path} is {'no folder' if is_folder else 'a folder'}")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeysError(
            f"keys: {path} belongs to uid {found.st_uid}, not to us ({os.geteuid()}) or root"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        right = "700" if is_folder else "600"
        raise KeysError(
            f"keys: {path} has mode {mode:04o}, so that others can get at it; "
            f"run: chmod {right} {path}"
        )


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as e:
        raise KeysError(f"keys: cannot read {path}: {os.strerror(e.errno or 0)}") from None
    if len(data) > MAX_FILE:
        raise KeysError(f"{path}: is larger than {MAX_FILE} bytes, which no key is")
    return dict(_values(data.decode("utf-8", "replace").splitlines()))


def _values(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is not None:
            yield found[1], found[2]


def _key(path: Path, values: dict[str, str], name: str) -> bytes:
    if name not in values:
        raise KeysError(f"{path}: has no {name}")
    try:
        return parse_key(values[name])
    except ValueError as e:
        raise KeysError(f"{path}: {name} {e}") from None


def parse_key(text: str) -> bytes:
    """40 characters of Z85. Raises ValueError."""
    from zmq.utils import z85

    raw = text.strip().encode("ascii", "replace")
    if len(raw) != 40:
        raise ValueError(f"must have 40 characters, not {len(raw)}")
    try:
        if z85.encode(z85.decode(raw)) != raw:
            raise ValueError("is no key")
    except (KeyError, ValueError, OverflowError, ArithmeticError, IndexError):
        raise ValueError("is no key: it has characters that Z85 does not") from None
    except Exception as e:  # struct.error: five characters that are above 32 bits
        raise ValueError(f"is no key: {e}") from None
    return raw


def check_name(name: str) -> str:
    """A name that is a file's too. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} must be 1 to 64 letters, digits, dots, dashes or underscores")
    return name


def check_addresses(addresses: Iterable[str]) -> None:
    """Hosts, host:port, addresses or networks. Raises ValueError."""
    listed = list(addresses)
    if len(listed) > MAX_ADDRESSES:
        raise ValueError(f"has {len(listed)} entries, at most {MAX_ADDRESSES} are possible")
    for address in listed:
        if "/" in address:
            parse_network(address)
        elif not _is_ip(address):
            parse_host_port(address, default_port=0)


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# --- writing --------------------------------------------------------------------------------


def init(folder: str | Path) -> KeyRing:
    """Makes folder and key pair. Raises KeysError where there is one already."""
    root = Path(folder)
    if (root / SECRET_FILE).exists():
        raise KeysError(f"{root / SECRET_FILE} exists; a new key would lock out every peer")
    import zmq

    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):  # a command line would take it for a flag
        public, secret = zmq.curve_keypair()
    try:
        for path in (root, root / PEERS_FOLDER):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path, is_folder=True)
        pair = {"public-key": public, "secret-key": secret}
        _write(root / SECRET_FILE, "kvd: secret key, keep it on this host", pair)
        _write(root / PUBLIC_FILE, "kvd: public key", {"public-key": public})
    except OSError as e:
        raise KeysError(f"cannot write {e.filename}: {os.strerror(e.errno or 0)}") from None
    return KeyRing(public, secret)


def add(folder: str | Path, name: str, key: bytes, addresses: tuple[str, ...] = ()) -> Path:
    """Authorises a peer. Raises KeysError: no folder yet, name or key taken."""
    root = Path(folder)
    check_private(root, is_folder=True)
    path = root / PEERS_FOLDER / f"{name}.pub"
    for known in load_peers(root):
        if known.name == name:
            raise KeysError(f"{path} exists; remove it first: kvd keys remove {name}")
        if known.public == key:
            raise KeysError(f"{known.name} has that key already")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write(path, f"kvd: public key of {name}", {"public-key": key}, addresses)
    except OSError as e:
        raise KeysError(f"cannot write {path}: {os.strerror(e.errno or 0)}") from None
    return path


def remove(folder: str | Path, name: str) -> None:
    """Takes a peer's authorisation away. Raises KeysError when there is none."""
    path = Path(folder) / PEERS_FOLDER / f"{name}.pub"
    try:
        path.unlink()
    except OSError as e:
        raise KeysError(f"cannot remove {path}: {os.strerror(e.errno or 0)}") from None


def _write(
    path: Path, comment: str, keys: dict[str, bytes], addresses: tuple[str, ...] = ()
) -> None:
    lines = [f"#   {comment}", "", "metadata"]
    if addresses:
        lines.append(f'    address = "{", ".join(addresses)}"')
    lines.append("curve")
    lines += [f'    {name} = "{value.decode()}"' for name, value in keys.items()]
    # Whole or not at all, and never readable by others, not even for a moment.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            out.write("\n".join(lines) + "\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fingerprint_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when a peer's key is added, removed or written anew. Raises OSError."""
    peers = folder / PEERS_FOLDER
    if not peers.exists():
        return ()
    found: list[tuple[str, int, int]] = []
    with os.scandir(peers) as entries:
        for entry in entries:
            if entry.name.endswith(".pub") and len(found) < 2 * MAX_PEERS:
                info = entry.stat()
                found.append((entry.name, info.st_mtime_ns, info.st_ino))
    return tuple(sorted(found))


def default_folder() -> str:
    """Where `kvd keys` works when it is not told: root's in /etc, others' in their home."""
    if os.geteuid() == 0:
        return "/etc/kvd/keys"
    return str(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kvd/keys")


__all__ = ["HostPort", "KeyRing", "KeysError", "PeerKey", "add", "init", "load", "remove"]
