"""Rules that hold over the whole code base."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = sorted(
    path
    for folder in ("kvd", "connector_shim", "tests", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
SHIPPED = [p for p in CODE if p.relative_to(ROOT).parts[0] in ("kvd", "connector_shim")]

FORBIDDEN_MODULES = frozenset(
    ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "codeop")
)
FORBIDDEN_CALLS = frozenset({"eval", "exec", "compile", "__import__"})
# Of objects whose methods decode or run what they are given.
FORBIDDEN_METHODS = frozenset(
    ("recv_pyobj", "send_pyobj", "load_pickle", "allow_pickle", "unsafe_load", "full_load")
)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def offences(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could turn bytes or text into running code."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for package in (alias.name.partition(".")[0] for alias in node.names):
                if package in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {package}"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"from {node.module}"
            for alias in node.names:
                if alias.name in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in FORBIDDEN_CALLS:
                yield node.lineno, f"{name.id}()"
            if isinstance(name, ast.Attribute):
                if name.attr in FORBIDDEN_METHODS:
                    yield node.lineno, f".{name.attr}()"
                base = name.value
                if isinstance(base, ast.Name) and base.id == "torch" and name.attr == "load":
                    yield node.lineno, "torch.load()"
                if isinstance(base, ast.Name) and base.id == "builtins":
                    yield node.lineno, f"builtins.{name.attr}()"
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_METHODS:
                    yield node.lineno, f"{keyword.arg}="


def test_there_is_something_to_look_at() -> None:
    assert len(SHIPPED) > 20


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from marshal import loads",
        "import cloudpickle.pickle",
        "from multiprocessing import reduction, pickle",
        "eval('1')",
        "def f():\n    exec(text)",
        "compile(text, '', 'exec')",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(path)",
        "__import__(name)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_nothing_unpickles_or_runs_text() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in CODE
        for line, what in offences(tree(path))
    ]
    assert found == []


def test_what_is_shipped_spawns_no_shell() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SHIPPED
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and (
            any(k.arg == "shell" and getattr(k.value, "value", True) for k in node.keywords)
            or ast.unparse(node.func) in ("os.system", "os.popen")
        )
    ]
    assert found == []


def test_tests_end_processes_by_their_pid_only() -> None:
    words = re.compile(r"\b(pkill|killall|fuser)\b")
    files = [p for p in CODE if p != Path(__file__)]
    found = [str(p.relative_to(ROOT)) for p in files if words.search(p.read_text())]
    assert found == []


def test_modules_that_are_shipped_have_a_docstring_and_stay_readable() -> None:
    for path in SHIPPED:
        assert ast.get_docstring(tree(path)), f"{path.relative_to(ROOT)} does not say what it is"
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SHIPPED}
    assert {name: n for name, n in lines.items() if n > 500} == {}
