"""The calls of an engine that offers KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connector_shim.calls import Calls
from connector_shim.frames import digest_frames, offer_block_frames
from connector_shim.wire import Frame, encode
from kvd.protocol import local
from kvd.protocol.codes import Code


class ProducerCalls(Calls):
    """Part of `Client`."""

    def offer(
        self,
        transfer_id: str,
        generation: int,
        *,
        blocks: Sequence[Sequence[int]] = (),
        digests: Mapping[int, bytes] | None = None,
        tokens: int | None = None,
        lease_s: float,
        watched: bool = False,
    ) -> None:
        """Promises that these blocks hold KV of the transfer, until OfferEnded or `revoke`.

        `blocks[g]`: group g's block table from its start, `digests`: 16 bytes for each token
        position. With `tokens` all layers are valid for `[0, tokens)` now and nothing will follow;
        without, `extend` and `seal` say so later. `lease_s`: how long it is held for a consumer.
        `watched`: OfferRead tells how far it was read.
        Raises ClientError and changes nothing: DAEMON_GONE, DRAINING, NOT_REGISTERED, OVERLOADED,
        DUPLICATE, BAD_MEMORY, BAD_MESSAGE.
        """
        self._check_usable()
        packed = self._pack(blocks)
        key = (transfer_id, generation)
        slot, word = self._tracker.open_offer(key, self._clock(), lease_s)
        try:
            frames = [
                encode(
                    local.Offer(
                        transfer_id=transfer_id,
                        generation=generation,
                        slot=slot,
                        word=word,
                        lease_s=lease_s,
                        watched=watched,
                    )
                )
            ]
            for group, part in enumerate(packed):
                frames += offer_block_frames(transfer_id, generation, group, 0, part)
            frames += digest_frames(transfer_id, generation, digests or {})
            if tokens is not None:
                frames.append(encode(local.Seal(transfer_id, generation, tokens)))
            self._session.push(frames)
        except BaseException:
            self._tracker.forget_offer(key)
            raise

    def extend_blocks(
        self, transfer_id: str, generation: int, *, group: int, first: int, blocks: Sequence[int]
    ) -> bool:
        """More of group's block table, from index `first` on. False if the offer has ended."""
        packed = self._pack_group(group, blocks)
        frames = offer_block_frames(transfer_id, generation, group, first, packed)
        return self._say(transfer_id, generation, frames)

    def extend_digests(
        self, transfer_id: str, generation: int, digests: Mapping[int, bytes]
    ) -> bool:
        """More digests, by token position. False if the offer has ended."""
        return self._say(transfer_id, generation, digest_frames(transfer_id, generation, digests))

    def extend(
        self,
        transfer_id: str,
        generation: int,
        *,
        tokens: int,
        first_layer: int = 0,
        num_layers: int = 0,
    ) -> bool:
        """Tokens `[0, tokens)` are valid in these layers (0 layers: in all). False if it ended."""
        message = local.Extend(transfer_id, generation, tokens, first_layer, num_layers)
        return self._say(transfer_id, generation, [encode(message)])

    def seal(self, transfer_id: str, generation: int, *, tokens: int) -> bool:
        """All layers are valid for `[0, tokens)`, and no more comes. False if it has ended."""
        return self._say(
            transfer_id, generation, [encode(local.Seal(transfer_id, generation, tokens))]
        )

    def revoke(self, transfer_id: str, generation: int) -> bool:
        """Takes an offer back: when this returns, its blocks may be written. False if it ended.

        OfferEnded (revoked) is told by the next `poll`.
        """
        if not self._tracker.holds((transfer_id, generation)):
            return False
        self._tracker.end_offer((transfer_id, generation), Code.REVOKED)
        if self._session.usable:
            self._session.push([encode(local.Revoke(transfer_id, generation))], urgent=True)
        return True

    def revoke_all(self) -> int:
        """`revoke` of every offer; returns how many there were."""
        count = self._tracker.end_all_offers(Code.REVOKED)
        if count and self._session.usable:
            self._session.push([encode(local.RevokeAll())], urgent=True)
        return count

    def _say(self, transfer_id: str, generation: int, frames: Sequence[Frame]) -> bool:
        if not self._tracker.touch_offer((transfer_id, generation), self._clock()):
            return False
        self._session.push(frames)
        return True
