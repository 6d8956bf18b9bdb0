"""Registers of a kernel, read from its cubin: an ELF file whose .nv.info section has attributes of every kernel."""

import struct
from functools import cache
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SIZED, _REGISTERS = 0x04, 0x2F  # an attribute with its size, and the one that counts registers


@cache
def registers(path: Path) -> int | None:
    """Registers a thread of the file's largest kernel; None where it is no cubin."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if data[:4] != b"\x7fELF" or len(data) < _HEADER.size:
        return None
    fields = _HEADER.unpack_from(data)
    offset, size, count, names = fields[6], fields[11], fields[12], fields[13]
    if size != _SECTION.size or offset + size * count > len(data):
        return None
    sections = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    found = []
    for section in sections:
        start = strings + section[0]
        if data[start : data.index(b"\0", start)] == b".nv.info":
            found += _counts(data[section[4] : section[4] + section[5]])
    return max(found, default=None)


def _counts(info: bytes) -> list[int]:
    """Register counts among the attributes: format, number, 16 bits that are a value or the size of what follows."""
    at, found = 0, []
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != _SIZED:
            continue
        if attribute == _REGISTERS and size >= 8:
            found.append(struct.unpack_from("<II", info, at)[1])  # behind the kernel's symbol
        at += size
    return found
