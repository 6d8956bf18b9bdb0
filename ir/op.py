"""The op registry's machinery: an op's signature, type rule, cost and reduction property.

Definitions stand in ``ir/ops``; ``lookup`` loads them all. One entry is all an op needs to be printed, parsed,
verified, costed and matched; a reference implementation in ``kernels/reference`` makes it run.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module

from compilerllm.ir import attributes
from compilerllm.ir.dims import Dim
from compilerllm.ir.errors import InvalidGraph, TypeMismatch, UnknownOp
from compilerllm.ir.graph import Attr, Node, Value
from compilerllm.ir.types import TensorType, Type


class Reduction(Enum):
    """What an op sums over, hence whose order of addition can change its bits."""

    NONE = "none"  # pointwise or data movement
    ROW = "row"  # within one row (norms, softmax)
    CONTRACTION = "contraction"  # over K of a matrix product
    CONTEXT = "context"  # over a sequence's keys


@dataclass(frozen=True)
class Cost:
    """Bytes that must move (inputs once, outputs once) and floating-point operations, as expressions."""

    bytes: Dim
    flops: Dim


@dataclass(frozen=True)
class Operand:
    """One place of a signature."""

    name: str
    optional: bool = False
    variadic: bool = False


class OpCall:
    """What a type rule sees: operands by name, attributes, and ways to refuse with a reason."""

    def __init__(self, op: "Op", inputs: tuple[Value | None, ...], attrs: Mapping[str, Attr]) -> None:
        self.op, self.inputs, self.attrs = op, inputs, attrs

    def optional(self, name: str) -> TensorType | None:
        """An operand's tensor type, None where it is left out. Raises ``TypeMismatch`` for a state or the step."""
        index = next(i for i, o in enumerate(self.op.operands) if o.name == name)
        value = self.inputs[index] if index < len(self.inputs) else None
        return None if value is None else self._tensor(name, value)

    def __getitem__(self, name: str) -> TensorType:
        found = self.optional(name)
        if found is None:
            raise TypeMismatch(f"{self.op.name}: operand {name!r} is missing")
        return found

    def raw(self, name: str) -> Type | None:
        """An operand's type, whatever it is; None where it is left out."""
        index = next(i for i, o in enumerate(self.op.operands) if o.name == name)
        value = self.inputs[index] if index < len(self.inputs) else None
        return None if value is None else value.type

    @property
    def variadic(self) -> tuple[TensorType, ...]:
        """Types of the variadic operand's values."""
        start = next(i for i, o in enumerate(self.op.operands) if o.variadic)
        return tuple(self._tensor(f"#{i}", v) for i, v in enumerate(self.inputs[start:]) if v is not None)

    def _tensor(self, name: str, value: Value) -> TensorType:
        if not isinstance(value.type, TensorType):
            raise TypeMismatch(f"{self.op.name}: operand {name!r} must be a tensor, but is {value.type}")
        return value.type

    def require(self, condition: bool, message: str) -> None:
        """Raise ``TypeMismatch`` with ``message``, unless ``condition`` holds."""
        if not condition:
            raise TypeMismatch(f"{self.op.name}: {message}")

    def same(self, a: Dim, b: Dim, what: str) -> None:
        """Require two extents to be equal; ``what`` names them in the error."""
        self.require(a == b, f"{what}: {a} against {b}")

    def integer(self, name: str, default: int | None = None) -> int:
        return attributes.integer(self.op.name, self.attrs, name, default)

    def integers(self, name: str) -> tuple[int, ...]:
        return attributes.integers(self.op.name, self.attrs, name)

    def text(self, name: str, default: str | None = None) -> str:
        return attributes.text(self.op.name, self.attrs, name, default)

    def dimension(self, name: str) -> Dim:
        return attributes.dimension(self.op.name, self.attrs, name)

    def dimensions(self, name: str) -> tuple[Dim, ...]:
        return attributes.dimensions(self.op.name, self.attrs, name)


TypeRule = Callable[[OpCall], tuple[TensorType, ...]]
FlopRule = Callable[[Node], Dim]


