"""Pinned host memory between a GPU and a socket. Each thread that uses it has its own."""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import CudaError
from kvd.memory.cuda.plan import Copies, batches, enqueue, gather, scatter
from kvd.memory.host import Bytes
from kvd.protocol.codes import Code

Stretches = NDArray[np.uint64]
MAX_NBYTES = 256 * 2**20
"""Of one buffer: a block of a group's layers, or the piece that a job is cut into."""
BATCH_BYTES = 16 * 2**20
BATCH_COPIES = 4096
POLL_S = 50e-6


class PinnedStager:
    """Its methods wait for the GPU: copies have ended, well or not, when they return."""

    def __init__(self, gpu: Gpu) -> None:
        """Raises CudaError."""
        self._gpu = gpu
        gpu.bind()
        self._stream = gpu.driver.stream_create()
        self._event: Any = None
        self._address = 0
        self._nbytes = 0
        try:
            self._event = gpu.driver.event_create()
        except CudaError:
            self.close()
            raise

    def room(self, nbytes: int) -> Bytes:
        """The first `nbytes` bytes of the buffer, which holds nothing any more.

        Valid until the next call of `room` or `take`. Raises MemoryRefused, CudaError.
        """
        if nbytes > MAX_NBYTES:
            raise MemoryRefused(
                f"{nbytes} bytes at once, at most {MAX_NBYTES} can be staged", Code.NO_SPACE
            )
        if nbytes > self._nbytes:
            self._drop()
            self._address = self._gpu.driver.host_alloc(nbytes)
            self._nbytes = nbytes
        raw = (ctypes.c_uint8 * nbytes).from_address(self._address)
        return np.ctypeslib.as_array(raw)

    def take(self, stretches: Stretches) -> Stretches:
        """Copies device memory into the buffer; where it lies there. Raises as `room`."""
        nbytes = int(stretches[:, 1].sum())
        self.room(nbytes)
        self._copy(gather(stretches, self._address))
        return np.array([[self._address, nbytes]], np.uint64)

    def put(self, stretches: Stretches) -> None:
        """Copies the buffer's first bytes to device memory. Raises CudaError."""
        self._copy(scatter(stretches, self._address))

    def close(self) -> None:
        """Gives everything back."""
        with contextlib.suppress(CudaError):
            self._drop()
        driver = self._gpu.driver
        event, self._event = self._event, None
        stream, self._stream = self._stream, None
        for destroy, one in ((driver.event_destroy, event), (driver.stream_destroy, stream)):
            if one is not None:
                with contextlib.suppress(CudaError):
                    destroy(one)

    def _copy(self, copies: Copies) -> None:
        driver = self._gpu.driver
        failure: CudaError | None = None
        with self._gpu.waiting():
            try:
                for part in batches(copies.merged(), BATCH_BYTES, BATCH_COPIES):
                    enqueue(driver, part, self._stream)
            except CudaError as exc:
                failure = exc  # what was put on the stream before it still runs
            driver.event_record(self._event, self._stream)
            while not driver.event_done(self._event):
                time.sleep(POLL_S)
        if failure is not None:
            raise failure

    def _drop(self) -> None:
        address, self._address, self._nbytes = self._address, 0, 0
        if address:
            self._gpu.driver.host_free(address)
