"""References in generated C++: dims, types and pointers as C expressions."""

from dataclasses import dataclass

import sympy

from compilerllm.ir.dims import Dim, FloorDiv, dim
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import Ref

C_TYPES: dict[str, str] = {
    "f32": "float", "bf16": "bf16", "f64": "double", "i64": "int64_t", "i32": "int32_t", "i16": "int16_t",
    "i8": "int8_t", "u8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip


def c_dim(value: Dim) -> str:
    """A dimension as C: FloorDiv becomes integer division (operands are not negative)."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, FloorDiv):
        return f"(({c_dim(dim(value.args[0]))}) / ({c_dim(dim(value.args[1]))}))"
    if isinstance(value, sympy.Symbol):
        return str(value.name)
    if isinstance(value, sympy.Add):
        return "(" + " + ".join(c_dim(dim(a)) for a in value.args) + ")"
    if isinstance(value, sympy.Mul):
        return "(" + " * ".join(c_dim(dim(a)) for a in value.args) + ")"
    if isinstance(value, sympy.Pow) and value.args[1].is_Integer and int(value.args[1]) > 0:
        return "(" + " * ".join([c_dim(dim(value.args[0]))] * int(value.args[1])) + ")"
    raise UnsupportedByTarget(
        f"the size {value} cannot be computed by generated code; compile with --optimization-level 0"
    )


@dataclass(frozen=True)
class CRef(Ref):
    """A reference whose ``base`` is a C expression of a pointer."""

    @property
    def c_type(self) -> str:
        """The C++ type of an element."""
        return C_TYPES[self.dtype]

    @property
    def pointer(self) -> str:
        """C expression of a pointer to the first element."""
        return self.base if self.offset == 0 else f"({self.base} + {c_dim(self.offset)})"

    def c_rows(self, lead: int) -> tuple[str, int, str] | None:
        """``rows`` with row count and row stride as C."""
        found = self.rows(lead)
        return found and (c_dim(found[0]), found[1], c_dim(found[2]))