@dataclass(frozen=True)
class Op:
    """One registry entry. ``attrs`` lists allowed attribute names; those ending in ``?`` may be left out."""

    name: str
    meaning: str
    operands: tuple[Operand, ...]
    attrs: tuple[str, ...]
    rule: TypeRule | None  # None: types are declared by whoever makes the node (call, group, aten)
    flops: FlopRule
    reduction: Reduction
    reads_state: bool = False
    writes_state: bool = False
    effects: bool = False  # must not be removed, duplicated or moved over others with effects

    @property
    def pure(self) -> bool:
        """Whether it may be removed where nobody uses its results."""
        return not (self.writes_state or self.effects)

    @property
    def signature(self) -> str:
        """As ``define`` was given it: ``linear(x, weight, bias?)``."""
        parts = ("*" * o.variadic + o.name + "?" * o.optional for o in self.operands)
        return f"{self.name}({', '.join(parts)})"

    def operand_index(self, name: str) -> int:
        """Place of an operand in the signature."""
        return next(i for i, o in enumerate(self.operands) if o.name == name)

    def check_attrs(self, attrs: Mapping[str, Attr]) -> None:
        """Raises ``TypeMismatch`` for an attribute that is unknown or missing."""
        known = {a.rstrip("?") for a in self.attrs}
        needed = {a for a in self.attrs if not a.endswith("?")}
        if unknown := sorted(set(attrs) - known):
            raise TypeMismatch(
                f"{self.name}: unknown attribute {unknown[0]!r}; it takes {', '.join(sorted(known)) or 'none'}"
            )
        if missing := sorted(needed - set(attrs)):
            raise TypeMismatch(f"{self.name}: attribute {missing[0]!r} is missing")

    def check_operands(self, inputs: tuple[Value | None, ...]) -> None:
        """Raises ``TypeMismatch`` for too many operands, or one that is missing."""
        variadic = bool(self.operands) and self.operands[-1].variadic
        if len(inputs) > len(self.operands) and not variadic:
            raise TypeMismatch(f"{self.name}: {len(inputs)} operands, but it takes {len(self.operands)}")
        for index, operand in enumerate(self.operands):
            if not (operand.optional or operand.variadic) and (index >= len(inputs) or inputs[index] is None):
                raise TypeMismatch(f"{self.name}: operand {operand.name!r} is missing")

    def infer(
        self, inputs: tuple[Value | None, ...], attrs: Mapping[str, Attr]
    ) -> tuple[TensorType, ...] | None:
        """The output types, or None where the op leaves them to its maker. Raises ``TypeMismatch``."""
        self.check_operands(inputs)
        self.check_attrs(attrs)
        if self.rule is None:
            return None
        try:
            return self.rule(OpCall(self, inputs, attrs))
        except InvalidGraph as error:  # an attribute of another kind
            raise TypeMismatch(str(error)) from error
        except (IndexError, TypeError, ValueError) as error:
            # Rules read axes and numbers freely; an operand of too small a rank ends here.
            given = ", ".join("none" if v is None else str(v.type) for v in inputs)
            raise TypeMismatch(f"{self.name}: ({given}) does not fit {self.signature}: {error}") from error

    def cost(self, node: Node) -> Cost:
        """Bytes moved and flops of one execution, states' traffic not counted."""
        moved: Dim = 0
        for value in {*node.operands, *node.outputs}:
            if isinstance(value.type, TensorType):
                moved = moved + value.type.nbytes
        return Cost(moved, self.flops(node))


_OPS: dict[str, Op] = {}


def elementwise_flops(node: Node) -> Dim:
    """One operation an output element."""
    return node.outputs[0].tensor.numel if node.outputs else 0


def no_flops(node: Node) -> Dim:
    """Data movement: none."""
    return 0


def define(
    signature: str,
    meaning: str,
    rule: TypeRule | None,
    *,
    attrs: str = "",
    flops: FlopRule = no_flops,
    reduction: Reduction = Reduction.NONE,
    reads_state: bool = False,
    writes_state: bool = False,
    effects: bool = False,
) -> Op:
    """Register an op. ``signature`` reads ``linear(x, weight, bias?)`` or ``concat(*parts)``; attrs ``"eps, cast?"``."""
    name, _, rest = signature.partition("(")
    operands = tuple(
        Operand(part.strip("*? "), part.strip().endswith("?"), part.strip().startswith("*"))
        for part in rest.rstrip(")").split(",")
        if part.strip()
    )
    names = tuple(a.strip() for a in attrs.split(",") if a.strip())
    op = Op(name, meaning, operands, names, rule, flops, reduction, reads_state, writes_state, effects)
    if name in _OPS:
        raise ValueError(f"op {name!r} is defined twice")
    _OPS[name] = op
    return op


@cache
def _load() -> None:
    for part in ("tensor", "model", "serving", "fused"):
        import_module(f"compilerllm.ir.ops.{part}")


def lookup(name: str) -> Op:
    """The op called ``name``. Raises ``UnknownOp``, with the nearest names."""
    _load()
    if name not in _OPS:
        near = difflib.get_close_matches(name, _OPS, n=3)
        raise UnknownOp(f"unknown op {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return _OPS[name]


def all_ops() -> Mapping[str, Op]:
    """The whole registry, by name."""
    _load()
    return _OPS
