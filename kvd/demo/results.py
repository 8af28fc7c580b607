"""What the demo measured, and the conditions that it must meet. No processes, no network.

Three parties count the same tokens and bytes: vLLM's decode engine, the consumer's daemon and the
producer's. The demo passes only if they agree with each other and with the model's geometry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_ROWS = 10
MIN_OUTPUT = 16
MAX_NAMED = 3


@dataclass(slots=True)
class Row:
    """One prompt, answered by the pair and by one engine alone.

    `alone` and `paired` hold the token ids of each of the `n` answers. Tokens and bytes are sums
    over the `n` requests that an engine makes of the prompt. `local_hits` is decode's own count of
    tokens that its prefix cache held; `fetched_tokens` and `nbytes` are the daemon's count of
    what it fetched, `early_nbytes` what of it had arrived when prefill had computed its last token.
    `expected_hits` is None where
    timing decides whether one answer's request finds the blocks of another's.
    """

    name: str
    length: int
    n: int
    expected_hits: int | None
    alone: list[list[int]]
    paired: list[list[int]]
    local_hits: int = 0
    fetches: int = 0
    fetched_tokens: int = 0
    nbytes: int = 0
    early_nbytes: int = 0
    transfer_ms: float = 0.0
    ttft_ms: float = 0.0
    error: str = ""

    @property
    def prompt_tokens(self) -> int:
        return self.length * self.n

    @property
    def identical(self) -> bool:
        """Every token of every answer is the same, and there are answers."""
        return not self.error and self.difference is None and min(map(len, self.alone)) > 0

    @property
    def difference(self) -> tuple[int, int] | None:
        """(answer, position) of the first token that differs or is missing on one side."""
        for i in range(max(len(self.alone), len(self.paired))):
            a = self.alone[i] if i < len(self.alone) else []
            b = self.paired[i] if i < len(self.paired) else []
            if a == b and a:
                continue
            same = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            return i, min(len(a), len(b)) if same is None else same
        return None

    def due_blocks(self, block_size: int) -> int:
        """Blocks that had to move: those of the whole prompt, less those that decode held."""
        return self.n * -(-self.length // block_size) - self.local_hits // block_size


@dataclass(slots=True)
class Control:
    """The run with one block of one layer damaged in each transfer."""

    answers: int = 0
    differing: int = 0
    nbytes: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Everything that was measured. Byte and token counts are those of the measured run alone."""

    transport: str
    block_size: int
    block_nbytes: int
    rows: list[Row]
    control: Control
    external_hits: int
    """Decode's own count of tokens that came from outside."""
    fetched_bytes: int
    """Counted by decode's daemon."""
    served_bytes: int
    """Counted by prefill's daemon."""
    alone_hits: int
    """Tokens that the engine which answered alone did not compute itself: must be none."""
    transports_used: list[str] = field(default_factory=list)
    stream_chunk: int | None = None
    """Where KV is to move while prefill computes: prompts longer than this take several steps."""

    @property
    def fetched_tokens(self) -> int:
        return sum(row.fetched_tokens for row in self.rows)

    @property
    def due_bytes(self) -> int:
        return sum(row.due_blocks(self.block_size) for row in self.rows) * self.block_nbytes


@dataclass(frozen=True, slots=True)
class Check:
    """One condition. `detail` says what was seen, in words that stand alone."""

    name: str
    ok: bool
    detail: str


def checks(r: Results) -> list[Check]:
    """All conditions of the demo, in the order in which they are shown."""
    return [
        _enough(r),
        _alone(r),
        _identical(r),
        _control(r),
        _tokens(r),
        _hits(r),
        _vllm(r),
        _bytes(r),
        _transport(r),
        *([_early(r, r.stream_chunk)] if r.stream_chunk is not None else []),
    ]


def _enough(r: Results) -> Check:
    shortest = min((len(answer) for row in r.rows for answer in row.alone), default=0)
    return Check(
        "enough was asked",
        len(r.rows) >= MIN_ROWS and shortest >= MIN_OUTPUT,
        f"{len(r.rows)} prompts, answers of at least {shortest} tokens",
    )


