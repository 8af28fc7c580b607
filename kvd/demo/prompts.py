"""The prompts of the demo, one row of its table each: every shape that a transfer can have.

One byte is one token, so the lengths of the texts are the lengths of the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXT = (
    "A prefill engine reads a whole prompt at once and keeps, for every layer, the keys and values "
    "of each token. A decode engine needs those same keys and values before it can write the next "
    "token. Computing them twice would waste the work, and computing both kinds of step on one "
    "machine makes each wait for the other. So the cache is handed over: block by block, layer by "
    "layer, out of the memory of one engine and into the memory of the other, while neither of "
    "them notices. What must never happen is that a block arrives late, or half, or from another "
    "prompt: the answer would still look like an answer. Therefore every row below is asked twice, "
    "once of one engine that works alone, and once of the pair, and the two must agree to the last "
    "token. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. Prompts with the same `together` are sent at the same moment.

    `hits`: tokens that decode is expected to hold already, so that a demo in which decode's
    prefix cache did not work is noticed too; None where timing decides.
    """

    name: str
    text: str
    hits: int | None = 0
    n: int = 1
    together: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.text.encode())

    def body(self, model: str, output_tokens: int, salt: str) -> dict[str, Any]:
        """The request for /v1/completions. `salt` keeps prefix caches of the phases apart."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.text,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_token_ids": True,
            "stream": True,
        }
        if self.n > 1:
            # vLLM refuses n > 1 with greedy sampling. One candidate a token comes to the same. (A
            # seed would do, but vLLM's CPU worker dies of one where a prompt takes two chunks.)
            body |= {"n": self.n, "temperature": 1.0, "top_k": 1}
        return body


def prompts(block_size: int, chunk: int) -> list[Prompt]:
    """The rows. `block_size` and `chunk` are in tokens; the long rows are some chunks long."""
    long = 3 * chunk + block_size + block_size // 2
    shared = long // block_size // 2 * block_size
    repeated = 2 * chunk + block_size // 4
    first = _text("first of many chunks", long)
    again = _text("asked again", repeated)
    rows = [
        Prompt("shorter than one block", _text("short", block_size * 2 // 3)),
        Prompt("exactly one block", _text("whole", block_size)),
        Prompt("one block and one token", _text("one over", block_size + 1)),
        Prompt("several blocks, last partial", _text("some", 3 * block_size + 5)),
        Prompt("several prefill chunks", first),
        Prompt(
            "same start as the row above",
            first[:shared] + _text("but ends in another way", 2 * block_size + 7),
            hits=shared,
        ),
        Prompt("sent twice: the first time", again),
        Prompt(
            "sent twice: the second time",
            again,
            hits=(repeated - 1) // block_size * block_size,
        ),
        Prompt("two answers (n=2)", _text("two answers", 4 * block_size + 9), hits=None, n=2),
    ]
    for i, quarters in enumerate((2, 4, 6, 9)):
        text = _text(f"{i} of 4", quarters * chunk // 4 + 3 * i)
        rows.append(Prompt(f"four at once: {i + 1}", text, together=0))
    return rows


def _text(title: str, tokens: int) -> str:
    """`tokens` bytes of text that no other title starts with."""
    text = f"{title}: " + TEXT * (tokens // len(TEXT) + 1)
    return text[:tokens]
