"""Which transports can work between two memories."""

from __future__ import annotations

import pytest

from kvd.core.choice import reasons, unusable

ONE, TWO = "GPU-1", "GPU-2"


@pytest.mark.parametrize(
    ("transport", "ours", "theirs", "same_host", "why"),
    [
        ("shm", "cpu", "cpu", True, ""),
        ("shm", "cpu", "cpu", False, "on another host"),
        ("shm", ONE, ONE, True, "in memory of a GPU"),
        ("shm", "cpu", ONE, True, "in memory of a GPU"),
        ("tcp", "cpu", "cpu", False, ""),
        ("tcp", ONE, TWO, False, ""),
        ("tcp", ONE, ONE, True, ""),
        ("cuda_ipc", ONE, ONE, True, ""),
        ("cuda_ipc", ONE, TWO, True, ""),
        ("cuda_ipc", ONE, TWO, False, "on another host"),
        ("cuda_ipc", "cpu", "cpu", True, "not in memory of a GPU"),
        ("cuda_ipc", ONE, "cpu", True, "not in memory of a GPU"),
        ("nccl", ONE, TWO, True, ""),
        ("nccl", ONE, TWO, False, ""),
        ("nccl", ONE, ONE, True, "both engines are on one GPU"),
        ("nccl", ONE, ONE, False, "both engines are on one GPU"),
        ("nccl", "cpu", ONE, False, "not in memory of a GPU"),
    ],
)
def test_what_works_between_whom(
    transport: str, ours: str, theirs: str, same_host: bool, why: str
) -> None:
    for a, b in ((ours, theirs), (theirs, ours)):
        found = unusable(transport, ours=a, theirs=b, same_host=same_host)
        assert (why in found) if why else found == ""


def test_before_the_other_side_is_known_only_our_own_counts() -> None:
    assert unusable("nccl", ours=ONE, theirs=None, same_host=False) == ""
    assert unusable("nccl", ours="cpu", theirs=None, same_host=False) != ""
    assert unusable("shm", ours="cpu", theirs=None, same_host=True) == ""
    assert unusable("cuda_ipc", ours=ONE, theirs=None, same_host=False) != ""


def test_reasons_are_written_beside_the_names() -> None:
    assert reasons(["nccl", "tcp"], {"nccl": "why not", "tcp": ""}) == "nccl (why not), tcp"
