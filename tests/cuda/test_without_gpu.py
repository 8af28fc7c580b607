"""The real packages on a machine without a GPU: imports, errors, ids, and an init that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.memory.cuda.device import open_gpu
from kvd.memory.cuda.driver import CudaError, load_driver
from kvd.protocol.codes import Code
from kvd.transport import gpu
from kvd.transport.nccl_lib import DANGEROUS, NcclError, load_nccl, refused_env

ROOT = Path(__file__).parents[2]


def python(code: str, *, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since NCCL starts threads that stay."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def has_gpu() -> bool:
    try:
        return bool(load_driver().devices())
    except CudaError:
        return False


no_gpu = pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("first", "what"),
    [
        ("sys", "kvd"),
        ("sys", "kvd.daemon"),
        ("sys", "kvd.cli"),
        ("sys", "connector_shim"),
        ("sys", "connector_shim.client"),
        ("torch", "connector_shim.wiring"),  # torch itself imports cuda.bindings where it is
        ("torch", "connector_shim.connector"),
    ],
)
def test_importing_it_imports_no_cuda(first: str, what: str) -> None:
    ran = python(
        f"import sys, {first}\n"
        "ours = lambda: {m for m in sys.modules if m.split('.')[0] in ('cuda', 'nccl')}\n"
        f"before = ours()\nimport {what}\nprint(sorted(ours() - before))"
    )
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr


@no_gpu
@pytest.mark.parametrize("more", [[], ["--transport", "nccl"], ["--transport", "cuda_ipc"]])
def test_serving_a_gpu_that_is_not_there_says_what_is_missing(
    more: list[str], tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvd", "serve", "--device", "cuda:0", *more,
         "--socket", str(tmp_path / "s")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = (ran.stdout + ran.stderr).strip().splitlines()
    assert ran.returncode == 78
    assert len(lines) == 1, lines
    assert "device cuda:0: no usable CUDA driver here" in lines[0]


@no_gpu
def test_the_driver_that_is_missing_is_a_typed_error() -> None:
    with pytest.raises(CudaError) as caught:
        load_driver()
    assert caught.value.code == Code.UNSUPPORTED
    with pytest.raises(ConfigError, match=r"^device cuda:0: no usable CUDA driver here \(.*\)$"):
        open_gpu("cuda:0")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda.bindings.driver", "nccl.bindings.nccl"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CudaError, match=r"pip install 'vllm-kvd\[cuda\]'"):
        load_driver()
    with pytest.raises(NcclError, match=r"pip install 'vllm-kvd\[cuda\]'"):
        load_nccl()


def test_nccl_gives_ids_and_takes_our_settings() -> None:
    ran = python(
        "from kvd.transport.nccl_lib import *\n"
        "import nccl.bindings.nccl as real\n"
        "lib = load_nccl()\n"
        "one, two = lib.unique_id(), lib.unique_id()\n"
        "assert len(one) == len(two) == UNIQUE_ID_NBYTES and one != two\n"
        "assert lib.version >= OLDEST\n"
        "config = real.Config()\n"
        "for name in ('blocking', 'min_ctas', 'max_ctas', 'n_channels_per_net_peer'):\n"
        "    assert getattr(config, name) == -2**31, name  # NCCL's 'not set'\n"
        "config.blocking, config.max_ctas, config.n_channels_per_net_peer = 0, 4, 2\n"
        "assert (config.blocking, config.max_ctas, config.n_channels_per_net_peer) == (0, 4, 2)\n"
        "print('good')"
    )
    assert ran.stdout == "good\n", ran.stderr


@no_gpu
def test_joining_without_a_gpu_fails_fast_and_cleanly() -> None:
    ran = python(
        "import time\n"
        "from kvd.transport.nccl_lib import *\n"
        "lib = load_nccl()\n"
        "began = time.monotonic()\n"
        "try:\n"
        "    lib.init(0, lib.unique_id(), CommSettings(4, 0))\n"
        "except NcclError as exc:\n"
        "    assert time.monotonic() - began < 10\n"
        "    print(exc.code, exc.detail)"
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("transport_error comm_init_rank_scalable: UnhandledCudaError (1)")


def test_errors_of_nccl_are_mapped() -> None:
    import nccl.bindings.nccl as real

    class Module:
        Result = real.Result

        def get_version(self) -> int:
            return 22_800

        def get_unique_id(self) -> bytes:
            raise real.NCCLError(int(real.Result.SystemError))

    with pytest.raises(NcclError, match=r"NCCL 22800 is too old: 2\.29 or newer is needed"):
        load_nccl_from(Module())
    module = Module()
    module.get_version = lambda: 23_000  # type: ignore[method-assign]
    with pytest.raises(NcclError, match="get_unique_id: SystemError"):
        load_nccl_from(module).unique_id()


def load_nccl_from(module: object):  # type: ignore[no-untyped-def]
    from kvd.transport.nccl_lib import Nccl

    return Nccl(module)


@pytest.mark.parametrize("name", sorted(DANGEROUS))
def test_dangerous_environment_is_named_and_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused_env({"NCCL_DEBUG": "INFO"}) == ""
    assert refused_env({name: "1"}).startswith(f"unset {name} (")
    monkeypatch.setenv(name, "1")
    assert gpu.nccl_missing("").startswith(f"unset {name} (")


def test_two_opinions_about_the_interface_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu.INTERFACE, "eth0")
    assert "NCCL_SOCKET_IFNAME is eth0, nccl_interface is eth1" in gpu.nccl_missing("eth1")
