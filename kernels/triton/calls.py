"""A bucket's program before its kernels are compiled: arguments, calls in order, and the memory they need."""

from dataclasses import dataclass, field
from typing import Any

from compilerllm.ir.dims import Dim
from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.dtypes import ITEM_BYTES
from compilerllm.kernels.launch.gpu.program import NO_COST, Choice, Cost, Extent, Pointer
from compilerllm.kernels.spec import KernelSpec
from compilerllm.kernels.triton.source import KernelSource


@dataclass(frozen=True)
class Typed:
    """A pointer and what it points to, an IR dtype. aligned: to 16 bytes."""

    pointer: Pointer
    dtype: str
    aligned: bool = True


Arg = Typed | Extent | int | float
GridEntry = int | Extent


@dataclass(frozen=True)
class Rows:
    """A tensor as ``count`` rows of ``columns`` dense elements, ``stride`` elements apart."""

    pointer: Pointer
    count: Dim
    columns: int
    stride: int
    dtype: str

    @property
    def arg(self) -> Typed:
        """The first row's pointer, as an argument."""
        nbytes = ITEM_BYTES[self.dtype]
        return Typed(
            self.pointer, self.dtype, self.pointer.offset % 16 == 0 and self.stride * nbytes % 16 == 0
        )


@dataclass(frozen=True)
class Call:
    """A launch before its kernel is compiled. ``source`` is None for a library call (``library``, ``fixed``)."""

    source: KernelSource | None
    library: str
    types: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    grid: tuple[GridEntry, GridEntry, GridEntry]
    args: tuple[Pointer | Extent | int | float, ...]
    node: int  # index of the node in the flat graph
    label: str
    spec: KernelSpec
    cost: Cost = NO_COST
    pick: tuple[int, int] | None = None  # of ``Emitted.choices``: (choice, candidate); None: it always runs


@dataclass(eq=False)
class Memory:
    """Bytes of the arena, needed while nodes [first, last] run; ``offset`` is given by the planner."""

    name: str
    bytes: int
    first: int
    last: int
    offset: int = -1


@dataclass
class Emitted:
    """One bucket: launches in order, the memory they need, counters used, choices left to the machine that serves."""

    bucket: Bucket
    calls: list[Call] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    counters: int = 0
    choices: list[Choice] = field(default_factory=list)
