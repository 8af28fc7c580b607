"""What `Client.poll` returns: two events of its own, and the daemon's messages about work."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol import local
from kvd.protocol.codes import Code


@dataclass(frozen=True, slots=True)
class Up:
    """The daemon has taken this engine's memory; offers and fetches are possible.

    `restarted`: it is not the daemon (boot) that the client was registered with before.
    """

    welcome: local.Welcome
    restarted: bool


@dataclass(frozen=True, slots=True)
class Down:
    """The daemon cannot be used now. The client goes on trying by itself.

    Told when it is lost, and for failing attempts each time the code changes. Offers end in the
    same poll; fetches that were outstanding are told only once no byte can land any more.
    """

    code: Code
    detail: str


Event = (
    Up
    | Down
    | local.OfferEnded
    | local.OfferRead
    | local.FetchDone
    | local.NotifyDone
    | local.State
)
