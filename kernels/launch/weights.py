"""The streaming loader: a recipe and a checkpoint give one parameter at a time; nothing else touches weights.

Runs in a warm server, so it imports torch, numpy and, for GGUF block types, ``gguf``; never transformers.
Peak memory beyond the result is one parameter.
"""

import json
import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compilerllm.ir.recipe import (
    Concat,
    Convert,
    Literal,
    Permute,
    Read,
    Recipe,
    Relayout,
    Reshape,
    Shift,
    Slice,
)
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.errors import MissingFile, MissingTensor, WeightError, WrongShape
from compilerllm.kernels.launch.files import BLOCKS, GgufFile, TensorInfo, read_safetensors

_CHUNK = 1 << 22  # weights dequantised at a time: bounds the memory beside the result


class WeightSource(Protocol):
    """Tensors by name, one at a time."""

    def names(self) -> Iterable[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """IR dtype or GGUF block type, and shape. Raises ``MissingTensor``."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of the first axis; block types give uint8 ``[..., bytes per row]``. May be a view."""
        ...


class FileSource:
    """A checkpoint of safetensors files, or one GGUF file, mapped into memory."""

    def __init__(
        self, place: Path, tensors: Mapping[str, TensorInfo], maps: Mapping[Path, mmap.mmap]
    ) -> None:
        self.place, self.tensors, self._maps = place, tensors, maps

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        info = self._info(name)
        return info.dtype, info.shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        info = self._info(name)
        data = self._maps[info.file]
        if info.dtype in BLOCKS:
            weights, size = BLOCKS[info.dtype]
            dtype, shape = torch.uint8, (*info.shape[:-1], info.shape[-1] // weights * size)
        elif info.dtype in TORCH_DTYPES:
            dtype, shape = TORCH_DTYPES[info.dtype], info.shape
        else:
            raise WeightError(
                f"{info.file}: tensor {name} is {info.dtype}, which cannot be loaded; convert the checkpoint"
            )
        if not info.nbytes:
            return torch.empty(shape, dtype=dtype)
        count = info.nbytes // dtype.itemsize
        if info.offset % dtype.itemsize:  # torch wants aligned storage; nobody writes such files on purpose
            flat = torch.frombuffer(bytearray(data[info.offset : info.offset + info.nbytes]), dtype=dtype)
        else:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=info.offset)
        whole = flat.view(shape)
        return whole if stop is None else whole[start:stop]

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            import difflib

            near = difflib.get_close_matches(name, self.tensors, n=2)
            hint = f" (it has {', '.join(near)})" if near else ""
            raise MissingTensor(
                f"{self.place} has no tensor {name}{hint}; the checkpoint is incomplete or of another model"
            )
        return self.tensors[name]


def open_safetensors(place: Path) -> FileSource:
    """A folder with ``model.safetensors`` or an index and its shards, or one file. Raises ``WeightError``."""
    index = place / "model.safetensors.index.json"
    if place.is_file():
        files = [place]
    elif index.is_file():
        try:
            names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise MissingFile(f"{index} is no valid index ({error}); download it again") from error
        files = [place / name for name in names]
        for file in files:
            if not file.is_file():
                raise MissingFile(
                    f"{place} lacks the shard {file.name} that its index names; download the checkpoint again"
                )
    else:
        files = sorted(place.glob("*.safetensors"))
        if not files:
            raise MissingFile(
                f"{place} has no .safetensors file; give a folder with safetensors weights, or a GGUF file"
            )
    tensors: dict[str, TensorInfo] = {}
    maps: dict[Path, mmap.mmap] = {}
    for file in files:
        maps[file], found = read_safetensors(file)
        tensors |= found
    return FileSource(place, tensors, maps)


def open_gguf(place: Path) -> FileSource:
    """One GGUF file. Raises ``WeightError``."""
    file = GgufFile(place)
    return FileSource(place, file.tensors, {place: file.data})


class DummySource:
    """Made-up weights for tests and benchmarks: the same for the same name, shape and dtype on every machine.

    Matrices are about N(0, 0.02²); vectors lie near 1 where their name says norm, near 0 elsewhere.
    """

    def __init__(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self.tensors:
            raise MissingTensor(
                f"the dummy checkpoint has no tensor {name}; build it from the model's own parameter list"
            )
        return self.tensors[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        dtype, shape = self.describe(name)
        if dtype in BLOCKS:
            raise WeightError(
                f"dummy weights cannot be packed as {dtype}; use load_format=auto for packed weights"
            )
        size = 1
        for extent in shape:
            size *= extent
        # A big matrix repeats a block of random numbers: drawing billions would take longer than the benchmark.
        block = torch.randn(
            min(size, 1 << 20), generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
        )
        values = block.mul_(0.02).to(TORCH_DTYPES[dtype])
        if size > values.numel():
            values = values.repeat(-(-size // values.numel()))[:size]
        if len(shape) == 1 and "norm" in name and name.endswith("weight"):
            values = values + 1
        whole = values.view(shape)
        return whole if stop is None else whole[start:stop]


@dataclass(frozen=True)
class SourceSpec:
    """Where an artifact's weights are: ``kind`` safetensors, gguf or dummy; ``tensors`` only for dummy."""

    kind: str
    path: str = ""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None

    def open(self) -> WeightSource:
        """Raises ``WeightError`` where a file is missing or damaged."""
        match self.kind:
            case "safetensors":
                return open_safetensors(Path(self.path))
            case "gguf":
                return open_gguf(Path(self.path))
            case "dummy":
                return DummySource(self.tensors or {})
        raise WeightError(f"unknown kind of checkpoint {self.kind!r}; known: safetensors, gguf, dummy")

    def to_json(self) -> dict[str, Any]:
        """What a manifest stores; ``from_json`` reads it back."""
        return {"kind": self.kind, "path": self.path} | (
            {"tensors": dict(self.tensors)} if self.tensors else {}
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "SourceSpec":
        tensors = {k: (str(d), tuple(s)) for k, (d, s) in data.get("tensors", {}).items()} or None
        return SourceSpec(data["kind"], data.get("path", ""), tensors)


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A tensor on its way: block types keep their logical shape beside the bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Tensor


def execute(
    recipe: Recipe, source: WeightSource, *, shape: tuple[int, ...] | None = None, name: str = ""
) -> Tensor:
    """Carry out a recipe (all steps but ``relayout``, which the target's runtime does) and give the parameter.

    Packed parameters come as uint8 blocks ``[..., bytes per row]``. ``shape`` is checked where it is given; ``name`` is
    the parameter's, for errors. The result may share memory with the checkpoint's file. Raises ``WeightError``.
    """
    try:
        loaded = _run(recipe, source)
    except (ValueError, RuntimeError, IndexError) as error:
        raise WrongShape(f"parameter {name or '?'} cannot be made from the checkpoint: {error}") from error
    if shape is not None and loaded.shape != shape:
        raise WrongShape(
            f"parameter {name or '?'} must be {list(shape)}, but the checkpoint gives {list(loaded.shape)}; the weights belong "
            "to another configuration of the model"
        )
    return loaded.data


def _run(recipe: Recipe, source: WeightSource) -> _Loaded:
    match recipe:
        case Read(name=name):
            dtype, shape = source.describe(name)
            return _Loaded(dtype, shape, source.read(name))
        case Literal(dtype=dtype, shape=shape, values=values):
            return _Loaded(
                dtype, shape, torch.tensor(values, dtype=torch.float64).to(TORCH_DTYPES[dtype]).view(shape)
            )
        case Slice(source=Read(name=name), axis=0, start=start, stop=stop):  # reads no more than it needs
            dtype, shape = source.describe(name)
            _check_slice(shape, 0, start, stop)
            return _Loaded(dtype, (stop - start, *shape[1:]), source.read(name, start, stop))
        case Slice(source=inner, axis=axis, start=start, stop=stop):
            return _slice(_run(inner, source), axis, start, stop)
        case Convert(source=inner, dtype=dtype):
            return _convert(_run(inner, source), dtype)
        case Shift(source=inner, amount=amount):
            wide = _convert(_run(inner, source), "f32")
            return _Loaded("f32", wide.shape, wide.data + amount)
        case Concat(sources=parts, axis=axis):
            return _concat([_run(p, source) for p in parts], axis)
        case Permute(source=inner, order=order):
            loaded = _run(inner, source)
            if loaded.dtype in BLOCKS and order[-1] != len(order) - 1:
                raise ValueError(f"blocks of {loaded.dtype} run along the last axis, which cannot move")
            return _Loaded(loaded.dtype, tuple(loaded.shape[i] for i in order), loaded.data.permute(order))
        case Reshape(source=inner, shape=shape):
            return _reshape(_run(inner, source), shape)
        case Relayout(layout=layout):
            raise ValueError(f"layout {layout} is made by the target's runtime, not by the loader")


def _check_slice(shape: tuple[int, ...], axis: int, start: int, stop: int) -> None:
    if not (0 <= start <= stop <= shape[axis]):
        raise ValueError(f"rows [{start}, {stop}) lie outside axis {axis} of {list(shape)}")


def _slice(loaded: _Loaded, axis: int, start: int, stop: int) -> _Loaded:
    axis %= len(loaded.shape)
    _check_slice(loaded.shape, axis, start, stop)
    shape = (*loaded.shape[:axis], stop - start, *loaded.shape[axis + 1 :])
    if loaded.dtype in BLOCKS and axis == len(shape) - 1:
        weights, size = BLOCKS[loaded.dtype]
        if start % weights or stop % weights:
            raise ValueError(
                f"columns [{start}, {stop}) cut through blocks of {weights} {loaded.dtype} weights"
            )
        start, stop = start // weights * size, stop // weights * size
    return _Loaded(loaded.dtype, shape, loaded.data.narrow(axis, start, stop - start))


def _concat(parts: list[_Loaded], axis: int) -> _Loaded:
    if len({p.dtype for p in parts}) > 1:
        raise ValueError(f"parts of different dtypes do not join: {', '.join(p.dtype for p in parts)}")
    axis %= len(parts[0].shape)
    shape = list(parts[0].shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    return _Loaded(parts[0].dtype, tuple(shape), torch.cat([p.data for p in parts], dim=axis))


def _reshape(loaded: _Loaded, shape: tuple[int, ...]) -> _Loaded:
    if loaded.dtype not in BLOCKS:
        return _Loaded(loaded.dtype, shape, loaded.data.reshape(shape))
    if not shape or shape[-1] != loaded.shape[-1]:
        raise ValueError(f"rows of {loaded.shape[-1]} {loaded.dtype} weights cannot become {list(shape)}")
    return _Loaded(loaded.dtype, shape, loaded.data.reshape(*shape[:-1], loaded.data.shape[-1]))


def _convert(loaded: _Loaded, dtype: str) -> _Loaded:
    if loaded.dtype == dtype:
        return loaded
    if dtype in BLOCKS:
        raise ValueError(f"{loaded.dtype} weights cannot be packed as {dtype} while loading")
    if loaded.dtype not in BLOCKS:
        return _Loaded(dtype, loaded.shape, loaded.data.to(TORCH_DTYPES[dtype]))
    return _Loaded(
        dtype, loaded.shape, dequantize(loaded.data, loaded.dtype, TORCH_DTYPES[dtype]).view(loaded.shape)
    )


def dequantize(blocks: Tensor, dtype: str, out: torch.dtype) -> Tensor:
    """GGUF blocks (uint8 ``[..., bytes per row]``) to dense weights ``[..., K]``, some rows at a time."""
    weights, size = BLOCKS[dtype]
    rows = blocks.reshape(-1, blocks.shape[-1]).contiguous()
    width = blocks.shape[-1] // size * weights
    result = torch.empty((rows.shape[0], width), dtype=out)
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        if dtype in _FAST:
            wide = _dequantize_32(part.view(-1, size), dtype).view(-1, width)
        else:
            wide = _dequantize_by_package(part, dtype)
        result[start : start + step] = wide
    return result.view(*blocks.shape[:-1], width)


# The block types of 32 weights that most files consist of; the gguf package's numpy code takes some ten times as long.
_FAST = frozenset({"q4_0", "q4_1", "q5_0", "q8_0"})


def _dequantize_32(blocks: Tensor, dtype: str) -> Tensor:
    """uint8 [B, bytes per block] to f32 [B, 32]: scale * code (+ minimum), codes of 4 bits low halves first."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if dtype == "q8_0":
        return blocks[:, 2:].view(torch.int8) * scale
    nibbles = blocks[:, -16:]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=1)
    if dtype == "q4_1":
        return codes * scale + blocks[:, 2:4].contiguous().view(torch.float16).float()
    if dtype == "q5_0":
        high = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return (codes | (high.view(-1, 32) << 4)).to(torch.int8).sub_(16) * scale
    return codes.to(torch.int8).sub_(8) * scale


def _dequantize_by_package(rows: Tensor, dtype: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as from_blocks

    return torch.from_numpy(from_blocks(rows.numpy(), GGMLQuantizationType[dtype.upper()]))
