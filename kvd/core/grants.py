"""Producer: the requests of consumers' daemons. Parked, held for a digest, or granted.

A request that is held or granted keeps its offer; a granted one has a ticket, and is told of
each piece of news that lies in its range.
"""

from __future__ import annotations

from collections import Counter

from kvd.core.clients import Client, Clients
from kvd.core.context import Context, Refusal, failure_code
from kvd.core.grant import Request, RequestState
from kvd.core.instructions import CloseTicket, ExtendTicket, OpenTicket
from kvd.core.offers import Closing, Offer, OfferEvent, Offers, Stop
from kvd.core.packed import has_null, present
from kvd.core.readers import Readers
from kvd.core.sessions import Session
from kvd.core.watermarks import Raised, news_for
from kvd.protocol import peer
from kvd.protocol.codes import Code


class Grants:
    def __init__(self, ctx: Context, clients: Clients, offers: Offers, readers: Readers) -> None:
        self._ctx = ctx
        self._clients = clients
        self._offers = offers
        self._readers = readers
        self.count = 0
        self.parked = 0
        self.parked_by: Counter[str] = Counter()
        """Parked requests by peer; peers without any are not in it."""
        self.bytes_by: Counter[str] = Counter()
        """Bytes that are granted and not closed, likewise."""
        self.by_ticket: dict[bytes, Request] = {}
        """Those that are granted."""

    # --- from clients -----------------------------------------------------------------------

    def ask(self, client: Client, message: peer.FetchReq) -> None:
        if message.fetch_id in client.requests:
            # A refusal would end the live one at the consumer.
            self._ctx.refused(Code.DUPLICATE, "FetchReq", message.fetch_id)
            return
        attachment = client.attachments.get(message.attach_id)
        if attachment is None:
            self._refuse_message(client, message, Code.STALE_EPOCH, "the attachment is not known")
            return
        if self.count >= self._ctx.config.max_fetches:
            self._refuse_message(client, message, Code.OVERLOADED, "max_fetches is reached")
            return
        request = Request(client, attachment, message, self._ctx.now)
        client.requests[message.fetch_id] = request
        self.count += 1
        try:
            self._check_range(request)
            self._place(request)
        except Refusal as refusal:
            self._refuse(request, refusal)

    def close(self, client: Client, message: peer.FetchClose) -> None:
        """The consumer reads no more. One that was refused or revoked is gone already."""
        request = client.requests.get(message.fetch_id)
        if request is not None:
            ok = message.code == Code.OK
            code = Code.OK if ok else failure_code(message.code)
            self._end(request, code, message.nbytes, sole=message.sole)

    def read(self, ticket: bytes) -> None:
        """Some of it was sent from here; it may have ended meanwhile."""
        request = self.by_ticket.get(ticket)
        if request is not None:
            request.read(self._ctx.now)

    def client_left(self, client: Client, code: Code) -> None:
        for request in list(client.requests.values()):
            self._end(request, code, 0)
        for attachment in list(client.attachments.values()):
            self._clients.detach(attachment)
        self._clients.by_id.pop(client.id, None)

    def detach(self, client: Client, attach_id: str) -> None:
        attachment = client.attachments.get(attach_id)
        if attachment is None:
            self._ctx.late("Detach")
            return
        for request in [one for one in client.requests.values() if one.attachment is attachment]:
            self._end(request, Code.CANCELLED, 0)
        self._clients.detach(attachment)

    # --- from offers ------------------------------------------------------------------------

    def offer_opened(self, offer: Offer) -> None:
        for request in self._parked_for(offer.session, offer.transfer_id):
            try:
                self._place(request)
            except Refusal as refusal:
                self._refuse(request, refusal)

    def offer_refused(
        self, session: Session, transfer_id: str, generation: int, code: Code
    ) -> None:
        for request in self._parked_for(session, transfer_id):
            if request.message.generation in (None, generation):
                self._refuse(request, Refusal(code, "the producer's offer was refused"))

    def offer_grew(self, offer: Offer, raised: list[Raised]) -> None:
        """Blocks, digests, watermarks or the seal of an offer came."""
        for request in list(offer.grants.values()):
            try:
                if request.state is RequestState.HELD:
                    if self._admissible(request, offer):
                        self._grant(request, offer)
                    continue
                if offer.sealed is not None:
                    self._check_end(request, offer)
                self._tell_news(request, offer, raised)
            except Refusal as refusal:
                if request.state is RequestState.GRANTED:
                    self._revoke(request, offer, refusal.code, again=False)
                else:
                    self._refuse(request, refusal)

    def offer_ended(self, offer: Offer, requests: list[Request], stop: Stop) -> None:
        for request in requests:
            again = (
                stop.again
                and request.message.generation is None
                and not self._no_room_to_park(request)
            )
            request.offer = None
            if request.state is RequestState.GRANTED:
                self._revoke(request, offer, stop.reason, again)
            elif again:
                self._park(request, self._ctx.config.park_max_s)
            else:
                self._refuse(request, Refusal(stop.reason, "the offer ended"))

    # --- from elsewhere ---------------------------------------------------------------------

    def session_gone(self, session: Session) -> None:
        """Its offers have ended; what is parked for it will never be offered."""
        for transfer_id in list(session.requests):
            for request in self._parked_for(session, transfer_id):
                self._refuse(request, Refusal(Code.ENGINE_GONE, "the producer engine left"))

    def drain(self, sessions: list[Session]) -> None:
        """No new offer will come: nothing is worth waiting for."""
        for session in sessions:
            for transfer_id in list(session.requests):
                for request in self._parked_for(session, transfer_id):
                    self._refuse(request, Refusal(Code.DRAINING, "the producer's daemon drains"))

    def park_passed(self, client_id: int, fetch_id: str) -> None:
        request = self._find(client_id, fetch_id)
        if request is not None and request.state is RequestState.PARKED:
            self._refuse(request, Refusal(Code.UNKNOWN_TRANSFER, "not offered in time"))

    def grant_passed(self, client_id: int, fetch_id: str) -> None:
        """A consumer that never closed its fetch; an offer is not held by goodwill alone."""
        request = self._find(client_id, fetch_id)
        if request is None or request.offer is None:
            return
        if request.state is RequestState.GRANTED:
            self._revoke(request, request.offer, Code.DEADLINE, again=False)
        else:
            self._refuse(request, Refusal(Code.DEADLINE, "held too long"))

    # --- placing ----------------------------------------------------------------------------

    def _check_range(self, request: Request) -> None:
        message = request.message
        memory = request.attachment.session.memory
        assert memory is not None
        if message.start % memory.block_size or message.start >= message.end:
            raise Refusal(
                Code.UNALIGNED_RANGE,
                f"[{message.start}, {message.end}) with block size {memory.block_size}",
            )
        if request.stop_index > memory.num_blocks:
            raise Refusal(
                Code.RANGE_NOT_HELD, f"{message.end} tokens in {memory.num_blocks} blocks"
            )

    def _place(self, request: Request) -> None:
        """Grant, hold or park a request; raises Refusal when there is nothing to wait for."""
        message, session = request.message, request.attachment.session
        wanted = message.generation
        offer = session.offers.get(message.transfer_id)
        tomb = self._offers.tombstone(session, message.transfer_id)
        if offer is not None and (wanted is None or wanted == offer.generation):
            ready = self._admissible(request, offer)
            self._unpark(request)
            request.offer = offer
            offer.grants[request.key] = request
            self._offers.fire(offer, OfferEvent.GRANT_OPENED)
            self._ctx.deadlines.set(
                ("grant", *request.key),
                self._ctx.now + self._ctx.config.fetch_max_s + self._ctx.config.attach_timeout_s,
            )
            if ready:
                self._grant(request, offer)
            else:
                request.state = RequestState.HELD
                request.waits(self._ctx.now)
            return
        # A generation that was taken back may be followed by another: who named none waits for it.
        over = tomb is not None and (wanted is not None or tomb.reason is not Code.REVOKED)
        if offer is None and tomb is not None and over and wanted in (None, tomb.generation):
            raise Refusal(tomb.reason, f"{message.transfer_id}#{tomb.generation} has ended")
        newest = offer.generation if offer is not None else tomb.generation if tomb else -1
        if wanted is not None and wanted < newest:
            raise Refusal(Code.STALE_GENERATION, f"{wanted} was asked for, {newest} was offered")
        if ("park", *request.key) in self._ctx.deadlines:
            return
        wait = min(message.park_s, self._ctx.config.park_max_s)
        if wait <= 0:
            raise Refusal(Code.UNKNOWN_TRANSFER, f"{message.transfer_id} is not offered")
        if self._ctx.draining:
            raise Refusal(Code.DRAINING, "the producer's daemon drains")
        if limit := self._no_room_to_park(request):
            raise Refusal(Code.OVERLOADED, f"{limit} is reached")
        self._park(request, wait)

    def _admissible(self, request: Request, offer: Offer) -> bool:
        """Whether a request may be granted now; raises Refusal if it never may."""
        self._check_end(request, offer)
        end = request.message.end
        digest = offer.digests.get(end)
        if digest is None:
            if offer.sealed is None:
                return False
            raise Refusal(Code.PROMPT_MISMATCH, f"no digest was offered at position {end}")
        if digest != request.message.digest:
            raise Refusal(Code.PROMPT_MISMATCH, f"the prompts differ before position {end}")
        return True

    def _check_end(self, request: Request, offer: Offer) -> None:
        end, sealed = request.message.end, offer.sealed
        if sealed is None:
            # An end within a block is right only if it turns out to be the offer's own; its
            # digest, which is offered for boundaries and that end alone, says so early.
            return
        if end > sealed:
            raise Refusal(Code.RANGE_NOT_HELD, f"{end} tokens asked for, {sealed} are held")
        if end % offer.memory.block_size and end != sealed:
            raise Refusal(
                Code.UNALIGNED_RANGE,
                f"end {end} is neither a block boundary nor the offer's end {sealed}",
            )

    def _grant(self, request: Request, offer: Offer) -> None:
        self._charge(request, offer)
        request.state = RequestState.GRANTED
        request.ticket = self._ctx.token()
        request.granted(self._ctx.now)
        self.by_ticket[request.ticket] = request
        request.sent = [0] * len(offer.blocks)
        blocks = self._new_blocks(request, offer)
        end = request.message.end
        valid = offer.valid.clipped(end)
        self._ctx.emit(
            OpenTicket(
                request.ticket,
                offer.session.id,
                offer.slot,
                offer.word,
                request.first_index,
                tuple(blocks),
                tuple(valid),
            )
        )
        self._ctx.to_client(
            request.client.id,
            peer.Grant(
                fetch_id=request.message.fetch_id,
                generation=offer.generation,
                ticket=request.ticket,
                fence_slot=offer.slot,
                fence_word=offer.word,
                blocks=blocks,
                valid=valid,
                sealed=offer.sealed is not None,
                report=offer.watched,
            ),
        )
        self._readers.granted(request, offer)

    def _charge(self, request: Request, offer: Offer) -> None:
        """Takes the range's bytes off its peer's quota; raises Refusal when that is used up."""
        count = request.stop_index - request.first_index
        nbytes = count * sum(group.block_nbytes for group in offer.memory.groups)
        limit, held = self._ctx.config.max_bytes_per_peer, self.bytes_by[request.client.peer]
        if held + nbytes > limit:
            raise Refusal(
                Code.OVERLOADED,
                f"{request.client.peer} reads {held} bytes and asks for {nbytes} more, "
                f"{limit} are allowed (max_bytes_per_peer)",
            )
        request.nbytes = nbytes
        self.bytes_by[request.client.peer] += nbytes

    def _new_blocks(self, request: Request, offer: Offer) -> list[bytes]:
        first, stop = request.first_index, request.stop_index
        out: list[bytes] = []
        for group, known in enumerate(offer.blocks):
            news = bytes(known[4 * (first + request.sent[group]) : 4 * stop])
            request.sent[group] += len(news) // 4
            out.append(news)
        return out

    def _tell_news(self, request: Request, offer: Offer, raised: list[Raised]) -> None:
        end = request.message.end
        news = news_for(raised, end)
        if not news:
            return
        blocks = self._new_blocks(request, offer)
        self._ctx.emit(ExtendTicket(request.ticket, tuple(blocks), tuple(offer.valid.clipped(end))))
        self._ctx.to_client(
            request.client.id,
            peer.Progress(
                fetch_id=request.message.fetch_id,
                generation=offer.generation,
                blocks=blocks,
                valid=news,
                sealed=offer.sealed is not None,
            ),
        )

    # --- ending -----------------------------------------------------------------------------

    def _revoke(self, request: Request, offer: Offer, code: Code, again: bool) -> None:
        """Take a grant back; with `again` the request waits for the next generation."""
        self._close_ticket(request)
        self._ctx.to_client(
            request.client.id,
            peer.FetchRevoked(request.message.fetch_id, offer.generation, str(code), again),
        )
        if not again:
            self._served(request, offer, code, 0)
            self._forget(request, Closing.FAILED)
            return
        request.offer = None
        self._park(request, self._ctx.config.park_max_s)

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        self._forget(request, Closing.FAILED)
        self._refuse_message(request.client, request.message, refusal.code, refusal.detail)

    def _refuse_message(
        self, client: Client, message: peer.FetchReq, code: Code, detail: str
    ) -> None:
        self._ctx.to_client(client.id, peer.FetchRefused(message.fetch_id, str(code), detail))
        self._ctx.refused(code, "FetchReq", f"{message.transfer_id}: {detail}")

    def _end(self, request: Request, code: Code, nbytes: int, sole: bool = False) -> None:
        """The consumer is done with a request, or is gone."""
        offer = request.offer
        closing = Closing.FAILED
        if request.state is RequestState.GRANTED and offer is not None:
            self._close_ticket(request)
            if code is Code.OK:
                offer.fetched += 1
                offer.delivered = True
                nbytes = self._granted_bytes(request, offer)
                closing = Closing.FOR_GOOD if sole else Closing.FETCHED
            self._served(request, offer, code, nbytes)
        self._forget(request, closing)

    def _forget(self, request: Request, closing: Closing) -> None:
        offer = request.offer
        request.client.requests.pop(request.message.fetch_id, None)
        self.count -= 1
        self._unpark(request)
        self._ctx.deadlines.clear(("grant", *request.key))
        if offer is not None:
            request.offer = None
            del offer.grants[request.key]
            self._readers.changed(offer)
            if not offer.grants:
                self._offers.fire(offer, OfferEvent.LAST_CLOSED, closing)

    def _close_ticket(self, request: Request) -> None:
        if request.ticket:
            self._ctx.emit(CloseTicket(request.ticket))
            del self.by_ticket[request.ticket]
            request.ticket = b""
            _less(self.bytes_by, request.client.peer, request.nbytes)
            request.nbytes = 0

    def _served(self, request: Request, offer: Offer, code: Code, nbytes: int) -> None:
        self._ctx.record(
            "fetch_served",
            code=str(code),
            fetch_id=request.message.fetch_id,
            transfer_id=offer.transfer_id,
            nbytes=nbytes,
            transport=request.attachment.transport,
            seconds=self._ctx.now - request.asked_at,
            stages=request.stages,
        )

    def _granted_bytes(self, request: Request, offer: Offer) -> int:
        """What the granted range holds, by this side's own account."""
        first, stop = request.first_index, request.stop_index
        total = 0
        for known, group in zip(offer.blocks, offer.memory.groups, strict=True):
            part = known[4 * first : 4 * stop]
            count = present(part).bit_count() if has_null(part) else len(part) // 4
            total += count * group.block_nbytes
        return total

    # --- parking ----------------------------------------------------------------------------

    def _no_room_to_park(self, request: Request) -> str:
        """The limit that is reached, or why else none is; empty when a request may be parked."""
        config = self._ctx.config
        if self._ctx.draining:
            return "draining"  # no offer that could end the wait will be taken
        if self.parked >= config.max_parked:
            return "max_parked"
        if self.parked_by[request.client.peer] >= config.max_parked_per_peer:
            return "max_parked_per_peer"
        return ""

    def _park(self, request: Request, wait: float) -> None:
        request.state = RequestState.PARKED
        request.waits(self._ctx.now)
        self._ctx.deadlines.clear(("grant", *request.key))
        self._ctx.deadlines.set(("park", *request.key), self._ctx.now + wait)
        session = request.attachment.session
        session.requests.setdefault(request.message.transfer_id, {})[request.key] = request
        self.parked += 1
        self.parked_by[request.client.peer] += 1

    def _unpark(self, request: Request) -> None:
        session, transfer_id = request.attachment.session, request.message.transfer_id
        waiting = session.requests.get(transfer_id, {})
        if waiting.pop(request.key, None) is None:
            return
        self.parked -= 1
        _less(self.parked_by, request.client.peer, 1)
        self._ctx.deadlines.clear(("park", *request.key))
        if not waiting:
            del session.requests[transfer_id]

    def _parked_for(self, session: Session, transfer_id: str) -> list[Request]:
        return list(session.requests.get(transfer_id, {}).values())

    def _find(self, client_id: int, fetch_id: str) -> Request | None:
        client = self._clients.by_id.get(client_id)
        return client.requests.get(fetch_id) if client is not None else None


def _less(counter: Counter[str], name: str, by: int) -> None:
    """Counts down; names at 0 are forgotten, since peers come and go."""
    counter[name] -= by
    if counter[name] <= 0:
        del counter[name]
