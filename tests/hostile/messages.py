"""Messages that are nearly right: made from the protocol's own types, then damaged.

Values come from small pools, so that messages meet each other's state. What is generated is plain
lists (all messages are arrays), encoded as msgpack and then, at times, damaged as bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

IDS = ("a", "b", "stranger", "bait", "x" * 512, "\0", "../../etc/passwd", "é" * 100)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"),
    float("inf"), "", "a" * 5000, b"", b"\xff" * 5000, [], [[]] * 100, {}, {"a": [1]},
)  # fmt: skip
CLAIMS = (
    b"\xdb\x7f\xff\xff\xff",  # a string of two GiB
    b"\xc6\xff\xff\xff\xff",  # bytes of four
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 3000,  # arrays in arrays
)


def pickle_that_touches(path: Path) -> bytes:
    """A pickle, written by hand, that makes a file where somebody unpickles it."""
    command = f"touch {path}".encode()
    return b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR."


@dataclass(frozen=True, slots=True)
class Known:
    """Good values, by the name of a message's field, that strangers may well know."""

    values: dict[str, tuple[Any, ...]]
    canary: Path

    def bodies(self, kinds: Sequence[Any]) -> st.SearchStrategy[Any]:
        """Messages of these types, as plain values, with odd values here and there."""
        return st.one_of([self._of(kind) for kind in inspect.multi_type_info(list(kinds))])

    def frames(self, kinds: Sequence[Any]) -> st.SearchStrategy[bytes]:
        """The same as bytes, some of them damaged, and some that are nothing of ours."""
        good = self.bodies(kinds).map(msgspec.msgpack.encode)
        return st.one_of(good, good, good, self.damaged(good), self.noise())

    def noise(self) -> st.SearchStrategy[bytes]:
        """What is not ours at all."""
        pickled = pickle_that_touches(self.canary)
        return st.one_of(
            st.binary(min_size=1, max_size=2000),
            st.sampled_from([*CLAIMS, pickled, b"\x92\xa1t" + pickled, b"GET / HTTP/1.1\r\n\r\n"]),
        )

    @staticmethod
    def damaged(good: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        """Cut off, with other bytes in the middle, or with more at the end."""
        return st.builds(_damage, good, st.integers(0, 2**16), st.binary(min_size=1, max_size=8))

    def _of(self, kind: inspect.Type, name: str = "") -> st.SearchStrategy[Any]:
        made = self._right(kind, name)
        if name in self.values:
            good = st.sampled_from(
                [msgspec.to_builtins(v, builtin_types=(bytes,)) for v in self.values[name]]
            )
            return st.one_of(good, good, good, made, st.sampled_from(ODD))
        odd = st.sampled_from(ODD)
        return st.integers(0, 15).flatmap(lambda n: odd if n == 0 else made)

    def _right(self, kind: inspect.Type, name: str) -> st.SearchStrategy[Any]:
        match kind:
            case inspect.Metadata(type=inner):
                return self._right(inner, name)
            case inspect.StructType():
                fields = [self._of(f.type, f.name) for f in kind.fields]
                tag = [] if kind.tag is None else [st.just(kind.tag)]
                return st.tuples(*tag, *fields)
            case inspect.UnionType():
                return st.one_of([self._right(t, name) for t in kind.types])
            case inspect.IntType():
                low, high = kind.ge or 0, 2**63 - 1 if kind.le is None else kind.le
                small = st.integers(low, min(high, low + 64))
                return st.one_of(small, small, st.sampled_from([low, high]))
            case inspect.FloatType():
                return st.floats(0, 5)
            case inspect.BoolType():
                return st.booleans()
            case inspect.StrType():
                return st.sampled_from(IDS)
            case inspect.BytesType():
                low, high = kind.min_length or 0, min(kind.max_length or 64, 4096)
                return st.one_of(
                    st.binary(min_size=low, max_size=min(high, max(low, 64))),
                    st.sampled_from([b"\0" * low, b"\xff" * high]),
                )
            case inspect.ListType():
                return st.lists(self._of(kind.item_type), max_size=4)
            case inspect.TupleType():
                return st.tuples(*[self._of(t) for t in kind.item_types])
            case inspect.LiteralType():
                return st.sampled_from(sorted(kind.values, key=str))
            case inspect.NoneType():
                return st.none()
            case _:
                raise TypeError(f"no values for {kind}")


def _damage(data: bytes, at: int, other: bytes) -> bytes:
    at %= len(data) + 1
    match len(other) % 3:
        case 0:
            return data[:at] or other
        case 1:
            return data[:at] + other + data[at + len(other) :]
        case _:
            return data + other


def open_anything(which: int) -> int:
    """A descriptor of some kind, to be passed and closed by the caller."""
    match which % 4:
        case 0:
            fd = os.memfd_create("kvd-hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 4096 * (which % 64))
            return fd
        case 1:
            read, write = os.pipe()
            os.close(write)
            return read
        case 2:
            return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        case _:
            return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
