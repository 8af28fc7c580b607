"""One data connection's bytes: as they are, or inside TLS.

Both kinds raise an OSError that `would_block` knows when nothing moved for a tick, and both move
bytes between the network and the engine's blocks without staging them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvd.errors import ConfigError
from kvd.transport import iov
from kvd.transport.tcp_socket import TICK_S, Ended, Stalled, shut, wait_ready

RECORD_BYTES = 16 * 1024
"""Most that one TLS record holds. A write that has to be made again must not be longer."""
_Window = ctypes.c_char * RECORD_BYTES


class TlsProblem(OSError):
    """The other end does not speak TLS, or its certificate is not of our authority."""


class Channel(Protocol):
    """What both ends of a data connection need of it."""

    def fileno(self) -> int: ...

    def pending(self) -> bool:
        """Whether bytes were taken off the socket that nobody has read yet."""
        ...

    def read(self, view: memoryview) -> int:
        """Reads some bytes; 0 at the end. Raises OSError."""
        ...

    def fill(self, vector: iov.Vector) -> int:
        """Receives some of the vector; 0 at the end. Raises OSError."""
        ...

    def push(self, vector: iov.Vector, flags: int) -> int:
        """Sends some of the vector. Raises OSError."""
        ...

    def send(self, data: bytes) -> int:
        """Sends what can be sent without waiting for long. Raises OSError."""
        ...

    def stale(self) -> bool:
        """Whether a connection on which nothing is under way has ended, or is out of step."""
        ...

    def shut(self) -> None:
        """Wakes whatever thread is in a call; from any thread."""
        ...

    def close(self) -> None: ...


class PlainChannel:
    """The socket as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def pending(self) -> bool:
        return False

    def read(self, view: memoryview) -> int:
        return self._sock.recv_into(view, 0, socket.MSG_WAITALL)

    def fill(self, vector: iov.Vector) -> int:
        return vector.receive(self._sock.fileno(), socket.MSG_WAITALL)

    def push(self, vector: iov.Vector, flags: int) -> int:
        return vector.send(self._sock.fileno(), flags | socket.MSG_NOSIGNAL)

    def send(self, data: bytes) -> int:
        return self._sock.send(data, socket.MSG_DONTWAIT)

    def stale(self) -> bool:
        return _readable(self._sock)

    def shut(self) -> None:
        shut(self._sock)

    def close(self) -> None:
        self._sock.close()


HUNG_UP = "the other end hung up; `kvd doctor` there and here says if a certificate is the reason"


