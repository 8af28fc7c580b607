"""Producer: what fills an offer, namely its blocks, its prompt digests and its watermarks."""

from __future__ import annotations

from kvd.core.context import Context
from kvd.core.grants import Grants
from kvd.core.offers import Offer, Offers
from kvd.core.packed import NULL, unpack
from kvd.core.sessions import Session
from kvd.protocol import local
from kvd.protocol.codes import Code

DIGEST_BYTES = 16


class OfferFeed:
    def __init__(self, ctx: Context, offers: Offers, grants: Grants) -> None:
        self._ctx = ctx
        self._offers = offers
        self._grants = grants

    def blocks(self, session: Session, message: local.OfferBlocks) -> None:
        offer = self._offers.live(session, message.transfer_id, message.generation, "OfferBlocks")
        if offer is None:
            return
        problem = self._blocks_problem(offer, message)
        if problem is not None:
            self._offers.refuse_live(offer, *problem)
            return
        offer.blocks[message.group] += message.blocks
        self._offers.num_blocks += len(message.blocks) // 4

    def _blocks_problem(self, offer: Offer, message: local.OfferBlocks) -> tuple[Code, str] | None:
        memory = offer.memory
        if message.group >= len(memory.groups):
            return Code.BAD_MESSAGE, f"group {message.group} of {len(memory.groups)}"
        if len(message.blocks) % 4:
            return Code.BAD_MESSAGE, "a block list is not whole 32-bit ids"
        held, count = len(offer.blocks[message.group]) // 4, len(message.blocks) // 4
        if message.first != held:
            return Code.BAD_MESSAGE, f"blocks from index {message.first}, {held} are known"
        if held + count > memory.num_blocks:
            return Code.BAD_MESSAGE, f"more blocks than the {memory.num_blocks} of the engine"
        if self._offers.num_blocks + count > self._ctx.config.max_blocks:
            return Code.OVERLOADED, "max_blocks is reached"
        ids = unpack(message.blocks)
        if count and max(ids) >= memory.num_blocks:
            wrong = [block for block in ids if block >= memory.num_blocks and block != NULL]
            if wrong:
                return Code.BAD_MESSAGE, f"block {wrong[0]} of {memory.num_blocks}"
        return None

    def digests(self, session: Session, message: local.OfferDigests) -> None:
        offer = self._offers.live(session, message.transfer_id, message.generation, "OfferDigests")
        if offer is None:
            return
        positions, digests = message.positions, message.digests
        if len(positions) % 4 or len(digests) != len(positions) // 4 * DIGEST_BYTES:
            self._offers.refuse_live(offer, Code.BAD_MESSAGE, "digests and positions do not match")
            return
        # One for each block boundary and one at the end, and 0 if one likes.
        bound = offer.memory.num_blocks + 2
        known = offer.digests
        for i, position in enumerate(unpack(positions)):
            digest = digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
            if known.setdefault(position, digest) != digest:
                self._offers.refuse_live(
                    offer, Code.BAD_MESSAGE, f"two digests at position {position}"
                )
                return
            if len(known) > bound:
                self._offers.refuse_live(offer, Code.BAD_MESSAGE, f"more than {bound} digests")
                return
        self._grants.offer_grew(offer, [])

    def extend(self, session: Session, message: local.Extend) -> None:
        offer = self._offers.live(session, message.transfer_id, message.generation, "Extend")
        if offer is None:
            return
        if offer.sealed is not None:
            self._ctx.late("Extend")
            return
        num_layers = len(offer.memory.layers)
        first, stop = 0, num_layers
        if message.num_layers:
            first, stop = message.first_layer, message.first_layer + message.num_layers
        if first >= stop or stop > num_layers:
            self._offers.refuse_live(
                offer, Code.BAD_MESSAGE, f"layers [{first}, {stop}) of {num_layers}"
            )
            return
        if self._short_of_blocks(offer, message.tokens, first, stop):
            return
        self._grants.offer_grew(offer, offer.valid.raise_to(first, stop, message.tokens))

    def seal(self, session: Session, message: local.Seal) -> None:
        offer = self._offers.live(session, message.transfer_id, message.generation, "Seal")
        if offer is None:
            return
        if offer.sealed is not None:
            self._ctx.refused(Code.DUPLICATE, "Seal", offer.label)
            return
        num_layers = len(offer.memory.layers)
        if offer.valid.highest() > message.tokens:
            self._offers.refuse_live(
                offer,
                Code.BAD_MESSAGE,
                f"sealed at {message.tokens} tokens, {offer.valid.highest()} were valid",
            )
            return
        if self._short_of_blocks(offer, message.tokens, 0, num_layers):
            return
        offer.sealed = message.tokens
        self._offers.sealed(offer)
        self._grants.offer_grew(offer, offer.valid.raise_to(0, num_layers, message.tokens))

    def _short_of_blocks(self, offer: Offer, tokens: int, first: int, stop: int) -> bool:
        """Whether a watermark promises more than the block lists name; then the offer ends."""
        need = -(-tokens // offer.memory.block_size)
        for index, group in enumerate(offer.memory.groups):
            held = len(offer.blocks[index]) // 4
            if held < need and any(first <= layer < stop for layer in group.layers):
                self._offers.refuse_live(
                    offer,
                    Code.BAD_MESSAGE,
                    f"{tokens} tokens need {need} blocks, group {index} has {held}",
                )
                return True
        return False
