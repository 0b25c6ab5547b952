"""The dynamic section of ELF files: it shows the work of the dynamic linker before it is done."""

from __future__ import annotations

import struct
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WORD = struct.Struct("<I")
_HASH = struct.Struct("<4I")
_SHARED_OBJECT, _X86_64 = 3, 62
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 1, 4, 5, 6, 0x6FFFFEF5


class Dynamic(NamedTuple):
    """The names of the libraries that a shared library needs, and of the symbols that it defines."""

    needed: list[str]
    defined: frozenset[str]


def dynamic(data: bytes) -> Dynamic:
    """Read the dynamic section of the x86-64 shared library `data`. Raises ValueError if it is malformed."""
    try:
        return _dynamic(data)
    except (struct.error, OverflowError):
        raise ValueError("its headers point outside of it") from None


def _dynamic(data: bytes) -> Dynamic:
    ident, kind, machine, _, _, segments_at, _, _, _, segment_size, segment_count, *_ = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != _SHARED_OBJECT:
        raise ValueError("it is not a 64-bit ELF shared library")
    if machine != _X86_64:
        raise ValueError(f"it is for ELF machine {machine}, not for x86-64 ({_X86_64})")
    segments = [_SEGMENT.unpack_from(data, segments_at + segment_size * index) for index in range(segment_count)]
    dynamic = [segment for segment in segments if segment[0] == _PT_DYNAMIC]
    if len(dynamic) != 1:
        raise ValueError("it has no dynamic section")
    _, _, offset, _, _, size, *_ = dynamic[0]
    entries: list[tuple[int, int]] = []
    for at in range(offset, offset + size, _DYNAMIC.size):
        entries.append(_DYNAMIC.unpack_from(data, at))
        if entries[-1][0] == _DT_NULL:
            break
    tables = dict(entries)

    def table(tag: int) -> bytes:
        """Return the bytes from the start of the table of this tag to the end of its segment."""
        at = tables.get(tag, -1)
        for kind, _, start, address, _, length, *_ in segments:
            if kind == _PT_LOAD and address <= at < address + length:
                return data[start + at - address : start + length]
        return b""

    strings = table(_DT_STRTAB)

    def name(at: int) -> str:
        end = strings.find(b"\0", at)
        if end < 0:
            raise ValueError("its string table ends within a name")
        return strings[at:end].decode("utf-8", "backslashreplace")

    symbols = table(_DT_SYMTAB)
    count = _count(table(_DT_HASH), table(_DT_GNU_HASH))
    entries_of_symbols = (_SYMBOL.unpack_from(symbols, index * _SYMBOL.size) for index in range(1, count))
    defined = frozenset(name(at) for at, _, _, section, _, _ in entries_of_symbols if section)
    return Dynamic([name(value) for tag, value in entries if tag == _DT_NEEDED], defined)


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