class TlsChannel:
    """TLS over it. Bytes are encrypted from, and decrypted into, the blocks themselves."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        sock.settimeout(TICK_S)

    def fileno(self) -> int:
        return self._sock.fileno()

    def pending(self) -> bool:
        return self._sock.pending() > 0

    def handshake(self, deadline: float, go_on: Callable[[], bool]) -> None:
        """Raises Ended, Stalled, or TlsProblem."""
        while True:
            try:
                self._sock.do_handshake()
                return
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not go_on():
                    raise Ended from None
                if time.monotonic() >= deadline:
                    raise Stalled from None
            except ssl.SSLCertVerificationError as e:
                why = f"its certificate is not accepted: {e.verify_message}"
                raise TlsProblem(errno.EPROTO, why) from None
            except (ssl.SSLError, ConnectionError, EOFError) as e:
                why = f"no TLS connection ({getattr(e, 'reason', '') or type(e).__name__})"
                raise TlsProblem(errno.EPROTO, f"{why}; is tls_cert set there?") from None

    def read(self, view: memoryview) -> int:
        with _plainly():
            return self._sock.recv_into(view)
        return 0

    def fill(self, vector: iov.Vector) -> int:
        return self._move(vector, lambda window, n: self._sock.recv_into(window, n))

    def push(self, vector: iov.Vector, flags: int) -> int:
        done = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            done = self._move(vector, lambda window, n: self._sock.send(memoryview(window)[:n]))
        if not done:
            raise self._hung_up()
        return done

    def send(self, data: bytes) -> int:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), _plainly():
            return self._sock.send(data[:RECORD_BYTES])
        raise self._hung_up()

    def _hung_up(self) -> OSError:
        """What the other end said before it did, which is often that it refuses us."""
        try:
            with _plainly():
                self._sock.recv(1)
        except TlsProblem as e:
            return e
        except OSError:
            pass
        return BrokenPipeError(errno.EPIPE, HUNG_UP)

    def stale(self) -> bool:
        # Nothing comes by itself: there are no session tickets, and TLS 1.3 knows no renegotiation.
        return self.pending() or _readable(self._sock)

    def shut(self) -> None:
        shut(self._sock)

    def close(self) -> None:
        self._sock.close()

    def _move(
        self, vector: iov.Vector, call: Callable[[ctypes.Array[ctypes.c_char], int], int]
    ) -> int:
        """Record after record, for a tick at most, so that a stop never waits for longer."""
        done = 0
        until = time.monotonic() + TICK_S
        while vector.left and done < iov.CALL_BYTES:
            address, nbytes = vector.next_stretch()
            nbytes = min(nbytes, RECORD_BYTES, iov.CALL_BYTES)
            n = 0
            try:
                with _plainly():
                    n = call(_Window.from_address(address), nbytes)
            except BlockingIOError:
                if done:
                    return done
                raise
            if n == 0:
                return done
            vector.advance(n)
            done += n
            if time.monotonic() > until:
                break
        return done


class _plainly(contextlib.AbstractContextManager[None]):
    """What TLS says in its own exceptions, as a socket says it; an end is no exception."""

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, TimeoutError | ssl.SSLWantReadError | ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "nothing moved") from None
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return True
        if isinstance(error, ssl.SSLError):
            raise TlsProblem(errno.EPROTO, f"TLS: {error.reason or error}") from None
        return False


@dataclass(frozen=True, slots=True)
class Tls:
    """Both ends' settings: our own certificate, and the authority that others' must be of."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    def accept(
        self, sock: socket.socket, deadline: float, go_on: Callable[[], bool],
        known: Callable[[Channel], None],
    ) -> TlsChannel:  # fmt: skip
        """Takes over an accepted socket. `known` is told of the channel before it waits. Raises
        Ended, Stalled or TlsProblem."""
        channel = self._wrap(self.server, sock, server_side=True)
        known(channel)
        channel.handshake(deadline, go_on)
        return channel

    def connect(
        self, sock: socket.socket, deadline: float, go_on: Callable[[], bool]
    ) -> TlsChannel:
        """Takes over a connected socket; closes it where it raises Ended, Stalled, TlsProblem."""
        channel = self._wrap(self.client, sock, server_side=False)
        try:
            channel.handshake(deadline, go_on)
        except BaseException:
            channel.close()
            raise
        return channel

    def problem(self) -> str:
        """Why another end with the same files would not take our certificate; "" if it would."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            self.client.wrap_bio(back, there),
            self.server.wrap_bio(there, back, server_side=True),
        )
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLCertVerificationError as e:
                    return e.verify_message
                except ssl.SSLError as e:
                    return e.reason or str(e)
        return ""

    @staticmethod
    def _wrap(context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> TlsChannel:
        made = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        return TlsChannel(made)


_MEANS = {
    "KEY_VALUES_MISMATCH": "the key is not the certificate's",
    "NO_CERTIFICATE_ASSIGNED": "the key is not the certificate's",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it; PEM is wanted",
    "NO_START_LINE": "this is no PEM file",
}


def load_tls(cert: str, key: str, ca: str) -> Tls:
    """From PEM files: our certificate (chain), its key, and the authority. Raises ConfigError."""
    made = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The authority is one for kvd alone: whoever it signed may be at any address.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"tls_ca: cannot read {ca}: {_why(e)}") from None
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"tls_cert, tls_key: cannot use {cert}, {key}: {_why(e)}") from None
        made.append(context)
    server, client = made
    server.num_tickets = 0
    return Tls(server, client)


def wait_for_bytes(
    channel: Channel, deadline: float, go_on: Callable[[], bool], tick_s: float = TICK_S
) -> None:
    """Until there is something to read; see `wait_ready`. Raises Ended or Stalled."""
    if not channel.pending():
        wait_ready(channel, select.POLLIN, deadline, go_on, tick_s)


def _readable(sock: socket.socket) -> bool:
    """Whether bytes or the end came; looked at below TLS. (Not by recv: with a timeout set, Python
    waits before it calls, whatever the flags.)"""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def _why(error: OSError) -> str:
    reason = str(getattr(error, "reason", "") or "")
    return _MEANS.get(reason, reason or error.strerror or str(error))
