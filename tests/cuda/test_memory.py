"""GPU memory of an engine: exported by what it is, opened with checks, given back in order."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from connector_shim.device_memory import DeviceExporter
from connector_shim.errors import ClientError
from kvd.errors import ConfigError, MemoryRefused
from kvd.memory.cuda.device import Gpu, open_gpu
from kvd.memory.cuda.driver import CudaError, Driver
from kvd.memory.cuda.memory import DeviceMemory
from kvd.protocol.codes import Code
from kvd.protocol.peer import SegmentInfo
from tests.contract.rig import Shape
from tests.cuda.fake_driver import EXPORTABLE, LEGACY, UUIDS, VMM, FakeDriver
from tests.cuda.script import Fail
from tests.cuda.sides import OFFSET, CudaSide, VmmSide, fake_gpu

SHAPE = Shape(((0, (512,)), (0, (256, 256))))
UNDO = ("cuIpcCloseMemHandle", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease")


@pytest.fixture(params=[CudaSide, VmmSide])
def side(request: pytest.FixtureRequest) -> Iterator[CudaSide]:
    made: CudaSide = request.param(SHAPE, 8, "segments")
    yield made
    made.close()


@pytest.fixture
def daemon() -> FakeDriver:
    return FakeDriver()


def given_back(memory: DeviceMemory, daemon: FakeDriver) -> dict[str, int]:
    """What is left after closing."""
    memory.close_when_unpinned()
    assert memory.wait_closed_blocking(5.0)
    return left(daemon)


def left(daemon: FakeDriver) -> dict[str, int]:
    return {what: n for what, n in daemon.live.items() if n and what != "context"}


def test_every_byte_is_where_it_was_described(side: CudaSide, daemon: FakeDriver) -> None:
    side.fill()
    gpu = fake_gpu(daemon)
    memory = side.open_on(gpu, writable=True)
    assert memory.device == gpu.uuid == "GPU-01010101-0101-0101-0101-010101010101"
    for layer, regions in enumerate(side.layers):
        for r, region in enumerate(regions.regions):
            table = memory.tables[0]
            row = [i for i, one in enumerate(table.layer) if one == layer][r]
            at = int(table.offset[row]) + 3 * region.stride
            seen = daemon.memory(at, region.nbytes)
            assert (seen == side.block(layer, r, 3)).all()
    with pytest.raises(MemoryRefused, match="cannot be looked at"):
        memory.view(0, (1,), (1,))
    assert given_back(memory, daemon) == {}


def test_two_attachments_open_an_allocation_once(daemon: FakeDriver) -> None:
    side = CudaSide(SHAPE, 8, "layers")
    gpu = fake_gpu(daemon)
    one, two = side.open_on(gpu, writable=False), side.open_on(gpu, writable=False)
    assert daemon.script.counts["cuIpcOpenMemHandle"] == 1
    assert given_back(one, daemon) == {"import": 1}
    assert given_back(two, daemon) == {}
    side.close()


CALLS = {
    CudaSide: ("cuIpcOpenMemHandle", "cuMemGetAddressRange"),
    VmmSide: (
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
    ),
}


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize(
    ("kind", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls]
)
def test_an_error_at_each_call_is_unwound_in_order(
    kind: type[CudaSide], call: str, segment: int, daemon: FakeDriver
) -> None:
    side = kind(SHAPE, 8, "segments")
    gpu = fake_gpu(daemon)
    daemon.script.add(call, Fail("CUDA_ERROR_UNKNOWN"), after=segment)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryRefused, match=f"segment {segment}: {call}: CUDA_ERROR_UNKNOWN"):
        side.open_on(gpu, writable=True)
    # The one exception: what cannot be released stays, and nothing else does.
    allowed = {"handle": 1} if call == "cuMemRelease" else {}
    assert left(daemon) == allowed
    assert len(os.listdir("/proc/self/fd")) <= fds + len(allowed)
    assert len(gpu.imports) == 0
    # Whatever was mapped is unmapped, and only then its address space is given back.
    mapped = 0
    for one in daemon.script.calls:
        mapped += one == "cuMemUnmap"
        mapped -= one == "cuMemAddressFree" and call in ("cuMemSetAccess", "cuMemRelease")
        assert mapped >= 0
    assert side.open_on(gpu, writable=True).nbytes > 0  # and it works the next time
    side.close()


def test_a_step_of_closing_that_fails_does_not_keep_the_others(daemon: FakeDriver) -> None:
    side = VmmSide(SHAPE, 8, "segments")
    memory = side.open_on(fake_gpu(daemon), writable=True)
    daemon.script.add("cuMemUnmap", Fail("CUDA_ERROR_UNKNOWN"))
    assert given_back(memory, daemon) == {"mapping": 1, "reservation": 1}
    side.close()


def test_read_only_mappings_where_the_driver_has_them(daemon: FakeDriver) -> None:
    side = VmmSide(SHAPE, 8, "layers")
    gpu = fake_gpu(daemon)
    given_back(side.open_on(gpu, writable=False), daemon)
    assert daemon.script.counts["cuMemSetAccess"] == 1
    daemon.script.add("cuMemSetAccess", Fail("CUDA_ERROR_NOT_SUPPORTED"))
    given_back(side.open_on(gpu, writable=False), daemon)
    assert daemon.script.counts["cuMemSetAccess"] == 3
    daemon.script.add("cuMemSetAccess", Fail("CUDA_ERROR_NOT_SUPPORTED"))
    with pytest.raises(MemoryRefused):  # our own engine's memory must be writable
        side.open_on(gpu, writable=True)
    assert left(daemon) == {}
    side.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"base_nbytes": OFFSET + 1}, "ends at byte .*, its allocation has 4161 bytes"),
        ({"base_nbytes": 10**9}, "its handle opens .* bytes, 0 into an allocation, and not the"),
        ({"offset": 10**9}, "ends at byte 1000008192"),
        ({"nbytes": 0}, "0 bytes"),
        ({"handle": b"x" * 63}, "a CUDA IPC handle of 63 bytes"),
        ({"handle": b"x" * 64}, "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE"),
        ({"kind": "memfd", "handle": b""}, "on several devices|memfd among segments of a GPU"),
        ({"device": "GPU-0"}, "the engine's memory is on GPU-0, this daemon serves GPU-01010101"),
    ],
)
def test_what_is_described_wrongly_is_refused(
    change: dict[str, object], match: str, daemon: FakeDriver
) -> None:
    side = CudaSide(Shape(((0, (1024,)),)), 8, "layers")
    good = side.infos
    side.infos = [msgspec.structs.replace(good[0], **change)]
    if "kind" in change:
        side.infos.append(msgspec.structs.replace(good[0], segment=1))
        side._fds.insert(0, os.dup(side._fds[0]))
    with pytest.raises(MemoryRefused, match=match):
        side.open_on(fake_gpu(daemon), writable=True)
    assert left(daemon) == {}
    side.close()


# --- the exporter ---------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    fake_gpu(driver).bind()
    yield driver
    driver.close()


def test_one_handle_for_each_allocation(engine: FakeDriver) -> None:
    exporter = DeviceExporter(engine)
    base = engine.engine_alloc(10_000)
    one, two = exporter.export(0, base + 64, 1000), exporter.export(1, base + 5000, 5000)
    assert (one.offset, two.offset) == (64, 5000)
    assert one.handle == two.handle
    assert one.base_nbytes == two.base_nbytes == 10_000
    assert engine.script.counts["cuIpcGetMemHandle"] == 1
    other = exporter.export(2, engine.engine_alloc(4096), 4096)
    assert other.handle != one.handle


def test_vmm_memory_travels_as_a_descriptor(engine: FakeDriver) -> None:
    base = engine.engine_alloc(8192, EXPORTABLE)
    one = DeviceExporter(engine).export(0, base + 100, 500)
    assert (one.kind, one.offset, one.base_nbytes, one.handle) == ("vmm", 100, 8192, b"")
    assert os.fstat(one.fd).st_size == 8192
    os.close(one.fd)
    assert engine.live["handle"] == 0


def test_memory_that_nobody_can_open_is_refused_with_the_way_out(engine: FakeDriver) -> None:
    base = engine.engine_alloc(8192, VMM)
    with pytest.raises(ClientError, match="no shareable handle type; start vLLM without") as caught:
        DeviceExporter(engine).export(0, base, 100)
    assert caught.value.code == Code.UNSUPPORTED
    assert "enable_sleep_mode" in caught.value.detail
    assert "expandable_segments" in caught.value.detail


@pytest.mark.parametrize("kind", [LEGACY, EXPORTABLE])
def test_a_cache_over_several_allocations_is_refused(engine: FakeDriver, kind: str) -> None:
    base = engine.engine_alloc(8192, kind)
    with pytest.raises(ClientError, match="span more than one allocation"):
        DeviceExporter(engine).export(0, base + 100, 8192)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (LEGACY, "cuPointerGetAttributes"),
        (LEGACY, "cuMemGetAddressRange"),
        (LEGACY, "cuIpcGetMemHandle"),
        (EXPORTABLE, "cuMemRetainAllocationHandle"),
        (EXPORTABLE, "cuMemExportToShareableHandle"),
        (EXPORTABLE, "cuMemRelease"),
    ],
)
def test_an_error_at_each_call_of_the_exporter(engine: FakeDriver, kind: str, call: str) -> None:
    base = engine.engine_alloc(8192, kind)
    fds = len(os.listdir("/proc/self/fd"))
    engine.script.add(call, Fail("CUDA_ERROR_NOT_SUPPORTED"))
    with pytest.raises(ClientError, match=f"{call}: CUDA_ERROR_NOT_SUPPORTED"):
        DeviceExporter(engine).export(0, base, 100)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert engine.live["handle"] == (1 if call == "cuMemRelease" else 0)


# --- the device -----------------------------------------------------------------------------


def test_devices_are_found_by_number_and_by_uuid() -> None:
    driver = Driver(FakeDriver(devices=2))
    second = open_gpu("cuda:1", driver)
    assert second.uuid == "GPU-" + "02020202-0202-0202-0202-020202020202"
    assert len(UUIDS[1]) == 16
    assert open_gpu(f"cuda:{second.uuid}", driver).ordinal == 1
    with pytest.raises(ConfigError, match=r"no such GPU; this process sees cuda:0 \(GPU-0101"):
        open_gpu("cuda:2", driver)


def test_errors_of_the_driver_are_mapped() -> None:
    module = FakeDriver()
    driver = Driver(module)
    gpu = Gpu(driver, driver.devices()[0])
    gpu.bind()
    for error, code, broken in (
        ("CUDA_ERROR_OUT_OF_MEMORY", Code.NO_SPACE, False),
        ("CUDA_ERROR_INVALID_VALUE", Code.BAD_MEMORY, False),
        ("CUDA_ERROR_NOT_SUPPORTED", Code.UNSUPPORTED, False),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", Code.TRANSPORT_ERROR, True),
        ("CUDA_ERROR_UNKNOWN", Code.TRANSPORT_ERROR, False),
    ):
        module.script.add("cuMemAlloc", Fail(error))
        with pytest.raises(CudaError) as caught:
            driver.alloc(10)
        assert (caught.value.code, caught.value.broken) == (code, broken)
        assert caught.value.detail == f"cuMemAlloc: {error}"


def test_each_thread_binds_the_context() -> None:
    import threading

    module = FakeDriver()
    gpu = fake_gpu(module)
    failed: list[CudaError] = []

    def work() -> None:
        try:
            gpu.driver.alloc(10)
        except CudaError as exc:
            failed.append(exc)
        gpu.bind()
        gpu.bind()
        gpu.driver.free(gpu.driver.alloc(10))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [exc.result for exc in failed] == ["CUDA_ERROR_INVALID_CONTEXT"]
    assert module.script.counts["cuCtxSetCurrent"] == 1


def test_segments_describe_themselves() -> None:
    info = SegmentInfo(0, "vmm", 1, "GPU-1")
    assert info.has_fd
    assert not msgspec.structs.replace(info, handle=b"x" * 64).has_fd
    assert not msgspec.structs.replace(info, kind="cuda_ipc").has_fd
