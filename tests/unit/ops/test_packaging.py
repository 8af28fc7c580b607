"""What is shipped, what the shim may need, and the set-up that a newcomer runs."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvd import __version__

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            "--no-index", "--disable-pip-version-check", "--wheel-dir", folder, ROOT,
        ],
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )  # fmt: skip
    [path] = folder.iterdir()
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"vllm_kvd-{__version__}.dist-info/{name}").decode()


def test_the_wheel_holds_both_packages_whole(wheel: zipfile.ZipFile) -> None:
    shipped = {n for n in wheel.namelist() if ".dist-info/" not in n}
    tracked = {
        str(path.relative_to(ROOT))
        for package in ("kvd", "connector_shim")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert shipped == tracked
    assert {"kvd/py.typed", "connector_shim/py.typed", "connector_shim/plugin.py"} <= shipped


def test_the_wheel_names_its_entry_points(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(points["console_scripts"]) == {"kvd": "kvd.cli:main"}
    assert dict(points["vllm.general_plugins"]) == {"kvd": "connector_shim.plugin:register"}


def test_the_wheel_says_licence_python_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    text = metadata(wheel, "METADATA")
    assert "\nName: vllm-kvd\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.11\n" in text
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")
    needed = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.MULTILINE))
    assert {"uvloop", "pyzmq", "msgspec", "structlog", "prometheus-client", "aiohttp"} <= needed
    assert "vllm" not in needed


def test_the_shim_imports_with_nothing_but_what_vllm_has() -> None:
    missing = ["aiohttp", "prometheus_client", "pydantic", "pydantic_settings", "rich"]
    missing += ["structlog", "uvloop", "zmq"]
    code = f"""
import sys
for name in {missing!r}:
    sys.modules[name] = None  # an import of it raises ImportError
import connector_shim, connector_shim.client, connector_shim.fence, connector_shim.plugin
print("imported")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.stdout == "imported\n", ended.stderr


def test_the_client_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, connector_shim.client; "
        "print(sorted({'torch', 'vllm', 'numpy', 'zmq'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert ended.stdout == "[]\n"


def test_every_dependency_is_imported_and_every_import_is_a_dependency() -> None:
    names = {"prometheus-client": "prometheus_client", "pydantic-settings": "pydantic_settings"}
    names |= {"pyzmq": "zmq"}
    declared = {
        names.get(n, n)
        for n in (re.split(r"[<>=\[]", d)[0] for d in PROJECT["project"]["dependencies"])
    }
    imported = set()
    for package in ("kvd", "connector_shim"):
        for path in (ROOT / package).rglob("*.py"):
            imported |= set(
                re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
            )
    third_party = imported - set(sys.stdlib_module_names) - {"kvd", "connector_shim"}
    # vLLM is the host of the shim; the demo alone also talks to what vLLM brings, and to pip.
    brought = {"safetensors", "tokenizers", "transformers", "pip"}
    # An extra: nothing of it is imported before its setting is set.
    brought |= {
        re.split(r"[-<>=]", d)[0] for d in PROJECT["project"]["optional-dependencies"]["otel"]
    }
    assert third_party - declared - {"vllm"} <= brought
    assert declared <= third_party


# --- the set-up


def make(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *args],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**{k: v for k, v in os.environ.items() if k != "MAKEFLAGS"}, **(env or {})},
        check=False,
    )


@pytest.fixture
def no_venv(tmp_path: Path) -> str:
    return f"VENV={tmp_path / 'venv'}"


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("demo", ["/bin/kvd demo"]),
        ("bench", ["/bin/kvd bench"]),
        ("lint", ["/bin/ruff check .", "/bin/mypy", "/bin/lint-imports"]),
        ("test", ["/bin/ruff check .", "/bin/mypy", "/bin/lint-imports", "/bin/python -m pytest"]),
        ("venv", []),
    ],
)
def test_each_target_sets_up_first(target: str, runs: list[str], no_venv: str) -> None:
    ended = make("-n", target, no_venv)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("touch")]
    assert ".ci/make-venv" in lines[0]
    assert len(lines) == 1 + len(runs)
    for line, expected in zip(lines[1:], runs, strict=True):
        assert expected in line


