"""The consumer's end of `tcp`: jobs are received straight into our own engine's blocks."""

from __future__ import annotations

import asyncio

from kvd.memory.engine import EngineMemory
from kvd.transport.base import PullJob
from kvd.transport.jobs import check_job, check_writable
from kvd.transport.options import TransportOptions
from kvd.transport.pulse import Pulse
from kvd.transport.tcp_jobs import Queue
from kvd.transport.tcp_socket import check_congestion
from kvd.transport.tcp_stream import Group, Stream


class TcpPuller:
    """One attachment over `tcp_streams` connections, which are made when the first job comes.

    `host` is an address in numbers; `remote_blocks` how many blocks the producer engine has.
    """

    def __init__(
        self,
        local: EngineMemory,
        host: str,
        port: int,
        remote_blocks: int,
        options: TransportOptions,
        pulse: Pulse | None = None,
    ) -> None:
        """Raises TransportError."""
        check_writable(local)
        check_congestion(options.tcp_congestion)
        self.local = local
        self._remote_blocks = remote_blocks
        self._queue = Queue(local, options.tcp_streams, checked=options.checked)
        group = Group(host, port, options, pulse or Pulse())
        self._streams = [
            Stream(self._queue, group, f"kvd-data-pull-{i}") for i in range(options.tcp_streams)
        ]

    async def pull(self, job: PullJob) -> int:
        """See `Puller.pull`. The fence is checked by the producer, before it sends COMMIT."""
        pieces = check_job(job, self.local, self._remote_blocks)
        return await self._queue.submit(job, pieces).outcome.wait()

    def stop(self, fetch_id: str) -> None:
        """See `Puller.stop`."""
        self._queue.stop(fetch_id)

    async def aclose(self) -> None:
        """See `Puller.aclose`."""
        jobs = self._queue.close()
        for stream in self._streams:
            stream.shut()
        await asyncio.gather(*(job.outcome.wait() for job in jobs), return_exceptions=True)
        await asyncio.to_thread(self._join)

    def statistics(self) -> dict[str, int]:
        """late_bytes (came after their fetch was stopped, and were drained), connects."""
        return {
            "late_bytes": self._queue.late_bytes,
            "connects": sum(stream.connects for stream in self._streams),
        }

    def _join(self) -> None:
        for stream in self._streams:
            stream.thread.join()
