"""The fakes have the signatures of what is installed, and kvd calls nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import cuda.bindings.driver as real_driver
import nccl.bindings.nccl as real_nccl
import pytest

import connector_shim.device_memory
import kvd.memory.cuda.driver
import kvd.transport.nccl_lib
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nccl import FakeNccl

CALL = re.compile(r'_(?:call|raw)\(\s*"(\w+)"')


def called(*modules: ModuleType) -> list[str]:
    """Names of foreign functions that the modules call."""
    text = "".join(Path(str(module.__file__)).read_text() for module in modules)
    return sorted(set(CALL.findall(text)))


DRIVER_CALLS = called(kvd.memory.cuda.driver, connector_shim.device_memory)
NCCL_CALLS = called(kvd.transport.nccl_lib)
NCCL_CALLS += ["recv", "send"]  # their names are there; kept if the pattern ever misses them


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_calls_were_found() -> None:
    assert len(DRIVER_CALLS) > 30
    assert {"cuMemcpyBatchAsync", "cuIpcOpenMemHandle"} <= set(DRIVER_CALLS)
    assert {"comm_init_rank_scalable", "comm_abort"} <= set(NCCL_CALLS)


@pytest.mark.parametrize("name", DRIVER_CALLS)
def test_driver_call_exists_and_the_fake_has_its_signature(name: str) -> None:
    assert parameters(getattr(FakeDriver(), name)) == parameters(getattr(real_driver, name))


@pytest.mark.parametrize("name", sorted(set(NCCL_CALLS)))
def test_nccl_call_exists_and_the_fake_has_its_signature(name: str) -> None:
    fake = getattr(FakeNccl(FakeDriver()), name)
    assert parameters(fake) == parameters(getattr(real_nccl, name))


def test_a_call_that_is_not_faked_reaches_nothing_real() -> None:
    with pytest.raises(AttributeError):
        FakeDriver().cuCtxSynchronize  # noqa: B018
    with pytest.raises(AttributeError):
        FakeNccl(FakeDriver()).all_reduce  # noqa: B018


def test_nothing_waits_for_a_device_or_a_stream() -> None:
    assert not [name for name in DRIVER_CALLS if "Synchronize" in name]
