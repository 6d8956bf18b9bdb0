"""From recipes to weights on the device: one allocation, each parameter streamed through pinned memory, or made up there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from compilerllm.ir.recipe import Concat, Convert, Literal, Permute, Recipe, Relayout, Reshape, Shift, Slice
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.files import BLOCKS
from compilerllm.kernels.launch.gpu.backend import ALIGNMENT, Backend
from compilerllm.kernels.launch.packing import ParameterSpec, dense_bytes
from compilerllm.kernels.launch.weights import WeightSource, execute

STAGING_BYTES = 32 << 20
_BUFFERS = 3
DUMMY_RANGE = 1e-3  # made-up weights lie within it


@dataclass(frozen=True)
class Placement:
    """Where each distinct parameter goes: spec, byte offset, and the names that share it."""

    entries: tuple[tuple[ParameterSpec, int, tuple[str, ...]], ...]
    nbytes: int

    @staticmethod
    def of(specs: Iterable[ParameterSpec]) -> "Placement":
        """Equal recipes once (tied weights), each at a multiple of 256 bytes. Raises ``ArtifactError`` for packed layouts."""
        same: dict[str, list[ParameterSpec]] = {}
        for spec in specs:
            if isinstance(spec.recipe, Relayout):
                raise ArtifactError(
                    f"parameter {spec.name} is packed as {spec.layout}, which CUDA kernels do not read. Build the artifact again."
                )
            same.setdefault(spec.identity, []).append(spec)
        entries, at = [], 0
        for group in same.values():
            entries.append((group[0], at, tuple(s.name for s in group)))
            at += -(-dense_bytes(group[0].dtype, group[0].shape) // ALIGNMENT) * ALIGNMENT
        return Placement(tuple(entries), at)


def load_parameters(
    backend: Backend,
    placement: Placement,
    source: WeightSource,
    *,
    made_up: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[torch.Tensor, Mapping[str, int]]:
    """The weights' memory and each name's address. ``made_up``: random numbers instead of the source's, made on the device.

    Raises ``DeviceOutOfMemory``, ``WeightError``, and ``ArtifactError`` where the weights do not fit the graph.
    """
    memory = backend.allocate(placement.nbytes, "weights")
    stream = _Stream(backend)
    addresses: dict[str, int] = {}
    for spec, at, names in placement.entries:
        address = memory.data_ptr() + at
        if made_up and not isinstance(spec.recipe, Literal):
            _make_up(backend, spec, address)
        else:
            _send(stream, spec, source, address)
        addresses |= dict.fromkeys(names, address)
        if on_progress is not None:
            on_progress(at + dense_bytes(spec.dtype, spec.shape), placement.nbytes)
    backend.synchronize()
    return memory, addresses


def _send(stream: "_Stream", spec: ParameterSpec, source: WeightSource, address: int) -> None:
    """Copy a parameter, the parts of a stacked one after one another."""
    done = 0
    expected = dense_bytes(spec.dtype, spec.shape)
    for piece in _pieces(spec.recipe):
        tensor = execute(piece, source, name=spec.name)
        if spec.dtype not in BLOCKS:
            if tensor.dim() != len(spec.shape) or tensor.shape[1:] != spec.shape[1:]:
                raise _misfit(spec, list(tensor.shape))
            tensor = tensor.to(TORCH_DTYPES[spec.dtype])
        nbytes = tensor.numel() * tensor.element_size()
        if done + nbytes > expected:
            raise _misfit(spec, list(tensor.shape))
        stream.send(tensor, address + done)
        done += nbytes
    if done != expected:
        raise _misfit(spec, f"{done:,} of {expected:,} bytes")


def _misfit(spec: ParameterSpec, found: object) -> ArtifactError:
    return ArtifactError(
        f"parameter {spec.name} must be {list(spec.shape)}, but the checkpoint gives {found}: the artifact was built for "
        "another model; rebuild it"
    )


def _pieces(recipe: Recipe) -> Sequence[Recipe]:
    """Recipes whose results, one after another, are the parameter: the rows of a concatenation need no copy of their own."""
    if isinstance(recipe, Concat) and recipe.axis == 0:
        return [piece for part in recipe.sources for piece in _pieces(part)]
    return [recipe]


class _Stream:
    """Pinned buffers in turn: while one is copied to the device, the next is filled."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers = [backend.staging(STAGING_BYTES) for _ in range(_BUFFERS)]
        self._marks = [backend.mark() for _ in range(_BUFFERS)]
        self._used = [False] * _BUFFERS
        self._next = 0

    def send(self, tensor: torch.Tensor, address: int) -> None:
        """Copy a CPU tensor's elements, row-major, to the device."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), STAGING_BYTES):
            part = flat[start : start + STAGING_BYTES]
            index = self._next
            self._next = (index + 1) % _BUFFERS
            if self._used[index]:
                self._marks[index].wait()
            self._buffers[index][: len(part)].copy_(part)
            self._backend.upload(address + start, self._buffers[index].data_ptr(), len(part))
            self._marks[index].record()
            self._used[index] = True


def _make_up(backend: Backend, spec: ParameterSpec, address: int) -> None:
    """Uniform in [-0.001, 0.001], every parameter from the same seed, so that layers are alike."""
    if spec.dtype in BLOCKS:
        raise ArtifactError(
            f"made-up weights cannot be packed as {spec.dtype}; leave out --load-format dummy"
        )
    tensor = backend.tensor(address, TORCH_DTYPES[spec.dtype], spec.shape)
    amount = _shift(spec.recipe)

    def fill() -> None:
        if not tensor.is_floating_point():
            tensor.zero_()
            return
        tensor.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=torch.Generator(backend.device).manual_seed(0))
        if amount:
            tensor.add_(amount)

    backend.do(fill)


def _shift(recipe: Recipe) -> float:
    """What a recipe adds to the checkpoint's numbers (a norm stored as its distance from 1)."""
    match recipe:
        case Shift(source=inner, amount=amount):
            return amount + _shift(inner)
        case Slice(source=inner) | Convert(source=inner) | Permute(source=inner) | Reshape(source=inner):
            return _shift(inner)
    return 0.0