def _alone(r: Results) -> Check:
    return Check(
        "the engine alone computed everything itself",
        r.alone_hits == 0,
        f"{r.alone_hits} tokens of its prompts came from a cache or through kvd",
    )


def _identical(r: Results) -> Check:
    bad = [row for row in r.rows if not row.identical]
    if not r.rows or bad:
        return Check("identical answers", False, _first([_why(row) for row in bad]) or "no rows")
    tokens = sum(len(answer) for row in r.rows for answer in row.paired)
    return Check("identical answers", True, f"all {len(r.rows)} prompts, {tokens} tokens compared")


def _why(row: Row) -> str:
    if row.error:
        return f"{row.name}: {row.error}"
    where = row.difference
    if where is None:
        return f"{row.name}: no answer to compare"
    return f"{row.name}: token {where[1]} of answer {where[0]} differs"


def _control(r: Results) -> Check:
    c = r.control
    ok = c.answers > 0 and 2 * c.differing > c.answers and c.nbytes > 0 and not c.errors
    detail = f"with damaged KV, {c.differing} of {c.answers} answers differ"
    return Check("the comparison can fail", ok, _first([detail, *c.errors]))


def _tokens(r: Results) -> Check:
    bad = [
        f"{row.name}: {row.fetched_tokens} fetched, {row.prompt_tokens} - {row.local_hits} due"
        for row in r.rows
        if row.fetched_tokens != row.prompt_tokens - row.local_hits or row.fetched_tokens <= 0
    ]
    return Check(
        "fetched = prompt - what decode held",
        bool(r.rows) and not bad,
        _first(bad) or f"in every row; {r.fetched_tokens} tokens in all",
    )


def _hits(r: Results) -> Check:
    bad = [
        f"{row.name}: decode held {row.local_hits} tokens, not {row.expected_hits}"
        for row in r.rows
        if row.expected_hits not in (None, row.local_hits)
    ]
    held = sum(row.local_hits for row in r.rows)
    return Check(
        "decode's own cache was used",
        bool(r.rows) and not bad,
        _first(bad) or f"{held} tokens were there already and did not move",
    )


def _vllm(r: Results) -> Check:
    return Check(
        "vLLM counts the same tokens",
        r.external_hits == r.fetched_tokens > 0,
        f"vllm:external_prefix_cache_hits_total {r.external_hits}, kvd {r.fetched_tokens}",
    )


def _bytes(r: Results) -> Check:
    blocks = r.due_bytes // r.block_nbytes
    rows = sum(row.nbytes for row in r.rows)
    return Check(
        "both daemons count the same bytes",
        rows == r.fetched_bytes == r.served_bytes == r.due_bytes > 0,
        f"fetched {r.fetched_bytes}, served {r.served_bytes}, "
        f"due {r.due_bytes} ({blocks} blocks of {r.block_nbytes})",
    )


def _transport(r: Results) -> Check:
    used = ", ".join(r.transports_used) or "none"
    ok = len(r.transports_used) == 1 and r.transport in ("auto", *r.transports_used)
    return Check("the transport that was asked for", ok, f"asked for {r.transport}, used {used}")


def _early(r: Results, chunk: int) -> Check:
    """Of prompts of several prefill steps that decode held nothing of."""
    long = [row for row in r.rows if row.length > chunk and row.n == 1 and not row.local_hits]
    early, due = sum(row.early_nbytes for row in long), sum(row.nbytes for row in long)
    return Check(
        "most KV had arrived when prefill ended",
        2 * early > due > 0,
        f"{early} of {due} bytes, of {len(long)} prompts of several prefill steps",
    )


def _first(what: list[str]) -> str:
    """The first few of many: where all rows fail, the first ones say why."""
    more = [f"and {len(what) - MAX_NAMED} more"] if len(what) > MAX_NAMED else []
    return "; ".join([*what[:MAX_NAMED], *more])
