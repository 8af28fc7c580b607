"""Producer: how far the fetches of an offer have got, for an engine whose step waits for them."""

from __future__ import annotations

from kvd.core.clients import Client
from kvd.core.context import Context
from kvd.core.grant import Request, RequestState
from kvd.core.offers import Offer
from kvd.core.sessions import Sessions
from kvd.protocol import local, peer


class Readers:
    """Only watched offers are told of; consumers report for these alone."""

    def __init__(self, ctx: Context, sessions: Sessions) -> None:
        self._ctx = ctx
        self._sessions = sessions

    def granted(self, request: Request, offer: Offer) -> None:
        request.got = request.message.start
        self.changed(offer)

    def got(self, client: Client, message: peer.FetchGot) -> None:
        """A consumer has the tokens before `tokens` in every layer."""
        request = client.requests.get(message.fetch_id)
        offer = request.offer if request is not None else None
        if request is None or offer is None or offer.generation != message.generation:
            self._ctx.late("FetchGot")
            return
        request.got = max(request.got, message.tokens)
        self.changed(offer)

    def changed(self, offer: Offer) -> None:
        """Tell the engine, if it watches and this is news."""
        if not offer.watched or not offer.session.alive:
            return
        reading = [
            request.got
            for request in offer.grants.values()
            if request.state is RequestState.GRANTED and request.got < request.message.end
        ]
        news = (len(reading), min(reading, default=0))
        if news != offer.told_readers:
            offer.told_readers = news
            self._sessions.send(
                offer.session, local.OfferRead(offer.transfer_id, offer.generation, *news)
            )
