"""The demo from start to end: alone, through kvd, through kvd with damage; then the comparison."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvd.demo.client import Answer, DemoError, until
from kvd.demo.daemons import DaemonCounts, daemon_counts
from kvd.demo.engines import (
    BLOCK_SIZE,
    CHUNK,
    MODEL,
    STREAM_CHUNK,
    STREAM_LONG,
    block_nbytes,
    engine_counts,
)
from kvd.demo.prompts import Prompt, prompts
from kvd.demo.results import Control, Results, Row
from kvd.demo.stack import Stack

OUTPUT_TOKENS = 24
SETTLE_S = 10.0

ALONE, PAIRED, DAMAGED = "alone", "through-kvd", "damaged"
AT_ONCE = 4
"""Prompts of the control."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer of the pair with what the engine and the daemon counted for it."""

    answer: Answer
    local_hits: int
    fetches: int
    tokens: int
    nbytes: int
    transfer_ms: float
    early: int


async def measure(stack: Stack) -> Results:
    """Run all three phases on a stack that is up. Raises DemoError."""
    say = stack.narrator.say
    asked = prompts(BLOCK_SIZE, STREAM_LONG if stack.mode == "stream" else CHUNK)
    say("")
    say(f"[bold]1.[/] One engine alone answers {len(asked)} prompts.")
    alone, alone_hits = await _alone(stack, asked)
    say(f"[bold]2.[/] The same {len(asked)} prompts go through the router: prefill, kvd, decode.")
    before = await _daemons(stack)
    external = (await engine_counts(stack.client, stack.engines["decode"])).external_hits
    seen = await _paired(stack, asked)
    rows = [_row(prompt, a, s) for prompt, a, s in zip(asked, alone, seen, strict=True)]
    fetched, served = await _settled(stack, before, sum(row.nbytes for row in rows))
    external = (await engine_counts(stack.client, stack.engines["decode"])).external_hits - external
    used = sorted({str(r.get("transport")) for r in stack.daemons["decode"].records("fetch_done")})
    say("[bold]3.[/] Once more, with one block of one layer damaged in each transfer.")
    control = await _control(stack, asked, alone)
    return Results(
        transport=stack.config.get("transport", "auto"),
        block_size=BLOCK_SIZE,
        block_nbytes=block_nbytes(stack.shape),
        rows=rows,
        control=control,
        external_hits=round(external),
        fetched_bytes=fetched,
        served_bytes=served,
        alone_hits=alone_hits,
        transports_used=used,
        stream_chunk=STREAM_CHUNK if stack.mode == "stream" else None,
    )


# --- the three phases -----------------------------------------------------------------------


async def _alone(stack: Stack, asked: list[Prompt]) -> tuple[list[Answer], int]:
    """The prefill engine answers by itself, each prompt under a salt of its own.

    It is asked directly, so nothing is transferred, and the salts keep its prefix cache out of it:
    every token is computed here. Also returns how many tokens were not.
    """
    engine = stack.engines["prefill"]
    before = await engine_counts(stack.client, engine)
    answers: list[Answer] = []
    with stack.narrator.steps("   alone", len(asked)) as steps:
        for i, prompt in enumerate(asked):
            body = prompt.body(MODEL, OUTPUT_TOKENS, f"{ALONE}-{i}")
            answer = await _one_by_one(stack, engine.url, body, prompt.n)
            if answer.error:
                raise DemoError(
                    f"the engine alone did not answer prompt {prompt.name!r}: {answer.error}\n"
                    f"Its log: {engine.child.log}"
                )
            answers.append(answer)
            steps.step()
    await stack.wait_idle()
    after = await engine_counts(stack.client, engine) - before
    return answers, round(after.local_hits + after.external_hits)


async def _paired(stack: Stack, asked: list[Prompt]) -> list[Seen]:
    """All prompts through the router, those that belong together at the same moment."""
    seen: list[Seen] = []
    decode = stack.engines["decode"]
    with stack.narrator.steps("   through kvd", len(asked)) as steps:
        for group in _groups(asked):
            before = await engine_counts(stack.client, decode)
            known = len(stack.daemons["decode"].records("fetch_done"))
            answers = await _ask(stack, group, PAIRED)
            due = sum(prompt.tokens * prompt.n for prompt in group)

            async def counted(due: float = before.prompt + due) -> bool:
                return (await engine_counts(stack.client, decode)).prompt >= due

            if not any(answer.error for answer in answers):
                await until(counted, SETTLE_S, "decode counts the prompt's tokens", every=0.05)
            hits = round((await engine_counts(stack.client, decode) - before).local_hits)
            # Prompts that are sent at once share nothing, so their hits can only be none.
            shares = [hits, *[0] * (len(group) - 1)]
            records = stack.daemons["decode"].records("fetch_done")[known:]
            names = None if stack.mode == "mooncake" else [one.request_id for one in answers]
            mine = records_by_answer(records, group, names)
            seen += map(_seen, mine, answers, shares)
            steps.step(len(group))
    return seen