@needs_make
def test_the_set_up_is_done_once_and_again_when_it_changes(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    stamp = venv / ".ready"
    stamp.touch()
    assert "make-venv" not in make("-n", "venv", f"VENV={venv}").stdout
    newest = max((ROOT / n).stat().st_mtime for n in ("pyproject.toml", "Makefile"))
    os.utime(stamp, (newest - 10, newest - 10))
    assert "make-venv" in make("-n", "venv", f"VENV={venv}").stdout


@needs_make
def test_arguments_reach_the_demo(no_venv: str) -> None:
    assert (
        "kvd demo --config transport=tcp"
        in make("-n", "demo", no_venv, "ARGS=--config transport=tcp").stdout
    )


@needs_make
def test_a_python_that_does_not_fit_is_named(tmp_path: Path, no_venv: str) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    ended = make("venv", no_venv, f"PYTHON={old}")
    assert ended.returncode != 0
    assert f"{old} cannot be used; Python 3.11 to 3.14" in ended.stderr
    assert not (tmp_path / "venv").exists()


NO_MATCH = "ERROR: No matching distribution found for torch==2.13.0+cpu"
CONFLICT = "ERROR: Cannot install torch==2.13.0+cpu because these package versions conflict"


def fake_python(path: Path, version: str, no_torch: str) -> Path:
    """Stands for an interpreter whose pip does nothing, or knows no CPU build of torch."""
    path.write_text(f"""#!/bin/sh
case "$*" in
    *"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo {version} >>"$0.used" ;;
    *"python_version()"*) echo {version} ;;
    *" torch 2.13.0+cpu") [ -e "$0.torch" ] || exit 1 ;;
    *"importlib.metadata"*) exit 1 ;;
    *"pip --no-input install torch=="*)
        [ -z "{no_torch}" ] || {{ echo "{no_torch}" >&2; exit 1; }}
        touch "$0.torch" ;;
esac
exit 0
""")
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize("words", [NO_MATCH, CONFLICT])
def test_a_missing_torch_build_says_which_index_to_give(
    tmp_path: Path, no_venv: str, words: str
) -> None:
    fake = fake_python(tmp_path / "python3.13", "3.13.0", words)
    ended = make("venv", no_venv, f"PYTHON={fake}")
    assert ended.returncode != 0
    assert "pip cannot find torch==2.13.0+cpu for Python 3.13." in ended.stderr
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make venv" in ended.stderr
    assert not (tmp_path / "venv").exists()


@needs_make
def test_another_failure_of_pip_is_shown_as_it_is(tmp_path: Path, no_venv: str) -> None:
    fake = fake_python(tmp_path / "python3.13", "3.13.0", "ERROR: No space left on device")
    ended = make("venv", no_venv, f"PYTHON={fake}")
    assert ended.returncode != 0
    assert "No space left on device" in ended.stderr
    assert "installing torch==2.13.0+cpu failed" in ended.stderr
    assert "PIP_EXTRA_INDEX_URL" not in ended.stderr


@needs_make
def test_the_next_python_is_tried_where_the_first_has_no_torch(
    tmp_path: Path, no_venv: str
) -> None:
    for name in ("python3", "python3.13"):
        fake_python(tmp_path / name, "3.13.0", NO_MATCH)
    for name in ("python3.12", "python3.11"):
        fake_python(tmp_path / name, f"{name.removeprefix('python')}.1", "")
    ended = make("venv", no_venv, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "venv" / ".ready").exists()
    # One try for each version, and none after the one that worked.
    used = {p.name.removesuffix(".used") for p in tmp_path.glob("*.used")}
    assert used == {"python3", "python3.12"}


def test_ci_runs_make_test_without_stdin(tmp_path: Path) -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\nread line && exit 9\npwd\necho "make $*"\nexit 7\n')
    fake.chmod(0o755)
    ended = subprocess.run(
        ["bash", script],
        cwd="/",
        input="something\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
    )
    assert ended.returncode == 7
    assert ended.stdout == f"{ROOT}\nmake test\n"
