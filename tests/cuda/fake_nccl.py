"""NCCL for tests, with the signatures of `nccl.bindings.nccl`: bytes go through a Unix socket.

A unique id names an abstract socket on which its maker listens. Sends and receives are work on
the streams of a `FakeDriver`, and end when the other side has done its part, or when the
communicator is revoked or aborted. A peer that is gone is not noticed: what waits for it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import nccl.bindings.nccl as real

from tests.cuda.fake_driver import FakeDriver
from tests.cuda.script import Fail, Late, Script

PREFIX = b"\0kvd-fake-nccl-"
_ids = itertools.count(1)
_listeners: dict[bytes, socket.socket] = {}


class Comm:
    """`state`: what comm_get_async_error says, once it is not in progress any more."""

    def __init__(self, rank: int, name: bytes) -> None:
        self.rank = rank
        self.name = name
        self.sock: socket.socket | None = None
        self.stopped = False
        self.freed = False
        self.looks = 0


class FakeNccl:
    """One process's library; `driver` has the streams. `script` as for the driver. `gate()` is
    called for each send when half of its bytes are gone; the rest waits until what it returned is
    true."""

    def __init__(self, driver: FakeDriver, *, version: int = 23_203) -> None:
        self.driver = driver
        self.version = version
        self.script = Script()
        self.gate: Callable[[], Callable[[], bool]] | None = None
        self.live: Counter[str] = Counter()
        self.transferred: list[tuple[str, int]] = []
        self.comms: list[Comm] = []
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name[:1].islower():
            raise AttributeError(name)  # a call that is not faked must not reach the real library
        return getattr(real, name)

    def get_version(self) -> int:
        self._enter("get_version")
        return self.version

    def get_unique_id(self) -> Any:
        self._enter("get_unique_id")
        name = PREFIX + f"{os.getpid()}-{next(_ids)}".encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(1)
        listener.setblocking(False)
        _listeners[name] = listener
        return name.ljust(128, b"\0")

    def comm_init_rank_scalable(
        self, nranks: int, myrank: int, n_id: int, comm_ids: Any, config: Any
    ) -> Any:
        assert nranks == 2
        assert n_id == 1
        assert isinstance(comm_ids, bytearray), "the real one takes a writable buffer only"
        given = real.Config.from_ptr(config)
        assert given.blocking == 0
        comm = Comm(myrank, PREFIX + bytes(comm_ids)[len(PREFIX) :].rstrip(b"\0"))
        self.live["comm"] += 1
        self.comms.append(comm)
        try:
            self._enter("comm_init_rank_scalable", comm)
        except BaseException:
            self._free(comm)
            raise
        return comm

    def comm_get_async_error(self, comm: Comm) -> int:
        behaviour = self._enter("comm_get_async_error", comm)
        if isinstance(behaviour, Late):
            comm.looks = behaviour.looks
        if comm.looks:
            comm.looks -= 1
            return int(real.Result.InProgress)
        if comm.sock is None and not comm.stopped:
            self._meet(comm)
            if comm.sock is None:
                return int(real.Result.InProgress)
        return int(real.Result.Success)

    def send(
        self, sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int
    ) -> None:
        self._transfer("send", sendbuff, count, datatype, peer, comm, stream)

    def recv(
        self, recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int
    ) -> None:
        self._transfer("recv", recvbuff, count, datatype, peer, comm, stream)

    def _transfer(
        self, what: str, buff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int
    ) -> None:
        behaviour = self._enter(what, comm)
        looks = behaviour.looks if isinstance(behaviour, Late) else 0
        assert datatype == int(real.DataType.Uint8)
        assert peer == 1 - comm.rank
        done = 0
        stop = count // 2 if what == "send" and self.gate is not None else count
        may_go: Callable[[], bool] | None = None

        def op() -> bool:
            nonlocal done, looks, stop, may_go
            if looks and not comm.stopped:
                looks -= 1
                return False
            while not comm.stopped and done < count:
                if done == stop:
                    may_go = may_go or (self.gate() if self.gate is not None else lambda: True)
                    if not may_go():
                        return False
                    stop = count
                part = (ctypes.c_char * (stop - done)).from_address(self.driver._host(buff + done))
                sock = self._sock(comm)
                try:
                    moved = sock.send(part) if what == "send" else sock.recv_into(part)
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    return False
                if not moved:
                    return False  # the peer is gone, and nobody says so
                done += moved
            self.transferred.append((what, done))
            return True

        self._push(stream, op)

    def comm_revoke(self, comm: Comm, revoke_flags: int) -> None:
        assert revoke_flags == 0
        self._enter("comm_revoke", comm)
        comm.stopped = True

    def comm_destroy(self, comm: Comm) -> None:
        self._enter("comm_destroy", comm)
        self._free(comm)

    def comm_abort(self, comm: Comm) -> None:
        self._enter("comm_abort", comm)
        self._free(comm)

    def bury(self) -> None:
        """Frees what was not freed, as the end of a process does."""
        for comm in self.comms:
            if not comm.freed:
                self._free(comm)

    # --- inside --------------------------------------------------------------------------------

    def _enter(self, call: str, comm: Comm | None = None) -> Any:
        assert comm is None or not comm.freed, f"{call} on a communicator that is gone"
        behaviour = self.script.enter(call)
        if isinstance(behaviour, Fail):
            raise real.NCCLError(int(real.Result[behaviour.error]))
        return behaviour

    def _push(self, stream: int, op: Any) -> None:
        assert isinstance(stream, int)
        with self.driver._lock:
            self.driver._streams[stream].push(op)

    def _sock(self, comm: Comm) -> socket.socket:
        if comm.sock is None:
            raise BlockingIOError
        return comm.sock

    def _meet(self, comm: Comm) -> None:
        with self._lock, contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            if comm.rank == 0:
                listener = _listeners[comm.name]
                sock, _ = listener.accept()
                listener.close()
                del _listeners[comm.name]
            else:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.connect(comm.name)
                except OSError:
                    sock.close()
                    raise
            sock.setblocking(False)
            comm.sock = sock

    def _free(self, comm: Comm) -> None:
        with self._lock:
            assert not comm.freed, "a communicator was freed twice"
            comm.freed = comm.stopped = True
            self.live["comm"] -= 1
            listener = _listeners.pop(comm.name, None) if comm.rank == 0 else None
            for one in (comm.sock, listener):
                if one is not None:
                    one.close()
