"""NCCL, as far as kvd needs it. Errors are `NcclError`; nothing here waits.

Stands on `nccl.bindings.nccl` of nccl4py, which takes addresses; its `nccl.core` would import
torch into the daemon and look at buffer objects at every call. Communicators are non-blocking,
so that kvd's own deadlines hold: a call that is under way is asked for with `busy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.errors import KvdError
from kvd.protocol.codes import Code

MODULE = "nccl.bindings.nccl"
UNIQUE_ID_NBYTES = 128
OLDEST = 22_900
"""2.29: the first with comm_revoke."""

DANGEROUS = {
    "NCCL_CHUNK_SIZE": "larger than NCCL's step it gives wrong data (NVIDIA/nccl#2408)",
    "NCCL_P2P_NET_CHUNKSIZE": "with other chunk sizes it gives wrong data (NVIDIA/nccl#2408)",
    "NCCL_P2P_PCI_CHUNKSIZE": "with other chunk sizes it gives wrong data (NVIDIA/nccl#2410)",
    "NCCL_P2P_NVL_CHUNKSIZE": "with other chunk sizes it gives wrong data (NVIDIA/nccl#2410)",
    "NCCL_NTHREADS": "one that does not divide NCCL's buffer gives wrong data (NVIDIA/nccl#698)",
    "NCCL_BUFFSIZE": "one that NCCL's threads do not divide gives wrong data (NVIDIA/nccl#698)",
    "NCCL_COMM_BLOCKING": "blocking communicators know no deadlines",
}
"""Environment variables with which kvd does not use NCCL, and why."""


class NcclError(KvdError):
    """A call that failed, or an operation that failed later."""

    code = Code.TRANSPORT_ERROR


@dataclass(frozen=True, slots=True)
class CommSettings:
    """`channels` 0 leaves it to NCCL."""

    max_ctas: int
    channels: int


def refused_env(environ: Mapping[str, str]) -> str:
    """Which variables must go before NCCL may be used, and why; "" if none."""
    found = [f"{name} ({why})" for name, why in DANGEROUS.items() if name in environ]
    return f"unset {'; '.join(found)}" if found else ""


def load_nccl() -> Nccl:
    """The real library. Raises NcclError (UNSUPPORTED), whose detail is one line."""
    try:
        return Nccl(importlib.import_module(MODULE))
    except ImportError as exc:
        raise NcclError(
            f"{MODULE} is not installed ({exc}): pip install 'vllm-kvd[cuda]'", Code.UNSUPPORTED
        ) from None


class Nccl:
    """Calls that take a communicator are made by one thread at a time, but for `abort`."""

    def __init__(self, module: Any) -> None:
        """Raises NcclError where the library itself is missing or too old."""
        self._m = module
        self.version: int = self._call("get_version", code=Code.UNSUPPORTED)
        if self.version < OLDEST:
            raise NcclError(
                f"NCCL {self.version} is too old: 2.29 or newer is needed", Code.UNSUPPORTED
            )

    def unique_id(self) -> bytes:
        """What the ranks of a communicator find each other by: 128 bytes."""
        return bytes(self._call("get_unique_id"))

    def init(self, rank: int, unique_id: bytes, settings: CommSettings) -> Any:
        """Begins to join as one of two ranks, on the thread's current device. Then ask `busy`."""
        config = self._m.Config()
        config.blocking = 0
        config.max_ctas = settings.max_ctas
        config.min_ctas = 1
        if settings.channels:
            config.n_channels_per_net_peer = settings.channels
        # The binding takes the ids from a writable buffer only.
        ids = bytearray(unique_id)
        return self._call("comm_init_rank_scalable", 2, rank, 1, ids, config.ptr)

    def busy(self, comm: Any) -> bool:
        """Whether the last call is still under way. Raises NcclError if anything has failed."""
        result = self._m.Result(int(self._call("comm_get_async_error", comm)))
        if result == self._m.Result.InProgress:
            return True
        if result != self._m.Result.Success:
            raise NcclError(f"communicator: {result.name}")
        return False

    def send(self, address: int, nbytes: int, comm: Any, peer: int, stream: Any) -> None:
        uint8 = int(self._m.DataType.Uint8)
        self._call("send", address, nbytes, uint8, peer, comm, int(stream))

    def recv(self, address: int, nbytes: int, comm: Any, peer: int, stream: Any) -> None:
        uint8 = int(self._m.DataType.Uint8)
        self._call("recv", address, nbytes, uint8, peer, comm, int(stream))

    def revoke(self, comm: Any) -> None:
        """Stops what is in flight; then ask `busy`."""
        self._call("comm_revoke", comm, 0)

    def destroy(self, comm: Any) -> None:
        self._call("comm_destroy", comm)

    def abort(self, comm: Any) -> None:
        """Ends everything at once; from any thread."""
        self._call("comm_abort", comm)

    def _call(self, name: str, *args: Any, code: Code = Code.TRANSPORT_ERROR) -> Any:
        try:
            return getattr(self._m, name)(*args)
        except Exception as exc:
            text = (str(exc).splitlines() or [repr(exc)])[0]
            raise NcclError(f"{name}: {text}", code) from None
