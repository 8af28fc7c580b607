"""How many tokens each layer of an offer holds, as runs of layers with the same number."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.protocol.types import Watermark


@dataclass(frozen=True, slots=True)
class Raised:
    """Layers `[first, stop)` went from `before` to `after` tokens."""

    first: int
    stop: int
    before: int
    after: int


class Watermarks:
    """Monotonic: a layer's number only ever rises."""

    def __init__(self, num_layers: int) -> None:
        self._runs: list[tuple[int, int, int]] = [(0, num_layers, 0)] if num_layers else []

    def raise_to(self, first: int, stop: int, tokens: int) -> list[Raised]:
        """Raise layers `[first, stop)` to at least `tokens`; returns what really rose."""
        news: list[Raised] = []
        runs: list[tuple[int, int, int]] = []

        def put(start: int, end: int, value: int) -> None:
            if start >= end:
                return
            if runs and runs[-1][2] == value:
                runs[-1] = (runs[-1][0], end, value)
            else:
                runs.append((start, end, value))

        for start, end, value in self._runs:
            if end <= first or start >= stop or value >= tokens:
                put(start, end, value)
                continue
            low, high = max(start, first), min(end, stop)
            put(start, low, value)
            put(low, high, tokens)
            put(high, end, value)
            news.append(Raised(low, high, value, tokens))
        self._runs = runs
        return news

    def highest(self) -> int:
        return max((value for _, _, value in self._runs), default=0)

    def clipped(self, end: int) -> list[Watermark]:
        """All layers, none above `end`; layers that hold nothing are left out."""
        out: list[Watermark] = []
        for first, stop, value in self._runs:
            tokens = min(value, end)
            if (
                out
                and out[-1].tokens == tokens
                and out[-1].first_layer + out[-1].num_layers == first
            ):
                last = out.pop()
                first = last.first_layer
            if tokens:
                out.append(Watermark(first, stop - first, tokens))
        return out


def news_for(raised: list[Raised], end: int) -> list[Watermark]:
    """What of `raised` matters to one who wants no more than `end` tokens."""
    return [
        Watermark(one.first, one.stop - one.first, min(one.after, end))
        for one in raised
        if min(one.before, end) < min(one.after, end)
    ]
