"""Packing of block tables, and that a step's jobs survive vLLM's own transport."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_shim.jobs import FetchJob, StepJobs, pack_blocks, pack_u32, unpack_u32
from kvd.protocol.types import NULL_BLOCK


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_round_trips(values: list[int]) -> None:
    assert unpack_u32(pack_u32(values)) == values
    assert len(pack_u32(values)) == 4 * len(values)


def test_packing_is_little_endian_and_nothing_is_null() -> None:
    assert pack_u32([1, 2**31]) == b"\1\0\0\0\0\0\0\x80"
    assert unpack_u32(pack_blocks([3, None, 4])) == [3, NULL_BLOCK, 4]


@pytest.mark.parametrize("value", [-1, 2**32])
def test_what_does_not_fit_is_told(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


def test_half_a_number_is_told() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"abc")


def test_jobs_can_be_copied_by_their_state() -> None:
    """vLLM serialises them between its processes; slots and frozen fields are not in the way."""
    ranks = (((0, 0), ("h", 1)),)
    job = FetchJob("r", "f", "t", None, "e", ranks, 0, 16, (b"\1\0\0\0",), bytes(16))
    jobs = StepJobs(seq=3, fetches=(job,), cancels=("x",))
    assert copy.deepcopy(jobs) == jobs
