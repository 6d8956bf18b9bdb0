"""Types of values: tensors with symbolic shapes, states that live between steps, and a step's metadata."""

from dataclasses import dataclass
from typing import Literal

from compilerllm.ir.dims import Dim, dim, print_dim, product

# Bytes an element. Block-quantised types give (bytes, weights) a block of GGUF's layout, along the last axis.
DTYPE_BYTES: dict[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
QUANTIZED_BLOCKS: dict[str, tuple[int, int]] = {"q4_0": (18, 32), "q4_1": (20, 32), "q8_0": (34, 32)}
FLOAT_DTYPES = frozenset({"f64", "f32", "f16", "bf16"})
DTYPES = frozenset(DTYPE_BYTES) | frozenset(QUANTIZED_BLOCKS)


@dataclass(frozen=True)
class TensorType:
    """Dtype and shape, outermost axis first. Text: ``bf16[T, 1024]``, a scalar is ``f32[]``."""

    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(sorted(DTYPES))}")
        object.__setattr__(self, "shape", tuple(dim(d) for d in self.shape))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes when stored densely; quantised types must have a last axis that is a multiple of the block."""
        if self.dtype in QUANTIZED_BLOCKS:
            size, weights = QUANTIZED_BLOCKS[self.dtype]
            return product(self.shape[:-1]) * (self.shape[-1] // weights) * size
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED_BLOCKS

    def with_shape(self, *shape: Dim) -> "TensorType":
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: str) -> "TensorType":
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(print_dim(d) for d in self.shape)}]"


@dataclass(frozen=True)
class StateKind:
    """How a kind of state is addressed and shared; the pool and the scheduler know nothing else of it."""

    addressing: Literal["paged", "slot"]
    prefix: Literal["any_block", "checkpoint", "none"]  # what a shared prefix may reuse
    rollback: Literal["truncate", "snapshot", "none"]  # what speculation may undo
    fork: Literal["share", "copy"]  # what n > 1 and beams do
    fields: tuple[str, ...]  # whole-number parameters it must have
    optional: tuple[str, ...] = ()


STATE_KINDS: dict[str, StateKind] = {
    # Keys and values a token: 2 * heads * dim elements.
    "paged_kv": StateKind("paged", "any_block", "truncate", "share", ("heads", "dim"), ("window",)),
    # The last ``width`` inputs of a short convolution, ``channels`` each.
    "slot_conv": StateKind("slot", "none", "snapshot", "copy", ("channels", "width")),
    # A running matrix a sequence, ``heads`` of ``rows`` by ``columns``.
    "slot_matrix": StateKind("slot", "none", "snapshot", "copy", ("heads", "rows", "columns")),
}


@dataclass(frozen=True)
class StateType:
    """What lives between steps. Text: ``paged_kv<bf16, heads=8, dim=128>``; ``fields`` are sorted by kind."""

    kind: str
    dtype: str
    fields: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        kind = STATE_KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"unknown state kind {self.kind!r}; known: {', '.join(sorted(STATE_KINDS))}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"a state cannot hold dtype {self.dtype!r}")
        given = dict(self.fields)
        missing = [f for f in kind.fields if f not in given]
        extra = [f for f in given if f not in kind.fields + kind.optional]
        if missing or extra:
            raise ValueError(
                f"{self.kind} needs {', '.join(kind.fields)}; missing {missing}, unknown {extra}"
            )
        order = [f for f in kind.fields + kind.optional if f in given]
        object.__setattr__(self, "fields", tuple((f, given[f]) for f in order))

    def __getitem__(self, field: str) -> int:
        return dict(self.fields)[field]

    def get(self, field: str) -> int | None:
        """The field, or None where an optional one is left out."""
        return dict(self.fields).get(field)

    @property
    def addressing(self) -> str:
        return STATE_KINDS[self.kind].addressing

    @property
    def elements_per_unit(self) -> int:
        """Elements a token (paged) or a sequence (slot)."""
        match self.kind:
            case "paged_kv":
                return 2 * self["heads"] * self["dim"]
            case "slot_conv":
                return self["channels"] * self["width"]
            case _:
                return self["heads"] * self["rows"] * self["columns"]

    @property
    def bytes_per_unit(self) -> int:
        """Bytes a token (paged) or a sequence (slot), without padding a kernel's layout may add."""
        return self.elements_per_unit * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.kind}<{self.dtype}, {', '.join(f'{k}={v}' for k, v in self.fields)}>"


@dataclass(frozen=True)
class StepType:
    """A step's metadata (``ir.step.StepInputs``): positions, query starts, lengths, block tables, slots."""

    def __str__(self) -> str:
        return "step"


STEP = StepType()
Type = TensorType | StateType | StepType
