"""A TCP proxy on loopback that loses connections, holds bytes back and refuses: a bad network.

It listens on another loopback address than the daemon behind it, on the same port numbers, so
that control and data connections go through it alike. It lives on a thread of the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STEP_BYTES = 64 * 1024
CALL_TIMEOUT_S = 10.0


class LossyProxy:
    """Forwards `listen_host:port` to `target_host:port` for each port."""

    def __init__(self, listen_host: str, target_host: str, ports: list[int]) -> None:
        self.host = listen_host
        self.target = target_host
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._refusing = False
        self.connections = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        try:
            self._call(self._listen(ports))
        except BaseException:
            self.close()
            raise

    # --- from the driver's thread ---------------------------------------------------------------

    def stall(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._call(self._set(open_=False, refusing=False))

    def refuse(self) -> None:
        """Cuts what there is, and new connections at once."""
        self._call(self._set(open_=True, refusing=True))
        self.cut()

    def heal(self) -> None:
        self._call(self._set(open_=True, refusing=False))

    def cut(self) -> int:
        """Resets every connection wherever it is; returns how many there were."""
        return self._call(self._cut())

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    # --- on the proxy's own ---------------------------------------------------------------------

    async def _listen(self, ports: list[int]) -> None:
        self._open.set()
        for port in ports:

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                await self._accept(reader, writer, port)

            self._servers.append(await asyncio.start_server(accept, self.host, port))

    async def _set(self, *, open_: bool, refusing: bool) -> None:
        self._refusing = refusing
        if open_:
            self._open.set()
        else:
            self._open.clear()

    async def _cut(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return len(writers) // 2

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        back: asyncio.StreamWriter | None = None
        try:
            if self._refusing:
                return
            await self._open.wait()
            answers, back = await asyncio.open_connection(self.target, port)
            self._writers.add(back)
            self.connections += 1
            await asyncio.gather(self._pump(reader, back), self._pump(answers, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the other end sees its connection end
        finally:
            for one in (writer, back):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(STEP_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
