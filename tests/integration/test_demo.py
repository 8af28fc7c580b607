"""`kvd demo`: its conditions on made-up numbers, and its clean-up.

test_daemon_death.py has the demo as a whole, since it goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvd.core.instructions import Piece
from kvd.demo import main as demo_main
from kvd.demo import stack
from kvd.demo.client import Answer, Client
from kvd.demo.damage import install
from kvd.demo.model import ModelShape, write_model
from kvd.demo.processes import shared_memory_of
from kvd.demo.prompts import Prompt, prompts
from kvd.demo.report import as_json, passed, show
from kvd.demo.results import Control, Results, Row, checks
from kvd.demo.run import records_by_answer
from kvd.memory.engine import EngineMemory
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import LayerLayout, Region
from kvd.transport.base import PullJob
from tests.conftest import wait_for
from tests.integration.demo_stack import Demo
from tests.plugins.processes import runs

BLOCK = 32
BLOCK_NBYTES = ModelShape().kv_block_nbytes(BLOCK)


def row(name: str, length: int, *, hits: int = 0, n: int = 1) -> Row:
    """A row in which everything is as it should be."""
    answers = [[(7 * i + j) % 256 for j in range(24)] for i in range(n)]
    blocks = n * -(-length // BLOCK) - hits // BLOCK
    return Row(
        name,
        length,
        n,
        hits,
        answers,
        [list(answer) for answer in answers],
        local_hits=hits,
        fetches=n,
        fetched_tokens=n * length - hits,
        nbytes=blocks * BLOCK_NBYTES,
    )


def good() -> Results:
    """Results that pass."""
    rows = [row(f"row {i}", 20 + 30 * i) for i in range(9)]
    rows += [row("prefix", 100, hits=64), row("two", 70, n=2)]
    nbytes = sum(r.nbytes for r in rows)
    return Results(
        transport="shm",
        block_size=BLOCK,
        block_nbytes=BLOCK_NBYTES,
        rows=rows,
        control=Control(answers=11, differing=11, nbytes=nbytes),
        external_hits=sum(r.fetched_tokens for r in rows),
        fetched_bytes=nbytes,
        served_bytes=nbytes,
        alone_hits=0,
        transports_used=["shm"],
    )


def failed(results: Results) -> set[str]:
    return {check.name for check in checks(results) if not check.ok}


def test_good_results_pass() -> None:
    assert failed(good()) == set()
    assert passed(checks(good()))


def nothing_moved(r: Results) -> None:
    """Decode prefilled everything by itself: all answers are right, and no byte moved."""
    for each in r.rows:
        each.fetches = each.fetched_tokens = each.nbytes = 0
    r.external_hits = r.fetched_bytes = r.served_bytes = 0
    r.transports_used = []


def one_token_differs(r: Results) -> None:
    r.rows[3].paired[0][17] += 1


def an_answer_is_short(r: Results) -> None:
    r.rows[3].paired[0].pop()


def second_answer_differs(r: Results) -> None:
    r.rows[-1].paired[1][0] += 1


def both_answered_nothing(r: Results) -> None:
    r.rows[0].alone = r.rows[0].paired = [[]]


def a_row_failed(r: Results) -> None:
    r.rows[2].error = "HTTP 500"


def control_is_identical(r: Results) -> None:
    r.control.differing = 0


def control_differs_in_half(r: Results) -> None:
    r.control = dataclasses.replace(r.control, answers=12, differing=6)


def control_was_not_run(r: Results) -> None:
    r.control = Control()


def control_moved_nothing(r: Results) -> None:
    r.control.nbytes = 0


def control_failed_instead(r: Results) -> None:
    r.control.errors.append("row 1: HTTP 500")


def too_few_tokens_in_a_row(r: Results) -> None:
    r.rows[5].fetched_tokens -= 1


def vllm_counts_other_tokens(r: Results) -> None:
    r.external_hits += 1


def consumer_counts_other_bytes(r: Results) -> None:
    r.fetched_bytes -= BLOCK_NBYTES


def producer_counts_other_bytes(r: Results) -> None:
    r.served_bytes += BLOCK_NBYTES


def all_count_the_same_wrong_bytes(r: Results) -> None:
    r.rows[0].nbytes += BLOCK_NBYTES
    r.fetched_bytes += BLOCK_NBYTES
    r.served_bytes += BLOCK_NBYTES


def decode_used_no_prefix(r: Results) -> None:
    prefix = r.rows[-2]
    again = row(prefix.name, prefix.length)
    moved = again.nbytes - prefix.nbytes
    again.expected_hits = prefix.expected_hits
    r.rows[-2] = again
    r.external_hits += 64
    r.fetched_bytes += moved
    r.served_bytes += moved


def alone_was_helped(r: Results) -> None:
    r.alone_hits = 32


def other_transport(r: Results) -> None:
    r.transports_used = ["tcp"]


def few_rows(r: Results) -> None:
    gone = r.rows[:4]
    del r.rows[:4]
    r.external_hits -= sum(g.fetched_tokens for g in gone)
    r.fetched_bytes -= sum(g.nbytes for g in gone)
    r.served_bytes = r.fetched_bytes


def short_answers(r: Results) -> None:
    r.rows[0].alone[0] = r.rows[0].paired[0] = [1] * 15


IDENTICAL = "identical answers"
CONTROL = "the comparison can fail"
TOKENS = "fetched = prompt - what decode held"
VLLM = "vLLM counts the same tokens"
BYTES = "both daemons count the same bytes"


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (nothing_moved, {TOKENS, VLLM, BYTES, "the transport that was asked for"}),
        (one_token_differs, {IDENTICAL}),
        (an_answer_is_short, {IDENTICAL}),
        (second_answer_differs, {IDENTICAL}),
        (both_answered_nothing, {IDENTICAL, "enough was asked"}),
        (a_row_failed, {IDENTICAL}),
        (control_is_identical, {CONTROL}),
        (control_differs_in_half, {CONTROL}),
        (control_was_not_run, {CONTROL}),
        (control_moved_nothing, {CONTROL}),
        (control_failed_instead, {CONTROL}),
        (too_few_tokens_in_a_row, {TOKENS, VLLM}),
        (vllm_counts_other_tokens, {VLLM}),
        (consumer_counts_other_bytes, {BYTES}),
        (producer_counts_other_bytes, {BYTES}),
        (all_count_the_same_wrong_bytes, {BYTES}),
        (decode_used_no_prefix, {"decode's own cache was used"}),
        (alone_was_helped, {"the engine alone computed everything itself"}),
        (other_transport, {"the transport that was asked for"}),
        (few_rows, {"enough was asked"}),
        (short_answers, {"enough was asked"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_condition_can_fail(spoil: Callable[[Results], None], names: set[str]) -> None:
    results = good()
    spoil(results)
    assert failed(results) == names
    assert not passed(checks(results))
    assert json.loads(as_json(results, 1.0))["ok"] is False


def test_no_rows_never_pass() -> None:
    results = good()
    results.rows = []
    assert {IDENTICAL, TOKENS, VLLM, BYTES, "enough was asked"} <= failed(results)


def test_records_find_their_answers() -> None:
    a, b = Prompt("a", "x" * 5), Prompt("b", "x" * 7)
    records: list[dict[str, Any]] = [
        {"transfer_id": "cmpl-___1", "tokens": 7},
        {"transfer_id": "xfer-2", "tokens": 5},
    ]
    first, second = records
    assert records_by_answer(records, [a, b], ["cmpl-2", "cmpl-___1"]) == [[second], [first]]
    assert records_by_answer(records, [a, b], ["", "other"]) == [[], []]
    # With names that the router made up, by length, and all where only one prompt was sent.
    assert records_by_answer(records, [a, b], None) == [[second], [first]]
    assert records_by_answer(records, [b], None) == [records]


def test_first_difference_is_named() -> None:
    results = good()
    one_token_differs(results)
    assert results.rows[3].difference == (0, 17)
    detail = next(c.detail for c in checks(results) if c.name == IDENTICAL)
    assert detail == "row 3: token 17 of answer 0 differs"


def test_table_fits_in_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    results = good()
    one_token_differs(results)
    console = Console(width=100, force_terminal=False)
    show(console, results, 12.0)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "FAILED: 1 of 9 conditions do not hold" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["NO" in line for line in lines if line[:1] == ["row"]] == [False] * 3 + [True] + [
        False
    ] * 5


# --- what is asked --------------------------------------------------------------------------


def test_prompts_have_the_shapes_that_they_should() -> None:
    chunk = 4 * BLOCK
    asked = prompts(BLOCK, chunk)
    by_name = {prompt.name: prompt for prompt in asked}
    assert len(asked) >= 10
    assert by_name["shorter than one block"].tokens < BLOCK
    assert by_name["exactly one block"].tokens == BLOCK
    assert by_name["several blocks, last partial"].tokens > 2 * BLOCK
    assert by_name["several blocks, last partial"].tokens % BLOCK
    assert by_name["several prefill chunks"].tokens > 3 * chunk
    shared = by_name["same start as the row above"].hits
    assert shared is not None
    assert (
        by_name["same start as the row above"].text[:shared]
        == by_name["several prefill chunks"].text[:shared]
    )
    assert 0 < shared < by_name["same start as the row above"].tokens
    assert by_name["sent twice: the first time"].text == by_name["sent twice: the second time"].text
    assert (
        by_name["sent twice: the second time"].hits
        == by_name["sent twice: the second time"].tokens // BLOCK * BLOCK
    )
    assert by_name["two answers (n=2)"].n == 2
    assert sum(prompt.together is not None for prompt in asked) == 4
    # No other two share a first block, or decode would hold what it must not hold.
    firsts = [prompt.text[:BLOCK] for prompt in asked if not prompt.hits]
    assert len(set(firsts)) == len(firsts)


def test_tokenizer_has_one_token_a_byte(tmp_path: Path) -> None:
    write_model(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == ord("A")
    assert vocabulary["\u0120"] == ord(" ")


def test_model_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_stream_is_read_by_choice() -> None:
    answer = Answer(tokens=[[], []])
    events: list[dict[str, Any]] = [
        {"id": "x", "choices": [{"index": 1, "token_ids": [5, 6]}]},
        {"id": "x", "choices": [{"index": 0, "token_ids": [1]}]},
        {"id": "x", "choices": [{"index": 0, "token_ids": [2], "finish_reason": "length"}]},
        {"id": "x", "choices": []},
    ]
    for event in events:
        Client._event(b"data: " + json.dumps(event).encode() + b"\n", answer, 0.0)
    Client._event(b"data: [DONE]\n", answer, 0.0)
    assert (answer.tokens, answer.error, answer.request_id) == ([[1, 2], [5, 6]], "", "x")
    failed_event = {"id": "x", "choices": [{"index": 0, "finish_reason": "error"}]}
    Client._event(b"data: " + json.dumps(failed_event).encode(), answer, 0.0)
    assert answer.error == "finished with 'error'"


# --- damage ---------------------------------------------------------------------------------


async def test_damage_is_one_block_of_one_layer_once_a_fetch(tmp_path: Path) -> None:
    """Four layers of eight blocks of 64 bytes; a job that pulls blocks 5 and 2 of all layers."""
    num_layers, num_blocks, nbytes = 4, 8, 64
    size = num_layers * num_blocks * nbytes
    fd = os.memfd_create("kvd-demo-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    kept = os.dup(fd)
    layers = [
        LayerLayout(f"layer.{i}", 0, [Region(0, i * num_blocks * nbytes, nbytes, nbytes)])
        for i in range(num_layers)
    ]
    memory = EngineMemory.open(
        segments=[(SegmentInfo(0, "memfd", size, "cpu"), fd)],
        layers=layers,
        num_blocks=num_blocks,
        fence=None,
        writable=True,
    )
    try:
        blocks = np.array([5, 2], "<u4").tobytes()
        piece = Piece(0, 0, num_layers, np.array([0, 1], "<u4").tobytes(), blocks, blocks)

        class Puller:
            local = memory

            async def pull(self, job: PullJob) -> int:
                return job.nbytes

        install([Puller])
        puller = Puller()
        for fetch_id in ("a", "a", "b", "c"):
            job = PullJob(1, fetch_id, bytes(16), 0, 1, (piece,), num_layers * 2 * nbytes)
            assert await puller.pull(job) == job.nbytes
        found = np.frombuffer(os.pread(kept, size, 0), np.uint8).reshape(
            num_layers, num_blocks, nbytes
        )
        # Three fetches turned the same bits over: as if once.
        expected = np.zeros_like(found)
        expected[2, 5] = 0x80
        assert np.array_equal(found, expected)
    finally:
        os.close(kept)
        memory.close_when_unpinned()
        assert await memory.wait_closed(10)


# --- Ctrl-C ---------------------------------------------------------------------------------


def test_a_bad_setting_is_refused_before_anything_starts(
    tmp_run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo_main(["--config", "transport=pigeon"]) == 78
    assert "transport" in capsys.readouterr().err
    assert demo_main(["--config", "socket=/tmp/x"]) == 78
    assert "the demo chooses this itself" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("kvd demo", signal.SIGINT),
        ("two daemons are up", signal.SIGINT),
        ("starting the engine core", signal.SIGTERM),
    ],
    ids=["at once", "with daemons", "with engines"],
)
def test_ctrl_c_leaves_nothing(tmp_run_dir: Path, moment: str, number: signal.Signals) -> None:
    demo = Demo(tmp_run_dir)
    try:
        wait_for(lambda: moment in demo.told.read_text(), 300, what=moment)
        processes = demo.processes()
        shared = {name for p in processes for name in shared_memory_of(p.pid)}
        demo.popen.send_signal(number)
        assert demo.popen.wait(90) == 130
    finally:
        demo.kill()
    assert [p for p in processes if runs(p)] == []
    assert [name for name in shared if Path("/dev/shm", name).exists()] == []
    assert sorted(p.name for p in tmp_run_dir.iterdir()) == ["report.json", "told.txt"]


def test_what_is_missing_is_named_first(
    tmp_run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_run_dir))
    monkeypatch.setattr(stack, "NEEDED", {"no_such_module": "made up for this test"})
    assert demo_main(["--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "ok": False,
        "error": "no_such_module is not installed (made up for this test)",
    }
    assert "made up for this test" in err
    assert list(tmp_run_dir.iterdir()) == []
