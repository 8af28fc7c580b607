"""Which transports can work between two memories: rules that no setting overrules."""

from __future__ import annotations

from kvd.core.sessions import Memory

CPU = "cpu"
SAME_HOST = ("shm", "cuda_ipc")
"""Transports that map the other side's memory: one host only, and only with a fence table."""


def device_of(memory: Memory) -> str:
    """ "cpu", or the UUID of the GPU."""
    return memory.segments[0].device if memory.segments else CPU


def unusable(transport: str, *, ours: str, theirs: str | None, same_host: bool) -> str:
    """Why a transport cannot work between memory on two devices; "" if it can.

    `theirs` is None where only our own side is known yet.
    """
    if transport in SAME_HOST and not same_host:
        return "the other daemon is on another host, or has no link to this one"
    on_gpu = [ours != CPU] if theirs is None else [ours != CPU, theirs != CPU]
    match transport:
        case "shm" if any(on_gpu):
            return "the KV cache is in memory of a GPU"
        case "cuda_ipc" | "nccl" if not all(on_gpu):
            return "a KV cache is not in memory of a GPU"
        case "nccl" if ours == theirs:
            return "both engines are on one GPU, where NCCL has no use: cuda_ipc or tcp does it"
        case _:
            return ""


def reasons(transports: list[str] | tuple[str, ...], why: dict[str, str]) -> str:
    """ "nccl (why not), tcp" """
    return ", ".join(f"{name} ({why[name]})" if why.get(name) else name for name in transports)
