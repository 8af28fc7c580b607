"""Checks of what a daemon for a GPU needs: driver, bindings, NCCL, and GPUs that reach each other.

Nothing of CUDA is imported unless the daemon's device is a GPU.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from kvd.ops.findings import Finding, Surroundings, error, ok, warning

DRIVER_FILE = "driver/nvidia/version"
MIN_DRIVER = (525,)
"""The first series with which CUDA 12's libraries run."""
BINDINGS = "cuda-bindings"
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MIN_NCCL = (2, 18)


def check_gpu(at: Surroundings) -> list[Finding]:
    """Driver, bindings, the device itself, and whether it reaches the other GPUs of this host."""
    device = at.settings.device
    if device == "cpu":
        return [ok("gpu", "no GPU is used (device = cpu)")]
    driver = _driver(at)
    if driver is None:
        return [
            error(
                "gpu",
                f"device: {device}, but no GPU: the NVIDIA driver is not loaded",
                why="the daemon cannot open the engine's memory",
                fix="install the driver (nvidia-smi shows it), give the container the GPU "
                "(--gpus, nvidia.com/gpu), or set device = cpu",
            )
        ]
    found: list[Finding] = []
    if _numbers(driver) < MIN_DRIVER:
        found.append(
            error(
                "gpu",
                f"NVIDIA driver {driver}",
                why=f"CUDA 12 needs {MIN_DRIVER[0]} or newer",
                fix="upgrade the driver on the host",
            )
        )
    bindings = at.version(BINDINGS)
    if bindings is None:
        found.append(
            error(
                "gpu",
                f"{BINDINGS} is not installed",
                why="the daemon talks to the driver through it",
                fix=f"pip install {BINDINGS} in the environment that runs kvd",
            )
        )
    if found:
        return found
    return _reach(at, device, driver)


def _reach(at: Surroundings, device: str, driver: str) -> list[Finding]:
    try:
        count, cut_off = at.gpus(int(device.partition(":")[2] or 0))
    except Exception as e:
        return [
            error(
                "gpu",
                f"{device} cannot be used: {e}",
                why="the daemon cannot open the engine's memory",
                fix="nvidia-smi shows the GPUs; CUDA_VISIBLE_DEVICES and the container must show "
                "the daemon the engine's own",
            )
        ]
    if cut_off:
        others = ", ".join(map(str, cut_off))
        return [
            warning(
                "gpu",
                f"{device} has no peer access to GPU {others}",
                why="KV from there goes through host memory or the network",
                fix="nvidia-smi topo -p2p r shows why (IOMMU, or no common PCIe root); "
                "choose GPUs that reach each other",
            )
        ]
    return [ok("gpu", f"{device} of {count}, driver {driver}, peer access to all others")]


def check_nccl(at: Surroundings) -> list[Finding]:
    """NCCL's version; both ends must have the same major and minor."""
    if at.settings.device == "cpu":
        return [ok("nccl", "not needed (device = cpu)")]
    version = next((v for v in map(at.version, NCCL) if v is not None), None)
    if version is None:
        return [
            warning(
                "nccl",
                "NCCL is not installed here",
                why="the nccl transport cannot be used; tcp can",
                fix=f"pip install {NCCL[-1]} (what PyTorch for CUDA brings)",
            )
        ]
    if _numbers(version) < MIN_NCCL:
        return [
            warning(
                "nccl",
                f"NCCL {version}",
                why=f"needs {'.'.join(map(str, MIN_NCCL))} or newer, the same on both hosts",
                fix=f"pip install --upgrade {NCCL[-1]}",
            )
        ]
    return [ok("nccl", f"NCCL {version}; peers should have the same")]


def probe_gpus(index: int) -> tuple[int, list[int]]:
    """How many GPUs there are, and those that `index` cannot reach. Raises where CUDA fails."""
    driver: Any = importlib.import_module("cuda.bindings.driver")

    def call(name: str, *arguments: object) -> Any:
        code, *answer = getattr(driver, name)(*arguments)
        if int(code) != 0:
            raise RuntimeError(f"{name}: {getattr(code, 'name', code)}")
        return answer[0] if answer else None

    call("cuInit", 0)
    count = int(call("cuDeviceGetCount"))
    if index >= count:
        raise RuntimeError(f"there are {count} GPUs")
    mine = call("cuDeviceGet", index)
    others = [n for n in range(count) if n != index]
    return count, [
        n for n in others if not call("cuDeviceCanAccessPeer", mine, call("cuDeviceGet", n))
    ]


def _driver(at: Surroundings) -> str | None:
    try:
        text = (at.proc / DRIVER_FILE).read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return found[1] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
