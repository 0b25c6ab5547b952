"""Reading from an ELF file what the dynamic linker would do with it, before it does."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_SHARED_OBJECT, _X86_64 = 3, 62
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5


def needed(data: bytes) -> list[str]:
    """Return the libraries that the x86-64 shared library `data` asks for; ValueError says what is wrong with it."""
    try:
        return _needed(data)
    except struct.error:
        raise ValueError("its headers point outside of it") from None


def _needed(data: bytes) -> list[str]:
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
    strings_at = next((value for tag, value in entries if tag == _DT_STRTAB), -1)
    strings = next(
        (
            data[start + strings_at - address : start + length]
            for tag, _, start, address, _, length, *_ in segments
            if tag == _PT_LOAD and address <= strings_at < address + length
        ),
        b"",
    )
    names = []
    for tag, value in entries:
        if tag == _DT_NEEDED:
            name, end, _ = strings[value:].partition(b"\0")
            if not end:
                raise ValueError("its string table ends within a name")
            names.append(name.decode("utf-8", "backslashreplace"))
    return names
