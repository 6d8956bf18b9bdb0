"""From recipes to memory that kernels read: executes each parameter once, packs it where its recipe says so."""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from compilerllm.ir.recipe import Recipe, Relayout, parse_recipe, print_recipe
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.files import BLOCKS
from compilerllm.kernels.launch.library import LAYOUTS, Library, packed_bytes
from compilerllm.kernels.launch.memory import Region, aligned


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the manifest has it: IR dtype, shape, recipe."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe

    @staticmethod
    def parse(name: str, dtype: str, shape: Iterable[int], recipe: str) -> "ParameterSpec":
        """From the manifest's text. Raises ``RecipeError``."""
        return ParameterSpec(name, dtype, tuple(shape), parse_recipe(recipe))

    @property
    def layout(self) -> str:
        """The kernels' layout; empty where the parameter is stored as it is."""
        return self.recipe.layout if isinstance(self.recipe, Relayout) else ""

    @property
    def identity(self) -> str:
        """Equal for parameters whose bytes are equal, so that tied weights are stored once."""
        return f"{self.dtype}{list(self.shape)} {print_recipe(self.recipe)}"


def dense_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a parameter as it comes out of the loader, before packing; block types in whole blocks."""
    weights, size = BLOCKS.get(dtype) or (1, TORCH_DTYPES[dtype].itemsize)
    return math.prod(shape) // weights * size


def stored_bytes(spec: ParameterSpec) -> int:
    """Bytes the parameter takes in memory, padding of its layout included."""
    base, experts, _ = split_layout(spec.layout)
    if not base:
        return dense_bytes(spec.dtype, spec.shape)
    if experts:
        return spec.shape[0] * packed_bytes(base, spec.shape[1], spec.shape[2])
    return packed_bytes(base, spec.shape[0], spec.shape[1])


def split_layout(layout: str) -> tuple[str, bool, bool]:
    """``q4_1_n16_gu16`` as (kernel layout, one matrix an expert, gate and up in alternating panels)."""
    if layout == "gu16":
        return "", False, True
    experts = layout.endswith("_experts")
    layout = layout.removesuffix("_experts")
    gated = layout.endswith("_gu16")
    base = layout.removesuffix("_gu16")
    if base and base not in LAYOUTS:
        raise ArtifactError(f"unknown weight layout {layout!r} in the artifact; rebuild it")
    return base, experts, gated


def place_parameters(
    specs: Iterable[ParameterSpec],
) -> tuple[list[tuple[ParameterSpec, int, list[ParameterSpec]]], int]:
    """Each distinct parameter with its offset and all that share its bytes; and bytes in all."""
    by_identity: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        by_identity.setdefault(spec.identity, []).append(spec)
    places, total = [], 0
    for same in by_identity.values():
        places.append((same[0], total, same))
        total += aligned(stored_bytes(same[0]))
    return places, total


def load_parameters(
    specs: Iterable[ParameterSpec],
    read: Callable[[Recipe], torch.Tensor],
    library: Library,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Region, Mapping[str, int]]:
    """Fill one region with all parameters; gives it and each name's address.

    ``read`` executes a recipe (all steps but relayout) and gives a tensor, or uint8 blocks [N, row bytes] of a packed
    dtype. At most one parameter exists twice at a time.
    """
    places, total = place_parameters(specs)
    region = Region(total, "weights")
    addresses: dict[str, int] = {}
    done = 0
    for spec, offset, same in places:
        store(spec, read, library, region.address + offset)
        for twin in same:
            addresses[twin.name] = region.address + offset
        done += stored_bytes(spec)
        if on_progress is not None:
            on_progress(done, total)
    return region, addresses


def store(
    spec: ParameterSpec, read: Callable[[Recipe], torch.Tensor], library: Library, address: int
) -> None:
    """Write one parameter at ``address``. Raises ``ArtifactError`` where the weights do not fit the graph."""
    recipe = spec.recipe.source if isinstance(spec.recipe, Relayout) else spec.recipe
    tensor = read(recipe).contiguous()
    base, experts, gated = split_layout(spec.layout)
    quantized = spec.dtype in BLOCKS
    if not quantized:
        if tuple(tensor.shape) != spec.shape:
            raise ArtifactError(
                f"parameter {spec.name} must be {list(spec.shape)}, but the checkpoint gives {list(tensor.shape)}: "
                "the artifact was built for another model; rebuild it"
            )
        tensor = tensor.to(TORCH_DTYPES[spec.dtype])
    if gated and not base:  # a bias in the order of its weight's panels
        tensor = tensor.view(2, -1, 16).transpose(0, 1).contiguous()
    if not base:
        torch_copy(tensor, address)
        return
    rows, columns = spec.shape[-2], spec.shape[-1]
    row_bytes = dense_bytes(spec.dtype, (columns,))
    matrix_bytes = packed_bytes(base, rows, columns)
    for expert in range(spec.shape[0] if experts else 1):
        source = tensor.data_ptr() + expert * rows * row_bytes
        target = address + expert * matrix_bytes
        if gated:
            half = rows // 2
            library.pack(base, spec.dtype, target, source, half, columns, 0, 2)
            library.pack(base, spec.dtype, target, source + half * row_bytes, half, columns, 16, 2)
        else:
            library.pack(base, spec.dtype, target, source, rows, columns)


def torch_copy(tensor: torch.Tensor, address: int) -> None:
    """Copy a dense tensor's bytes to ``address``."""
    ctypes.memmove(address, tensor.data_ptr(), tensor.numel() * tensor.element_size())
