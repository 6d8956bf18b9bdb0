"""Where a value lives: base pointer, strides; reshapes, slices and permutes become views here, on every target.

``Ref`` is symbolic: extents, strides and offsets are dims, so that one description serves every bucket.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import sympy

from compilerllm.ir.dims import Dim, FloorDiv, dim, product
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.kernels.errors import UnsupportedByTarget


@dataclass(frozen=True)
class Ref:
    """``base[offset + sum(index * stride)]``, element strides; ``root`` is the value that owns the memory."""

    base: str
    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    root: Value
    offset: Dim = 0

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie without gaps, in row-major order."""
        return all(
            e == 1 or s == w
            for e, s, w in zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        )

    def rows(self, lead: int) -> tuple[Dim, int, Dim] | None:
        """As [rows, columns]: the first ``lead`` axes are rows, the rest columns without gaps.

        Gives (row count, columns, row stride), or None where the strides do not allow it.
        """
        columns, leading = self.shape[lead:], self.shape[:lead]
        if not all(isinstance(c, int) for c in columns):
            return None
        width = 1
        for extent, stride in zip(reversed(columns), reversed(self.strides[lead:]), strict=True):
            if extent != 1 and stride != width:
                return None
            width *= int(extent)
        merged = merge_axes(leading, self.strides[:lead])
        if len(merged) > 1:
            return None
        count, stride = merged[0] if merged else (1, width)
        return count, width, stride


AnyRef = TypeVar("AnyRef", bound=Ref)  # views of a target's own kind of reference are of that kind


def dense_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides in elements."""
    strides: list[Dim] = []
    running: Dim = 1
    for extent in reversed(shape):
        strides.append(running)
        running = dim(running * extent)
    return tuple(reversed(strides))


def merge_axes(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> list[tuple[Dim, Dim]]:
    """Fold neighbouring axes that step evenly into one; axes of extent 1 vanish."""
    merged: list[tuple[Dim, Dim]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if merged and dim(merged[-1][1]) == dim(stride * extent):
            merged[-1] = (dim(merged[-1][0] * extent), stride)
        else:
            merged.append((extent, stride))
    return merged


def view(node: Node, source: AnyRef) -> AnyRef | None:
    """The result of a data-movement node as a view of its source, or None where it must be copied."""
    out = node.outputs[0]
    match node.op:
        case "reshape":
            return _reshape(source, out.shape)
        case "permute":
            strides = tuple(source.strides[i] for i in node.integers("order"))
            return replace(source, shape=out.shape, strides=strides)
        case "slice":
            axis = node.integer("axis") % len(source.shape)
            start, step = node.dimension("start"), node.integer("step", 1)
            strides = tuple(dim(s * step) if i == axis else s for i, s in enumerate(source.strides))
            offset = dim(source.offset + start * source.strides[axis])
            return replace(source, shape=out.shape, strides=strides, offset=offset)
        case "expand":
            lead = len(out.shape) - len(source.shape)
            own: tuple[Dim, ...] = tuple(
                s if e == t else 0
                for s, e, t in zip(source.strides, source.shape, out.shape[lead:], strict=True)
            )
            return replace(source, shape=out.shape, strides=(0,) * lead + own)
    return None


def _reshape(source: AnyRef, shape: tuple[Dim, ...]) -> AnyRef | None:
    """Split or merge axes where strides allow it without moving data."""
    if source.contiguous:
        return replace(source, shape=shape, strides=dense_strides(shape))
    old = [(e, s) for e, s in zip(source.shape, source.strides, strict=True) if e != 1]
    strides: list[Dim] = []
    at = 0
    pending = list(shape)
    while pending:
        extent = pending.pop(0)
        if extent == 1:
            strides.append(0)
            continue
        if at == len(old):
            return None
        total, stride = old[at]
        at += 1
        group = [extent]
        while product(group) != total:
            if pending and _divides(product(group), total):
                group.append(pending.pop(0))
            elif at < len(old) and dim(stride) == dim(old[at][1] * old[at][0]):
                total, stride = dim(total * old[at][0]), old[at][1]
                at += 1
            else:
                return None
        strides += [dim(s * stride) for s in dense_strides(tuple(group))]
    return replace(source, shape=shape, strides=tuple(strides)) if at == len(old) else None


def _divides(part: Dim, total: Dim) -> bool:
    if isinstance(part, int) and isinstance(total, int):
        return part < total and total % part == 0
    quotient = sympy.sympify(total) / part
    return (
        part != total
        and bool(quotient.is_polynomial())
        and not bool(sympy.denom(sympy.together(quotient)).free_symbols)
    )


VIEW_OPS = frozenset({"reshape", "permute", "slice", "expand"})


def view_roots(graph: Graph) -> dict[Value, Value]:
    """For each result that is a view: the value whose memory it shares. What the memory planner needs."""
    refs: dict[Value, Ref] = {}
    roots: dict[Value, Value] = {}

    def ref(value: Value) -> Ref:
        if value not in refs:
            refs[value] = Ref("", value.dtype, value.shape, dense_strides(value.shape), value)
        return refs[value]

    for node in graph.nodes:
        if node.op in VIEW_OPS and node.inputs[0] is not None:
            seen = view(node, ref(node.inputs[0]))
            if seen is not None:
                refs[node.outputs[0]] = seen
                roots[node.outputs[0]] = seen.root
    return roots


def size_expression(value: Dim, division: str) -> str:
    """A dimension as code over run-time T, S and R, in C or Python; ``division`` is the whole-number operator.

    Operands of a FloorDiv are not negative, so that both languages' operators mean it. Raises ``UnsupportedByTarget``.
    """

    def text(part: Dim | sympy.Basic) -> str:
        return size_expression(dim(part), division)

    if isinstance(value, int):
        return str(value)
    if isinstance(value, FloorDiv):
        return f"(({text(value.args[0])}) {division} ({text(value.args[1])}))"
    if isinstance(value, sympy.Symbol):
        return str(value.name)
    if isinstance(value, sympy.Add):
        return "(" + " + ".join(map(text, value.args)) + ")"
    if isinstance(value, sympy.Mul):
        return "(" + " * ".join(map(text, value.args)) + ")"
    if isinstance(value, sympy.Pow) and value.args[1].is_Integer and int(value.args[1]) > 0:
        return "(" + " * ".join([text(value.args[0])] * int(value.args[1])) + ")"
    raise UnsupportedByTarget(
        f"the size {value} cannot be computed by generated code; compile with --optimization-level 0"
    )
