"""Generated kernels: pointwise groups with row reductions, single tensor ops, and copies between layouts.

Without a reduction the elements are one flat range, and each operand's place follows from its strides by division.
With one, a program has whole rows [ROWS, BLOCK] in registers; rows too wide for that are read again for each reduction.
Every result is rounded to its dtype, so a group gives the bits its ops would give one by one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compilerllm.ir.dims import Dim, dim, free_dims, product
from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import Ref, size_expression
from compilerllm.kernels.triton.expressions import REGISTERS, STORED, expression, full, number, rounded
from compilerllm.kernels.triton.source import generated

WIDEST_ROW = 16384  # elements of a row that registers hold
# op -> (neutral, combine two tiles, fold a tile along its rows)
_REDUCTIONS = {
    "sum": (0.0, "{0} + {1}", "tl.sum({0}, 1, keep_dims=True)"), "mean": (0.0, "{0} + {1}", "tl.sum({0}, 1, keep_dims=True)"),
    "amax": (float("-inf"), "larger({0}, {1})", "tl.reduce({0}, 1, larger, keep_dims=True)"),
    "amin": (float("inf"), "smaller({0}, {1})", "tl.reduce({0}, 1, smaller, keep_dims=True)"),
    "prod": (1.0, "{0} * {1}", "tl.reduce({0}, 1, multiply, keep_dims=True)"),
}  # fmt: skip
# Of numbers only: NaN is left out, as tl.max does.
_LARGEST = (float("-inf"), "tl.maximum({0}, {1})", "tl.max({0}, 1, keep_dims=True)")
_WHOLE_LIMITS = {"i64": 2**63 - 1, "i32": 2**31 - 1, "i16": 2**15 - 1, "i8": 127, "u8": 255}
REDUCTION_OPS = frozenset(_REDUCTIONS) | {"argmax"}
ROW_OPS = REDUCTION_OPS | {"softmax", "cumsum"}
_HEAD = '''"""Generated: {where}"""

import triton
import triton.language as tl

from .elementwise import (
    float_modulo, gelu, gelu_tanh, larger, log1p, multiply, power, relu, sigmoid, silu, smaller, tanh, whole_divide,
    whole_modulo,
)


@triton.jit
def group({arguments}):
'''


@dataclass(frozen=True)
class Generated:
    """A kernel's template, its pointer arguments in order, the sizes it takes, and what its grid covers.

    ``rows``: programs share rows of ``columns`` (0 where the elements are one range of ``rows`` elements).
    """

    template: str
    pointers: tuple[tuple[str, Ref], ...]
    dims: tuple[str, ...]
    rows: Dim
    columns: int


def size_text(value: Dim) -> str:
    """A size as an expression over run-time T, S and R. Raises ``UnsupportedByTarget``."""
    return size_expression(value, "//")


class Nest:
    """One kernel for nodes that share an iteration space; reductions and scans are over the last axis.

    loads: where operands are. stores: values (operands too, for a copy) and where they go. early: operands that may be
    read before the wait. wide: offsets need 64 bits.
    """

    def __init__(
        self, where: str, nodes: Sequence[Node], loads: Mapping[Value, Ref], stores: Sequence[tuple[Value, Ref]],
        early: Collection[Value] = (), wide: bool = False,
    ) -> None:  # fmt: skip
        self.where, self.nodes, self.loads, self.stores = where, nodes, dict(loads), list(stores)
        self.early, self.wide = set(early), wide
        self.producers = {v: n for n in nodes for v in n.outputs}
        self.shapes = {v: v.shape for v in self.producers} | {
            v: r.shape for v, r in (*self.stores, *self.loads.items())
        }
        self.dropped = self._without_last_axis()
        self.shape = self._iteration_shape()
        self.by_rows = any(n.op in ROW_OPS for n in nodes)
        self.columns = self._columns()
        self.looped = self.by_rows and self.columns > WIDEST_ROW
        self.lines: list[str] = []
        self.head: list[str] = []
        self.indent = "    "
        self.names = 0
        self.known: dict[
            Value, str
        ] = {}  # valid wherever: one number a row, or all where there are no passes
        self.softmax: dict[Value, tuple[str, str]] = {}
        self.strides: dict[int, tuple[Dim, ...]] = {}

    def _columns(self) -> int:
        columns = self.shape[-1]
        if not self.by_rows:
            return 0
        if not isinstance(columns, int):
            raise UnsupportedByTarget(
                f"{self.where}: a reduction over {columns} elements, a number known only at run time"
            )
        return columns

    def _without_last_axis(self) -> set[Value]:
        """Values with no place for the columns: results of reductions that drop the axis, and what meets them."""
        dropped: set[Value] = set()
        kept: set[Value] = set()
        for node in self.nodes:
            if node.op in ROW_OPS:
                gone = node.op in REDUCTION_OPS and not node.attrs.get("keepdim")
                kept.update(node.operands)
                (dropped if gone else kept).update(node.outputs)
            else:
                after = any(v in dropped and v in self.producers for v in node.operands)
                (dropped if after else kept).update((*node.operands, *node.outputs))
        if both := [v for v in self.loads if v in dropped and v in kept and v.shape]:
            raise UnsupportedByTarget(
                f"{self.where}: %{both[0].name} is read before and behind a reduction of one group"
            )
        return dropped

    def _iteration_shape(self) -> tuple[Dim, ...]:
        rank = max((len(s) for s in self.shapes.values()), default=0) or 1
        shape: list[Dim] = [1] * rank
        for value, extents in self.shapes.items():
            if value not in self.dropped:
                for axis, extent in enumerate(extents, rank - len(extents)):
                    if extent != 1:
                        shape[axis] = extent
        return tuple(shape)

    def _steps(self, value: Value, ref: Ref) -> tuple[Dim, ...]:
        """Strides over the iteration space; an axis that the value is broadcast along steps by 0."""
        shape, strides = ref.shape, ref.strides
        if value in self.dropped:
            shape, strides = (*shape, 1), (*strides, 0)
        pad = len(self.shape) - len(shape)
        return (0,) * pad + tuple(0 if e == 1 else s for e, s in zip(shape, strides, strict=True))

    def row_wide(self, value: Value) -> bool:
        """Whether one number serves the whole row."""
        producer = self.producers.get(value)
        if value in self.dropped or (producer is not None and producer.op in REDUCTION_OPS):
            return True
        shape = self.shapes[value]
        return self.by_rows and self.shape[-1] != 1 and (not shape or shape[-1] == 1)

    # -- text ------------------------------------------------------------------------------------------------------

    def out(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def fresh(self, expression: str) -> str:
        name = f"x{self.names}"
        self.names += 1
        self.out(f"{name} = {expression}")
        return name

    def generate(self) -> Generated:
        """The kernel, registered."""
        pointers: list[tuple[str, Ref]] = []
        self.pointer_of: dict[Value, str] = {}
        everything: list[tuple[Value, Ref]] = [*self.loads.items(), *self.stores]
        for i, (value, ref) in enumerate(everything):
            pointers.append((f"p{i}", ref))
            self.strides[i] = self._steps(value, ref)
            if i < len(self.loads):
                self.pointer_of[value] = f"p{i}"
        self._places(everything)
        if not self.by_rows:
            self._pass()
        else:
            for node in self.nodes:
                self._row_value(node)
            self._pass()
        body = [*self.places, *self.head, "    if PDL:", "        tl.extra.cuda.gdc_wait()", *self.lines]
        sizes = [
            *self.shape,
            *(r.offset for _, r in everything),
            *(s for steps in self.strides.values() for s in steps),
        ]
        dims = tuple(sorted({name for size in sizes for name in free_dims(size)}))
        tile = ["ROWS", "BLOCK"] if self.by_rows else ["BLOCK"]
        arguments = ", ".join(
            [*(n for n, _ in pointers), *dims, *(f"{n}: tl.constexpr" for n in (*tile, "PDL"))]
        )
        text = _HEAD.format(where=self.where, arguments=arguments) + "\n".join(body) + "\n"
        rows = product(self.shape[:-1] if self.by_rows else self.shape)
        return Generated(f"{generated(text)}:group", tuple(pointers), dims, rows, self.columns)

    def _places(self, everything: Sequence[tuple[Value, Ref]]) -> None:
        """Index variables, and for every pointer the offset and mask of its elements."""
        wide = ".to(tl.int64)" if self.wide else ""
        lead = self.shape[:-1] if self.by_rows else self.shape
        lines = ["if PDL:", "    tl.extra.cuda.gdc_launch_dependents()"]
        if self.by_rows:
            lines.append(f"row = (tl.program_id(0){wide} * ROWS + tl.arange(0, ROWS))[:, None]")
            lines.append(f"live = row < {size_text(product(lead))}")
            if not self.looped:
                lines += ["column = tl.arange(0, BLOCK)[None, :]", f"inside = column < {self.columns}"]
        else:
            lines.append(f"row = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)")
            lines.append(f"live = row < {size_text(product(lead))}")
        axes = _merged(lead, [s[: len(lead)] for s in self.strides.values()])
        after: Dim = 1
        for k in reversed(range(len(axes))):
            extent = axes[k][0]
            index = "row" if after == 1 else f"row // {size_text(after)}"
            lines.append(f"i{k} = {index}" + (f" % {size_text(extent)}" if k else ""))
            after = dim(after * extent)
        self.places = ["    " + line for line in lines]
        self.offsets: list[tuple[str, str]] = []
        for at, ((_, ref), strides) in enumerate(zip(everything, self.strides.values(), strict=True)):
            terms = [f"i{k} * {size_text(axis[1][at])}" for k, axis in enumerate(axes) if axis[1][at] != 0]
            masks = ["live"] if terms else []
            if not isinstance(ref.offset, int):
                terms.append(size_text(ref.offset))
            if self.by_rows and strides[-1] != 0:
                terms.append("column" if strides[-1] == 1 else f"column * {size_text(strides[-1])}")
                masks.append("inside")
            self.offsets.append((" + ".join(terms), " & ".join(masks)))

    def _load(self, value: Value) -> str:
        index = list(self.loads).index(value)
        offset, mask = self.offsets[index]
        pointer = self.pointer_of[value]
        where = f"{pointer} + {offset or 0}" + (f", mask={mask}, other=0" if mask else "")
        loaded = f"tl.load({where})" + ("" if value.dtype == "bool" else f".to({REGISTERS[value.dtype]})")
        if value in self.early and not self.looped:
            name = f"x{self.names}"
            self.names += 1
            self.head.append(f"    {name} = {loaded}")
            return name
        return self.fresh(loaded)

    def _value(self, value: Value, memo: dict[Value, str]) -> str:
        """The variable that holds ``value`` at the present place; emits what it needs."""
        if value not in memo:
            node = self.producers.get(value)
            if node is None:
                memo[value] = self._load(value)
            elif node.op == "softmax":
                top, total = self.softmax[value]
                x = self._value(node.operand(0), memo)
                memo[value] = self.fresh(rounded(f"tl.exp({x} - {top}) / {total}", value.dtype))
            elif node.op == "cumsum":
                x = self._value(node.operand(0), memo)
                memo[value] = self.fresh(rounded(f"tl.cumsum({x}, 1)", value.dtype))
            elif node.op == "iota":
                memo[value] = self.fresh(f"row.to({REGISTERS[value.dtype]})")
            else:
                args = [self._value(v, memo) for v in node.operands]
                memo[value] = self.fresh(expression(node, args, 2 if self.by_rows else 1))
        return memo[value]

    def _pass(self) -> None:
        """Store all results: in one sweep over the columns those that have some, then those of one number a row."""
        first = len(self.loads)
        own = [(i, v) for i, (v, _) in enumerate(self.stores, first) if self.by_rows and self.row_wide(v)]
        rest = [(i, v) for i, (v, _) in enumerate(self.stores, first) if (i, v) not in own]
        if rest:
            self._open()
            memo = self._memo()
            for i, value in rest:
                self._store(i, value, self._value(value, memo))
            self._close()
        for i, value in own:
            self._store(i, value, self._value(value, self.known))

    def _store(self, index: int, value: Value, name: str) -> None:
        offset, mask = self.offsets[index]
        # A result of one row has no stride of its own; its place is a block all the same.
        offset, mask = (
            (offset, mask)
            if "live" in mask
            else (" + ".join(filter(None, ("row", offset))), f"live{mask and ' & ' + mask}")
        )
        stored = name if value.dtype == "bool" else f"{name}.to({STORED[value.dtype]})"
        self.out(f"tl.store(p{index} + {offset}, {stored}, mask={mask})")

    def _memo(self) -> dict[Value, str]:
        return dict(self.known) if self.looped else self.known

    def _open(self) -> None:
        if self.looped:
            self.out(f"for start in range(0, {self.columns}, BLOCK):")
            self.indent += "    "
            self.out("column = (start + tl.arange(0, BLOCK))[None, :]")
            self.out(f"inside = column < {self.columns}")

    def _close(self) -> None:
        if self.looped:
            self.indent = self.indent[:-4]

    # -- one number a row ------------------------------------------------------------------------------------------

    def _row_value(self, node: Node) -> None:
        value = node.outputs[0]
        if node.op == "softmax":
            self._softmax_row(node)
        elif node.op == "argmax":
            self._argmax_row(node)
        elif node.op in REDUCTION_OPS:
            neutral, combine, fold = _REDUCTIONS[node.op]
            name = self._reduced(node.operand(0), neutral, combine, fold)
            mean = f" / {float(self.columns)!r}" if node.op == "mean" else ""
            self.known[value] = self.fresh(rounded(f"{name}{mean}", value.dtype))
        elif node.op == "cumsum" and self.looped:
            raise UnsupportedByTarget(
                f"{self.where}: a running sum over {self.columns} columns is too wide for one program"
            )
        elif self.row_wide(value):
            self._value(value, self.known)

    def _reduced(self, source: Value, neutral: float, combine: str, fold: str, form: str = "{0}") -> str:
        """A reduction of ``form`` of ``source`` over the row."""
        dtype = source.dtype
        outside = _neutral(neutral, dtype)
        if not self.looped:
            x = form.format(self._value(source, self.known))
            return self.fresh(fold.format(f"tl.where(inside, {x}, {outside})"))
        total = self.fresh(f"tl.full([ROWS, BLOCK], {outside}, {REGISTERS[dtype]})")
        self._open()
        x = form.format(self._value(source, self._memo()))
        self.out(f"{total} = {combine.format(total, f'tl.where(inside, {x}, {outside})')}")
        self._close()
        return self.fresh(fold.format(total))

    def _softmax_row(self, node: Node) -> None:
        """Largest value and sum of exponentials; the quotient is formed where it is used."""
        source = node.operand(0)
        if source.dtype not in ("f32", "bf16", "f16", "f64"):
            raise UnsupportedByTarget(f"{self.where}: softmax of {source.dtype}")
        top = self._reduced(source, *_LARGEST)
        total = self._reduced(source, *_REDUCTIONS["sum"], form=f"tl.exp({{0}} - {top})")
        self.softmax[node.output] = (top, total)

    def _argmax_row(self, node: Node) -> None:
        """The first place of the largest value, or of a NaN where there is one."""
        source = node.operand(0)
        top = self._reduced(source, *_REDUCTIONS["amax"])
        is_top = f"(({{0}} == {top}) | (({{0}} != {{0}}) & ({top} != {top})))"
        last = self.columns - 1
        if not self.looped:
            x = self._value(source, self.known)
            places = f"tl.where(inside & {is_top.format(x)}, column, {last})"
        else:
            places = self.fresh(f"tl.full([ROWS, BLOCK], {last}, tl.int32)")
            self._open()
            x = self._value(source, self._memo())
            self.out(
                f"{places} = tl.where(inside & {is_top.format(x)}, tl.minimum({places}, column), {places})"
            )
            self._close()
        self.known[node.output] = self.fresh(f"tl.min({places}, 1, keep_dims=True).to(tl.int64)")


def _neutral(value: float, dtype: str) -> str:
    if dtype in _WHOLE_LIMITS and value in (float("inf"), float("-inf")):
        high = _WHOLE_LIMITS[dtype]
        return str(high if value > 0 else (0 if dtype == "u8" else -high - 1))
    return number(value, dtype)


def _merged(shape: Sequence[Dim], strides: Sequence[Sequence[Dim]]) -> list[tuple[Dim, tuple[Dim, ...]]]:
    """Neighbouring axes that step evenly in every operand as one; axes of extent 1 vanish."""
    merged: list[tuple[Dim, tuple[Dim, ...]]] = []
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        steps = tuple(s[axis] for s in strides)
        if merged and all(dim(a) == dim(b * extent) for a, b in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (dim(merged[-1][0] * extent), steps)
        else:
            merged.append((extent, steps))
    return merged


__all__ = ["REDUCTION_OPS", "ROW_OPS", "WIDEST_ROW", "Generated", "Nest", "full", "size_text"]
