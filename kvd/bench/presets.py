"""What one request moves: models whose KV cache sizes are common, by name."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Tokens of one block, vLLM's default."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One request: `blocks` blocks in each of `layers` layers, `piece` bytes each."""

    name: str
    layers: int
    blocks: int
    piece: int
    requests: int
    """Measured requests if the user names no number."""
    what: str

    @property
    def pieces(self) -> int:
        """Pieces of one request; each lies apart from the others."""
        return self.layers * self.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of one request."""
        return self.pieces * self.piece

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("llama3-8b-4k", 32, 256, 64 * 1024, 20, "Llama 3 8B, 16 bit, 4096 tokens"),
        Preset("llama3-8b-128", 32, 8, 64 * 1024, 200, "Llama 3 8B, 16 bit, 128 tokens"),
        Preset("mla-4k", 61, 256, 18 * 1024, 20, "DeepSeek V3 (MLA), 16 bit, 4096 tokens"),
        Preset("smoke", 4, 8, 32 * 1024, 4, "1 MiB, to see that the bench works"),
    )
}
HIDDEN = frozenset({"smoke"})
