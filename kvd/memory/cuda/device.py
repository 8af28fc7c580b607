"""One GPU: found by its ordinal or UUID, its primary context bound to each thread that works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from kvd.errors import ConfigError
from kvd.memory.cuda.driver import CudaError, DeviceInfo, Driver, load_driver


class Gpu:
    """`close` once nothing uses it any more. Thread-safe."""

    def __init__(self, driver: Driver, info: DeviceInfo) -> None:
        """Raises CudaError."""
        self.driver = driver
        self.ordinal = info.ordinal
        self.uuid = info.uuid
        self.name = info.name
        self._context = driver.retain_context(info.ordinal)
        self._bound = threading.local()
        self.imports = Imports(driver)
        self.waiting = Waits()
        """`with gpu.waiting():` around what waits for the GPU elsewhere than on its thread."""

    def bind(self) -> None:
        """Before other calls, on each thread: cheap when it was done."""
        if not getattr(self._bound, "done", False):
            self.driver.bind(self._context)
            self._bound.done = True

    def close(self) -> None:
        self.driver.release_context(self.ordinal)


class Waits:
    """Since when the GPU is waited for, so that one that hangs is noticed from outside."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        wait = object()
        self._since[wait] = time.monotonic()
        try:
            yield
        finally:
            del self._since[wait]

    def longest(self) -> float:
        """Seconds; 0 if nobody waits."""
        since = list(self._since.values())
        return time.monotonic() - min(since) if since else 0.0


class Imports:
    """Allocations of other processes that are open here, each once, with how often it is used.

    The driver counts too, but not all versions of it do.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[int, int]] = {}

    def open(self, handle: bytes) -> int:
        """The base address. Raises CudaError."""
        with self._lock:
            base, count = self._open.get(handle, (0, 0))
            if not count:
                base = self._driver.ipc_open(handle)
            self._open[handle] = (base, count + 1)
            return base

    def close(self, handle: bytes) -> None:
        with self._lock:
            base, count = self._open.pop(handle)
            if count > 1:
                self._open[handle] = (base, count - 1)
            else:
                self._driver.ipc_close(base)

    def __len__(self) -> int:
        return len(self._open)


def open_gpu(device: str, driver: Driver | None = None) -> Gpu:
    """The GPU that `device` names: "cuda:0" (as CUDA_VISIBLE_DEVICES counts) or "cuda:GPU-...".

    Raises ConfigError, with one line that says what is missing.
    """
    wanted = device.removeprefix("cuda:")
    try:
        driver = load_driver() if driver is None else driver
        devices = driver.devices()
        for info in devices:
            if wanted in (str(info.ordinal), info.uuid):
                return Gpu(driver, info)
    except CudaError as exc:
        raise ConfigError(f"device {device}: no usable CUDA driver here ({exc.detail})") from None
    seen = ", ".join(f"cuda:{info.ordinal} ({info.uuid})" for info in devices) or "none"
    raise ConfigError(f"device {device}: there is no such GPU; this process sees {seen}")
