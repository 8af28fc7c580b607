"""The settings of a daemon with a GPU; part of the one tree in `kvd.settings`."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings


def setting(
    default: Any, description: str, *, group: str, unit: str = "", shown: str = "", **bounds: Any
) -> Any:
    """A field; `shown` stands for a default that is found out at start."""
    extra: dict[str, Any] = {"group": group, "unit": unit, "shown": shown}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class GpuSettings(BaseSettings):
    """Of no use where `device` is cpu."""

    gpu_hang_s: float = setting(
        30.0,
        "work on the GPU that does not end for this long makes the daemon exit, so that its "
        "supervisor starts another",
        group="Data",
        unit="s",
        ge=1,
        le=3600,
    )
    nccl_max_comms: int = setting(
        16,
        "communicators that may be there at once, one for each daemon asked and asking; the least "
        "recently used goes",
        group="Data",
        ge=1,
        le=256,
    )
    nccl_chunk_bytes: int = setting(
        8 * 2**20, "one staging buffer of the nccl transport", group="Data", unit="bytes",
        ge=2**16, le=2**30,
    )  # fmt: skip
    nccl_ring: int = setting(4, "staging buffers of one communicator", group="Data", ge=1, le=64)
    nccl_direct_bytes: int = setting(
        2 * 2**20,
        "a chunk of so many bytes that lies in one piece in the producer's memory is sent from "
        "there, without a copy into staging; 0 on either side: never",
        group="Data",
        unit="bytes",
        ge=0,
        le=2**30,
    )
    nccl_max_ctas: int = setting(
        4, "thread blocks of the GPU that NCCL may take for one transfer", group="Data", ge=1, le=32
    )
    nccl_channels: int = setting(
        0, "network channels for each peer; 0 leaves it to NCCL", group="Data", ge=0, le=32
    )
    nccl_interface: str = setting(
        "",
        "network interface of NCCL's own connections, as NCCL_SOCKET_IFNAME; \"\" is NCCL's choice",
        group="Data",
        pattern=r"^[A-Za-z0-9_.:=^,-]{0,255}$",
    )
    nccl_init_timeout_s: float = setting(
        8.0,
        "how long making a communicator may take; below attach_timeout_s, another transport may "
        "still be tried",
        group="Data",
        unit="s",
        gt=0,
        le=3600,
    )
    nccl_abort_timeout_s: float = setting(
        10.0,
        "how long each step of ending a communicator may take; when none helps, the daemon exits, "
        "so that its supervisor starts another",
        group="Data",
        unit="s",
        gt=0,
        le=3600,
    )
