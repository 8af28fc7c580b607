"""One of two ranks of NCCL, in a process of its own: kvd's communicator without daemons.

Arguments: rank, GPU, bytes, times. Rank 0 prints the unique id as its first line, rank 1 reads it
from stdin. Each prints one JSON object at its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np

from kvd.memory.cuda.device import open_gpu
from kvd.memory.cuda.staging import PinnedStager
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.nccl_comm import CONSUMER, Comm
from kvd.transport.nccl_lib import load_nccl
from kvd.transport.options import TransportOptions
from tests.gpu.engine import install_fakes_if_asked


async def run(rank: int, device: int, nbytes: int, times: int) -> dict[str, object]:
    gpu, lib = open_gpu(f"cuda:{device}"), load_nccl()
    if rank == CONSUMER:
        unique_id = lib.unique_id()
        print(unique_id.hex(), flush=True)
    else:
        unique_id = bytes.fromhex(sys.stdin.readline().strip())
    lost: list[str] = []
    options = TransportOptions(nccl_init_timeout_s=60, data_timeout_s=30)
    copier = GpuThread(gpu, "kvd-gpu", lambda error: lost.append(error.detail))
    comm = Comm(
        gpu,
        lib,
        options,
        f"r{rank}",
        copier=copier,
        on_lost=lost.append,
        on_abandoned=lambda: lost.append("hung"),
    )
    began = time.monotonic()
    await comm.start(rank, unique_id, nbytes, 1)
    up = time.monotonic() - began
    slot = comm.slots[0]
    stager = PinnedStager(gpu)
    whole = np.array([[slot, nbytes]], np.uint64)
    wrong = 0
    took = []
    for i in range(times):
        if rank == CONSUMER:
            began = time.monotonic()
            await comm.recv(slot, nbytes, lambda: None)
            took.append(time.monotonic() - began)
            stager.take(whole)
            wrong += int((stager.room(nbytes) != pattern(i, nbytes)).sum())
        else:
            stager.room(nbytes)[:] = pattern(i, nbytes)
            stager.put(whole)
            await comm.send(slot, nbytes)
    stager.close()
    await comm.end()
    copier.close(5)
    return {"wrong": wrong, "up_s": up, "seconds": min(took, default=0.0), "lost": lost}


def pattern(turn: int, nbytes: int) -> np.ndarray:
    return ((np.arange(nbytes) * (turn + 3)) % 251).astype(np.uint8)


if __name__ == "__main__":
    install_fakes_if_asked()
    print(json.dumps(asyncio.run(run(*(int(one) for one in sys.argv[1:])))))
