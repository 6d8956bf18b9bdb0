"""References in generated C++: dims, types and pointers as C expressions."""

from dataclasses import dataclass

from compilerllm.ir.dims import Dim
from compilerllm.kernels.refs import Ref, size_expression

C_TYPES: dict[str, str] = {
    "f32": "float", "bf16": "bf16", "f64": "double", "i64": "int64_t", "i32": "int32_t", "i16": "int16_t",
    "i8": "int8_t", "u8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip


def c_dim(value: Dim) -> str:
    """A dimension as C. Raises ``UnsupportedByTarget``."""
    return size_expression(value, "/")


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