async def _control(stack: Stack, asked: list[Prompt], alone: list[Answer]) -> Control:
    """Through the router again, with a daemon that damages what it fetches for decode.

    Several at once: only whether the answers differ is looked at, not who had fetched what.
    """
    await stack.replace_decode_daemon(damaging=True)
    control = Control()
    with stack.narrator.steps("   damaged", len(asked)) as steps:
        groups = [asked[i : i + AT_ONCE] for i in range(0, len(asked), AT_ONCE)]
        for group, expected in _with(groups, alone):
            answers = await _ask(stack, group, DAMAGED)
            for prompt, answer, right in zip(group, answers, expected, strict=True):
                control.answers += 1
                if answer.error:
                    control.errors.append(f"{prompt.name}: {answer.error}")
                elif answer.tokens != right.tokens:
                    control.differing += 1
            steps.step(len(group))
    await stack.wait_idle()
    control.nbytes = (await daemon_counts(stack.client, stack.daemons["decode"])).fetched
    return control


# --- asking and counting --------------------------------------------------------------------


async def _ask(stack: Stack, group: list[Prompt], salt: str) -> list[Answer]:
    stack.check_alive()
    return await asyncio.gather(
        *(
            stack.client.complete(stack.router_url, prompt.body(MODEL, OUTPUT_TOKENS, salt))
            for prompt in group
        )
    )


async def _one_by_one(stack: Stack, url: str, body: dict[str, Any], n: int) -> Answer:
    """`n` answers by as many requests, so that none finds the blocks of another."""
    if n == 1:
        return await stack.client.complete(url, body)
    whole = Answer()
    for i in range(n):
        one = {**body, "n": 1, "cache_salt": f"{body['cache_salt']}-{i}"}
        answer = await stack.client.complete(url, one)
        whole.tokens += answer.tokens
        whole.error = whole.error or answer.error
    return whole


def records_by_answer(
    records: list[dict[str, Any]], group: list[Prompt], names: list[str] | None
) -> list[list[dict[str, Any]]]:
    """The daemon's records of fetches since a group of prompts was sent, for each of them.

    `names`: the answers' ids, which transfers are named by. None where the router makes up others
    (vllm-router for Mooncake's schema): prompts sent at once are then told apart by their lengths.
    """
    if names is not None:
        # Mooncake's proxy puts a prefix of its own before the id that both engines know.
        ids = [name.removeprefix("cmpl-") for name in names]
        return [[r for r in records if i and i in str(r.get("transfer_id"))] for i in ids]
    if len(group) == 1:
        return [records]
    return [[r for r in records if int(r["tokens"]) == prompt.tokens] for prompt in group]


def _seen(records: list[dict[str, Any]], answer: Answer, local_hits: int) -> Seen:
    return Seen(
        answer,
        local_hits,
        len(records),
        sum(int(record["tokens"]) for record in records),
        sum(int(record["nbytes"]) for record in records),
        max((float(record["seconds"]) for record in records), default=0.0) * 1e3,
        sum(int(record["early_bytes"]) for record in records),
    )


def _row(prompt: Prompt, alone: Answer, seen: Seen) -> Row:
    return Row(
        name=prompt.name,
        length=prompt.tokens,
        n=prompt.n,
        expected_hits=prompt.hits,
        alone=alone.tokens,
        paired=seen.answer.tokens,
        local_hits=seen.local_hits,
        fetches=seen.fetches,
        fetched_tokens=seen.tokens,
        nbytes=seen.nbytes,
        early_nbytes=seen.early,
        transfer_ms=seen.transfer_ms,
        ttft_ms=seen.answer.ttft_s * 1e3,
        error=seen.answer.error,
    )


async def _daemons(stack: Stack) -> Mapping[str, DaemonCounts]:
    return {
        name: await daemon_counts(stack.client, daemon) for name, daemon in stack.daemons.items()
    }


async def _settled(
    stack: Stack, before: Mapping[str, DaemonCounts], expected: int
) -> tuple[int, int]:
    """Bytes that decode's daemon fetched and prefill's daemon served since `before`.

    The producer counts a fetch when the consumer has closed it, which may be after the answer.
    """
    fetched = served = 0

    async def same() -> bool:
        nonlocal fetched, served
        now = await _daemons(stack)
        fetched = (now["decode"] - before["decode"]).fetched
        served = (now["prefill"] - before["prefill"]).served
        return fetched == served == expected

    try:
        await until(same, SETTLE_S, "the daemons' counters agree", every=0.1)
    except DemoError:
        stack.check_alive()
    return fetched, served


def _groups(asked: list[Prompt]) -> list[list[Prompt]]:
    """Prompts in the order in which they are sent; each list is sent at once."""
    groups: list[list[Prompt]] = []
    for prompt in asked:
        if prompt.together is not None and groups and groups[-1][0].together == prompt.together:
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups


def _with(
    groups: Iterable[list[Prompt]], answers: Iterable[Answer]
) -> Iterable[tuple[list[Prompt], list[Answer]]]:
    rest = iter(answers)
    return [(group, list(itertools.islice(rest, len(group)))) for group in groups]
