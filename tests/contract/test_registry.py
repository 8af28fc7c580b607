"""Which transports there are, and how their ends are made."""

from __future__ import annotations

import pytest

from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.options import TransportOptions
from kvd.transport.registry import Transports, available, check_name
from tests.contract.rig import Rig, Shape

SHAPE = Shape(((0, (64,)), (0, (64,))))


def test_auto_is_best_first_and_a_name_is_that_alone() -> None:
    assert available(TransportOptions()) == ["shm", "tcp"]
    assert available(TransportOptions(transport="tcp")) == ["tcp"]
    assert available(TransportOptions(transport="shm")) == ["shm"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("cuda_ipc", "this daemon has none"),
        ("nccl", "this daemon has none"),
        ("rdma", "unknown; there are shm, tcp, cuda_ipc, nccl"),
    ],
)
def test_what_is_not_built_in_is_refused_by_name(name: str, match: str) -> None:
    for use in (
        lambda: check_name(name),
        lambda: available(TransportOptions(transport=name)),
        lambda: Transports(TransportOptions(transport=name)),
    ):
        with pytest.raises(TransportError, match=match) as caught:
            use()
        assert caught.value.code == Code.TRANSPORT_UNAVAILABLE


def test_a_congestion_control_that_is_not_allowed_is_refused_at_the_start() -> None:
    with pytest.raises(TransportError, match="tcp_congestion 'nonsense'"):
        Transports(TransportOptions(tcp_congestion="nonsense"))


async def test_both_ends_of_both_transports() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    transports = Transports(TransportOptions())
    local, owner = rig.dst.open(writable=True), rig.src.open(writable=True)
    remote = rig.src.open_shared(owner)
    server = transports.start_server("127.0.0.1", 0)
    assert server is not None
    shm = transports.open_puller("shm", local, remote=remote)
    tcp = transports.open_puller("tcp", local, host=server.host, port=server.port, remote_blocks=4)
    piece = rig.piece(0, [1], [2])
    assert await shm.pull(rig.job(piece)) == 128
    assert rig.wrong_blocks(piece) == []
    with pytest.raises(TransportError) as caught:
        await tcp.pull(rig.job(piece))
    assert caught.value.code == Code.UNKNOWN_TRANSFER
    for name in ("cuda_ipc", "nccl"):
        with pytest.raises(TransportError):
            transports.open_puller(name, local)
    with pytest.raises(TransportError):
        transports.open_puller("shm", local)
    await shm.aclose()
    await tcp.aclose()
    await server.aclose()
    await transports.aclose()
    rig.close()


async def test_what_the_operator_did_not_ask_for_is_not_used() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    local, remote = rig.dst.open(writable=True), rig.src.open(writable=False)
    only_tcp = Transports(TransportOptions(transport="tcp"))
    with pytest.raises(TransportError):
        only_tcp.shm(local, remote)
    only_shm = Transports(TransportOptions(transport="shm"))
    with pytest.raises(TransportError):
        only_shm.tcp(local, "127.0.0.1", 1, 4)
    assert only_shm.start_server("127.0.0.1", 0) is None
    await only_shm.aclose()
    await only_tcp.aclose()
    rig.close()


def test_shm_without_a_fence_or_with_other_layers_is_refused() -> None:
    from kvd.memory.engine import EngineMemory
    from kvd.transport.copy_pool import CopyPool
    from kvd.transport.shm import ShmPuller

    one, two = Rig.make(SHAPE, (4, 4)), Rig.make(Shape(((0, (64,)),)), (4, 4))
    pool = CopyPool(1)
    local = one.dst.open(writable=True)
    with pytest.raises(TransportError, match="1 layers against 2") as caught:
        ShmPuller(local, two.src.open(writable=False), pool)
    assert caught.value.code == Code.BAD_MEMORY
    with pytest.raises(TransportError, match="read-only"):
        ShmPuller(one.src.open(writable=False), one.src.open(writable=False), pool)
    fences = one.src.open(writable=False)
    fences.fence_slots = 0
    with pytest.raises(TransportError, match="fence") as caught:
        ShmPuller(local, fences, pool)
    assert caught.value.code == Code.TRANSPORT_UNAVAILABLE
    assert isinstance(local, EngineMemory)
    assert pool.close(5.0)
    one.close()
    two.close()
