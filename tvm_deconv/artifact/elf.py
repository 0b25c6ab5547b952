"""The dynamic section of ELF files: it shows the work of the dynamic linker before it is done."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WORD = struct.Struct("<I")
_HASH = struct.Struct("<4I")
_DEFINED_VERSION = struct.Struct("<HHHHIII")
_NEEDED_VERSION, _NEEDED_NAME = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_SHARED_OBJECT, _X86_64 = 3, 62
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 1, 4, 5, 6, 0x6FFFFEF5
_MOST_VERSIONS = 1000
_DT_VERDEF, _DT_VERNEED = 0x6FFFFFFC, 0x6FFFFFFE


class Dynamic(NamedTuple):
    """The names of the libraries that a shared library needs, and of the symbols that it defines.

    `versions` are the names of the versions of symbols that it needs, such as ``GLIBC_2.17``.
    """

    needed: list[str]
    defined: frozenset[str]
    versions: frozenset[str]


def dynamic(data: bytes) -> Dynamic:
    """Read the dynamic section of the x86-64 shared library `data`. Raises ValueError if it is malformed."""
    with _malformed():
        section = _Section(data)
        return Dynamic(section.needed(), section.defined(), section.versions_needed())


def versions_defined(data: bytes) -> frozenset[str]:
    """Return the versions of symbols that the shared library `data` defines. Raises ValueError if it is malformed."""
    with _malformed():
        return _Section(data).versions_defined()


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except (struct.error, OverflowError):
        raise ValueError("its headers point outside of it") from None


class _Section:
    """The dynamic section of a library, and the tables that it points to."""

    def __init__(self, data: bytes) -> None:
        ident, kind, machine, _, _, segments_at, _, _, _, segment_size, segment_count, *_ = _HEADER.unpack_from(data)
        if ident[:6] != b"\x7fELF\x02\x01" or kind != _SHARED_OBJECT:
            raise ValueError("it is not a 64-bit ELF shared library")
        if machine != _X86_64:
            raise ValueError(f"it is for ELF machine {machine}, not for x86-64 ({_X86_64})")
        self._data = data
        self._segments = [_SEGMENT.unpack_from(data, segments_at + segment_size * n) for n in range(segment_count)]
        dynamic = [segment for segment in self._segments if segment[0] == _PT_DYNAMIC]
        if len(dynamic) != 1:
            raise ValueError("it has no dynamic section")
        _, _, offset, _, _, size, *_ = dynamic[0]
        self._entries: list[tuple[int, int]] = []
        for at in range(offset, offset + size, _DYNAMIC.size):
            self._entries.append(_DYNAMIC.unpack_from(data, at))
            if self._entries[-1][0] == _DT_NULL:
                break
        self._places = dict(self._entries)
        self._strings = self._table(_DT_STRTAB)

    def needed(self) -> list[str]:
        """Return the names of the libraries that it needs."""
        return [self._name(value) for tag, value in self._entries if tag == _DT_NEEDED]

    def defined(self) -> frozenset[str]:
        """Return the names of the symbols that it defines."""
        symbols = self._table(_DT_SYMTAB)
        count = _count(self._table(_DT_HASH), self._table(_DT_GNU_HASH))
        entries = (_SYMBOL.unpack_from(symbols, index * _SYMBOL.size) for index in range(1, count))
        return frozenset(self._name(at) for at, _, _, section, _, _ in entries if section)

    def versions_needed(self) -> frozenset[str]:
        """Return the names of the versions of symbols that it needs."""
        return _few(map(self._name, _names_needed(self._table(_DT_VERNEED))))

    def versions_defined(self) -> frozenset[str]:
        """Return the names of the versions of symbols that it defines."""
        return _few(map(self._name, _names_defined(self._table(_DT_VERDEF))))

    def _table(self, tag: int) -> bytes:
        """Return the bytes from the start of the table of this tag to the end of its segment."""
        at = self._places.get(tag, -1)
        for kind, _, start, address, _, length, *_ in self._segments:
            if kind == _PT_LOAD and address <= at < address + length:
                return self._data[start + at - address : start + length]
        return b""

    def _name(self, at: int) -> str:
        end = self._strings.find(b"\0", at)
        if end < 0:
            raise ValueError("its string table ends within a name")
        return self._strings[at:end].decode("utf-8", "backslashreplace")


def _few(names: Iterator[str]) -> frozenset[str]:
    """Return `names`. Raises ValueError if there are too many to be true."""
    found = list(itertools.islice(names, _MOST_VERSIONS + 1))
    if len(found) > _MOST_VERSIONS:
        raise ValueError(f"it names more than {_MOST_VERSIONS} versions of symbols")
    return frozenset(found)


def _names_needed(needs: bytes) -> Iterator[int]:
    """Yield the places of names in the table of versions that are needed, which is empty if there is none."""
    at = 0
    while needs:
        _, count, _, first, following = _NEEDED_VERSION.unpack_from(needs, at)
        inner = at + first
        for _ in range(count):
            *_, text, step = _NEEDED_NAME.unpack_from(needs, inner)
            yield text
            inner += step
        if not following:
            return
        at += following


def _names_defined(definitions: bytes) -> Iterator[int]:
    """Yield the places of names in the table of versions that are defined, which is empty if there is none."""
    at = 0
    while definitions:
        *_, first, following = _DEFINED_VERSION.unpack_from(definitions, at)
        yield _WORD.unpack_from(definitions, at + first)[0]
        if not following:
            return
        at += following


def _count(hashed: bytes, gnu_hashed: bytes) -> int:
    """Return the number of symbols by one of the two hash tables; a missing table is empty."""
    if hashed:
        return int(_WORD.unpack_from(hashed, 4)[0])
    if not gnu_hashed:
        return 0
    buckets, first, words, _ = _HASH.unpack_from(gnu_hashed)
    start = _HASH.size + 8 * words
    last = max((at for (at,) in _WORD.iter_unpack(gnu_hashed[start : start + 4 * buckets])), default=0)
    if last < first:
        return int(first)
    # The symbols of a bucket follow each other; the last one has an odd hash.
    chain = start + 4 * buckets
    while not _WORD.unpack_from(gnu_hashed, chain + 4 * (last - first))[0] & 1:
        last += 1
    return int(last) + 1
