"""Everything that can happen to the core. Each outcome of an instruction is its own event type.

Names: a *session* is one shim's connection (an int of the shell's). A *peer* is a daemon that
we asked (named by its address). A *client* is a daemon that asks us (named by an int of the
shell's, new for each boot of that daemon).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol import local
from kvd.protocol.peer import SegmentInfo, ToConsumer, ToProducer
from kvd.protocol.types import Geometry, LayerLayout, PeerAddr, Rank, Role


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A shim said Hello and was let in. `probe`: no engine, but one that only tries peers."""

    session: int
    engine_id: str
    epoch: int
    rank: Rank
    role: Role
    probe: bool = False


@dataclass(frozen=True, slots=True)
class SessionRegistered:
    """The shell has mapped the engine's memory, and checked every layer against its segments."""

    session: int
    geometry: Geometry
    num_blocks: int
    segments: tuple[SegmentInfo, ...]
    layers: tuple[LayerLayout, ...]
    fence_slots: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """EOF, Bye, or thrown out: the engine is taken for dead."""

    session: int


@dataclass(frozen=True, slots=True)
class ShimMessage:
    """Offer* | Extend | Seal | Revoke* | Fetch* | Cancel | Release | Renew | Ping."""

    session: int
    message: local.FromShim


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A DEALER's handshake succeeded (after ConnectPeer, or again after a PeerDown).

    `same_host`: the peer looks like it runs on this machine (to be proven by its link).
    """

    peer: PeerAddr
    daemon_id: str
    boot_id: int
    same_host: bool


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Connecting failed, heartbeats stopped, the link broke, or the peer restarted."""

    peer: PeerAddr
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """An answer from a producer's daemon."""

    peer: PeerAddr
    message: ToConsumer


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """A consumer's daemon introduced itself."""

    client: int
    daemon_id: str
    boot_id: int
    same_host: bool
    peer: str = ""
    """Whose quota it uses: its key's name, else its address; empty is its daemon_id."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Its heartbeats stopped, its link broke, or a newer boot of it joined."""

    client: int
    code: str


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A request of a consumer's daemon."""

    client: int
    message: ToProducer


@dataclass(frozen=True, slots=True)
class TransportOpened:
    attach_id: str


@dataclass(frozen=True, slots=True)
class TransportFailed:
    """Opening failed, or an open transport broke: its running pulls end in PullFailed anyway."""

    attach_id: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class PullDone:
    """Every byte of the job arrived, and the fence word was right after the last one."""

    job: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The job ended otherwise, and none of its bytes can land any more."""

    job: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class TicketRead:
    """Our data server sent all that one request under the ticket asked for, and it was valid.

    Several requests may be told by one event. Transports whose consumers read by themselves
    never cause it.
    """

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Take nothing new; what is in flight may end."""


Event = (
    SessionOpened
    | SessionRegistered
    | SessionClosed
    | ShimMessage
    | PeerUp
    | PeerDown
    | PeerMessage
    | ClientJoined
    | ClientLeft
    | ClientMessage
    | TransportOpened
    | TransportFailed
    | PullDone
    | PullFailed
    | TicketRead
    | Tick
    | DrainStarted
)
