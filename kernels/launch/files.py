"""Checkpoint files, read by memory map: safetensors and GGUF. Standard library, numpy and torch only.

Opening a file reads its header and checks that every tensor lies inside the file, so that a truncated download is
found before serving and not by a bus error in the middle of it.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.kernels.launch.errors import DamagedFile, MissingFile

# GGUF's tensor types: (our name, weights a block, bytes a block).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4),
    27: ("i64", 1, 8), 28: ("f64", 1, 8), 30: ("bf16", 1, 2),
}  # fmt: skip
# Block types: (weights a block, bytes a block).
BLOCKS = {name: (weights, size) for name, weights, size in GGML_TYPES.values() if weights > 1}
_SAFETENSORS_TYPES = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8",
    "U8": "u8", "BOOL": "bool",
}  # fmt: skip
# GGUF's metadata types: struct code and bytes; 8 is a string, 9 an array.
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_REMEDY = "download it again, or check that the disk was not full"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: IR dtype or GGUF block type, shape outermost first, and the bytes it takes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # of its first byte in the file
    nbytes: int


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} does not exist; {_REMEDY}") from error
    except ValueError as error:
        raise DamagedFile(f"{path} is empty; {_REMEDY}") from error
    except OSError as error:
        raise MissingFile(
            f"{path} cannot be read: {error.strerror or error}; check its permissions, and that memory is free"
        ) from error


def read_safetensors(path: Path) -> tuple[mmap.mmap, dict[str, TensorInfo]]:
    """The mapped file and its tensors. Raises ``MissingFile`` or ``DamagedFile``."""
    data = _map(path)
    if len(data) < 8:
        raise DamagedFile(f"{path} has {len(data)} bytes, too few for a safetensors header; {_REMEDY}")
    size = int.from_bytes(data[:8], "little")
    if 8 + size > len(data):
        raise DamagedFile(f"{path}: its header takes {size} bytes, but the file has {len(data)}; {_REMEDY}")
    try:
        header = json.loads(data[8 : 8 + size])
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        tensors = {}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            dtype = _SAFETENSORS_TYPES.get(entry["dtype"], str(entry["dtype"]).lower())
            tensors[name] = TensorInfo(
                name, dtype, tuple(entry["shape"]), path, 8 + size + begin, end - begin
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: its safetensors header does not parse ({error}); {_REMEDY}") from error
    _check_extent(path, len(data), tensors)
    return data, tensors


def _check_extent(path: Path, size: int, tensors: Mapping[str, TensorInfo]) -> None:
    for info in tensors.values():
        if info.offset < 0 or info.nbytes < 0 or info.offset + info.nbytes > size:
            raise DamagedFile(
                f"{path} is truncated: tensor {info.name} ends at byte {info.offset + info.nbytes}, but the file has "
                f"{size}; {_REMEDY}"
            )


class GgufFile:
    """A GGUF file: ``metadata`` by key, ``tensors`` by name.

    Long arrays (vocabularies) are left out of ``metadata``; ``array(key)`` reads one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        if self.data[:4] != b"GGUF":
            raise DamagedFile(
                f"{path} does not begin with GGUF, so it is no GGUF file; give the path of a .gguf model"
            )
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._arrays: dict[str, tuple[int, int, int, int]] = {}  # key -> element type, count, offset, end
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            # struct's own words are of buffers and C types; where the file ends is what says something
            said = not isinstance(error, struct.error | OverflowError)
            where = error if said else f"the file has {len(self.data)} bytes"
            raise DamagedFile(f"{path}: its GGUF header breaks off ({where}); {_REMEDY}") from error
        _check_extent(path, len(self.data), self.tensors)

    def array(self, key: str) -> list[Any]:
        """An array of the metadata, or an empty list where the file has none."""
        if key not in self._arrays:
            return []
        kind, count, at, _ = self._arrays[key]
        if kind in _SCALARS:
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind][0]}", self.data, at))
        values = []
        for _ in range(count):
            value, at = self._value(kind, at)
            values.append(value)
        return values

    def array_hashes(self) -> dict[str, str]:
        """SHA-256 of each array of the metadata, as it is stored."""
        places = ((key, at, end) for key, (_, _, at, end) in sorted(self._arrays.items()))
        return {key: hashlib.sha256(self.data[at:end]).hexdigest() for key, at, end in places}

    def _parse(self) -> None:
        version, tensor_count, key_count = struct.unpack_from("<IQQ", self.data, 4)
        if version not in (2, 3):
            raise DamagedFile(
                f"{self.path} is GGUF version {version}; versions 2 and 3 can be read, convert the model anew"
            )
        at = 24
        for _ in range(key_count):
            key, at = self._value(8, at)
            (kind,) = struct.unpack_from("<I", self.data, at)
            if kind == 9:
                at = self._note_array(key, at + 4)
            else:
                self.metadata[key], at = self._value(kind, at + 4)
        at = self._tensor_infos(tensor_count, at)

    def _note_array(self, key: str, at: int) -> int:
        kind, count = struct.unpack_from("<IQ", self.data, at)
        at += 12
        start = at
        if kind in _SCALARS:
            at += count * _SCALARS[kind][1]
        else:
            unpack, data = struct.Struct("<Q").unpack_from, self.data
            if kind != 8:
                raise DamagedFile(
                    f"{self.path}: {key} is an array of type {kind}, which GGUF readers do not know; {_REMEDY}"
                )
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        if at > len(self.data):
            raise IndexError(f"array {key} ends at byte {at} of {len(self.data)}")
        self._arrays[key] = (kind, count, start, at)
        return at

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == 8:
            (length,) = struct.unpack_from("<Q", self.data, at)
            if at + 8 + length > len(self.data):
                raise IndexError(f"a string of {length} bytes at byte {at}")
            return self.data[at + 8 : at + 8 + length].decode("utf-8", "replace"), at + 8 + length
        if kind not in _SCALARS:
            raise IndexError(f"metadata type {kind} at byte {at}")
        code, size = _SCALARS[kind]
        return struct.unpack_from("<" + code, self.data, at)[0], at + size

    def _tensor_infos(self, count: int, at: int) -> int:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._value(8, at)
            (rank,) = struct.unpack_from("<I", self.data, at)
            shape = struct.unpack_from(f"<{rank}Q", self.data, at + 4)
            kind, offset = struct.unpack_from("<IQ", self.data, at + 4 + 8 * rank)
            at += 16 + 8 * rank
            found.append((name, shape[::-1], kind, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = (at + alignment - 1) // alignment * alignment
        for name, shape, kind, offset in found:
            if kind not in GGML_TYPES:
                raise DamagedFile(
                    f"{self.path}: tensor {name} has GGUF type {kind}, which this version cannot read; use a model quantised "
                    "to Q4_0, Q4_1, Q5_0, Q8_0, Q4_K or Q6_K"
                )
            dtype, weights, size = GGML_TYPES[kind]
            elements = 1
            for extent in shape:
                elements *= extent
            self.tensors[name] = TensorInfo(
                name, dtype, shape, self.path, start + offset, elements // weights * size
            )
        return at
