"""Generated loops: pointwise groups with row reductions, and strided copies.

A group runs over rows (all axes but the last) and columns. Reductions over the columns become passes over the row;
each later pass recomputes what it needs, so nothing but results is stored. Every result is rounded to its dtype, so a
group gives the bits its ops would give one by one.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compilerllm.ir.dims import Dim, product
from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.cpu.refs import C_TYPES, CRef, c_dim
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import merge_axes

if TYPE_CHECKING:
    from compilerllm.kernels.cpu.emitter import FunctionEmitter

VECTOR_DTYPES = frozenset({"f32", "bf16", "bool"})
# Lanes: {0}, {1} are f32x16. Scalars: doubles or int64.
_UNARY_LANES = {
    "neg": "zero16() - {0}", "abs": "vmax({0}, zero16() - {0})", "exp": "vexp({0})", "log": "vlog({0})",
    "sqrt": "vsqrt({0})", "rsqrt": "vrsqrt({0})", "reciprocal": "set1(1.0f) / {0}", "tanh": "vtanh({0})",
    "sigmoid": "vsigmoid({0})", "silu": "vsilu({0})", "relu": "Relu::apply({0})", "gelu": "vgelu_erf({0})",
    "gelu_tanh": "vgelu_tanh({0})", "sin": "vsin({0})", "cos": "vcos({0})", "erf": "verf({0})", "floor": "vfloor({0})",
    "log1p": "vlog1p({0})", "square": "{0} * {0}", "logical_not": "flag(~holds({0}))", "cast": "{0}",
}  # fmt: skip
_BINARY_LANES = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "pow": "vpow({0}, {1})",
    "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})", "floor_div": "vfloor({0} / {1})",
    "remainder": "{0} - vfloor({0} / {1}) * {1}", "logical_and": "flag(holds({0}) & holds({1}))",
    "logical_or": "flag(holds({0}) | holds({1}))", "eq": "flag(eq({0}, {1}))", "ne": "flag(ne({0}, {1}))",
    "lt": "flag(lt({0}, {1}))", "le": "flag(le({0}, {1}))", "gt": "flag(lt({1}, {0}))", "ge": "flag(le({1}, {0}))",
}  # fmt: skip
_UNARY_SCALAR = {
    "neg": "-{0}", "abs": "({0} < 0 ? -{0} : {0})", "exp": "exp({0})", "log": "log({0})", "sqrt": "sqrt({0})",
    "rsqrt": "1 / sqrt({0})", "reciprocal": "1.0 / {0}", "tanh": "tanh({0})", "sigmoid": "1 / (1 + exp(-{0}))",
    "silu": "{0} / (1 + exp(-{0}))", "relu": "({0} < 0 ? 0 : {0})", "sin": "sin({0})", "cos": "cos({0})", "erf": "erf({0})",
    "gelu": "0.5 * {0} * (1 + erf({0} * 0.70710678118654752440))", "floor": "floor({0})", "log1p": "log1p({0})",
    "gelu_tanh": "0.5 * {0} * (1 + tanh(0.79788456080286535588 * ({0} + 0.044715 * {0} * {0} * {0})))",
    "square": "{0} * {0}", "logical_not": "({0} == 0)", "cast": "{0}",
}  # fmt: skip
_BINARY_SCALAR = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "double({0}) / double({1})", "pow": "pow({0}, {1})",
    "maximum": "({0} > {1} || {0} != {0} ? {0} : {1})", "minimum": "({0} < {1} || {0} != {0} ? {0} : {1})",
    "floor_div": "floor_divide({0}, {1})",
    "remainder": "modulo({0}, {1})", "logical_and": "({0} != 0 && {1} != 0)", "logical_or": "({0} != 0 || {1} != 0)",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})", "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
}  # fmt: skip
# op -> (neutral, combine lanes, fold lanes to one number)
_REDUCTIONS = {
    "sum": ("0.0f", "{0} + {1}", "reduce_add"), "mean": ("0.0f", "{0} + {1}", "reduce_add"),
    "amax": ("-INFINITY", "larger({0}, {1})", "reduce_larger"), "amin": ("INFINITY", "smaller({0}, {1})", "reduce_smaller"),
    "prod": ("1.0f", "{0} * {1}", "reduce_mul"),
}  # fmt: skip
_SCALAR_COMBINE = {
    "sum": ("0", "{0} + {1}"), "mean": ("0", "{0} + {1}"), "amax": ("-INFINITY", _BINARY_SCALAR["maximum"]),
    "amin": ("INFINITY", _BINARY_SCALAR["minimum"]), "prod": ("1", "{0} * {1}"),
}  # fmt: skip
POINTWISE_OPS = frozenset(_UNARY_LANES) | frozenset(_BINARY_LANES) | {"where", "full", "softcap"}
REDUCTION_OPS = frozenset(_REDUCTIONS)


def c_number(value: float) -> str:
    """A number as a C double."""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(float(value))


def emit_copy(e: "FunctionEmitter", target: CRef, source: CRef) -> None:
    """Move elements between two places of one shape, from f32 into bf16 too; the innermost axis is a plain loop."""
    shape = target.shape
    lead = shape[:-1] if shape else ()
    inner: Dim = shape[-1] if shape else 1
    e.need("loops.h")
    e.line("{")
    e.line(f"  const Units u = split_units({c_dim(product(lead))}, {c_dim(inner)}, false, team);")
    e.line("  for (int64_t r = u.begin; r < u.end; r++) {")
    _decompose(e, lead)
    for name, ref in (("d", target), ("s", source)):
        const = "const " if name == "s" else ""
        e.line(
            f"    {const}{ref.c_type}* {name} = ({const}{ref.c_type}*){ref.pointer} + {_row_offset(ref.strides[:-1], lead)};"
        )
    steps = [c_dim(ref.strides[-1]) if shape else "1" for ref in (target, source)]
    rounds = (target.c_type, source.c_type) == ("bf16", "float")
    move = "put(d + j * {}, s[j * {}])" if rounds else "d[j * {}] = s[j * {}]"
    e.line(f"    for (int64_t j = 0; j < {c_dim(inner)}; j++) {move.format(*steps)};")
    e.line("  }")
    e.line("}")


def _decompose(e: "FunctionEmitter", lead: tuple[Dim, ...]) -> None:
    """Index variables i0, i1 .. of the leading axes from the flat row number r."""
    for axis in range(len(lead)):
        after = c_dim(product(lead[axis + 1 :]))
        e.line(f"    [[maybe_unused]] const int64_t i{axis} = r / ({after}) % ({c_dim(lead[axis])});")


def _row_offset(strides: tuple[Dim, ...], lead: tuple[Dim, ...]) -> str:
    """Element offset of a row: from r alone where the axes step evenly, otherwise from the decomposed indices."""
    merged = merge_axes(lead, strides)
    if len(merged) == 0:
        return "0"
    if len(merged) == 1 and merged[0][0] == product(lead):
        return f"r * {c_dim(merged[0][1])}"
    terms = [f"i{axis} * {c_dim(stride)}" for axis, stride in enumerate(strides) if stride != 0]
    return " + ".join(terms) or "0"


class LoopNest:
    """One generated loop over rows and columns for nodes that share an iteration space."""

    def __init__(
        self,
        e: "FunctionEmitter",
        nodes: Sequence[Node],
        results: dict[Value, CRef],
        sources: dict[Value, CRef],
    ) -> None:
        self.e, self.nodes, self.results, self.sources = e, list(nodes), results, dict(sources)
        self.producers = {v: n for n in nodes for v in n.outputs}
        self.dropped = self._without_last_axis()
        self.shape = self._iteration_shape()
        everything = [*self.sources, *self.producers]
        self.lanes = all(v.dtype in VECTOR_DTYPES for v in everything)
        self.reductions = [n for n in self.nodes if n.op in REDUCTION_OPS or n.op == "softmax"]
        self.indent = "    "
        self.known: dict[Value, str] = {}  # row-wide values, valid in every pass
        self.softmax_names: dict[Value, str] = {}

    def _iteration_shape(self) -> tuple[Dim, ...]:
        rank = max((len(v.shape) for v in [*self.sources, *self.producers]), default=0) or 1
        shape: list[Dim] = [1] * rank
        for value in [*self.sources, *self.producers]:
            if value in self.dropped:
                continue  # its axes are one fewer, the last one is gone
            for axis, extent in enumerate(value.shape):
                at = axis + rank - len(value.shape)
                if extent != 1:
                    shape[at] = extent
        return tuple(shape)

    def _without_last_axis(self) -> set[Value]:
        """Values that have no place for the columns: results of reductions that drop the axis, and what meets them."""
        dropped: set[Value] = set()
        kept: set[Value] = set()
        for node in self.nodes:
            if node.op in REDUCTION_OPS or node.op == "softmax":
                gone = node.op != "softmax" and not node.attrs.get("keepdim")
                kept.update(node.operands)
                (dropped if gone else kept).update(node.outputs)
            else:
                together = (
                    dropped if any(v in dropped and v in self.producers for v in node.operands) else kept
                )
                together.update((*node.operands, *node.outputs))
        if both := [v for v in self.sources if v in dropped and v in kept and v.shape]:
            raise UnsupportedByTarget(
                f"@{self.e.graph.name}: %{both[0].name} is read before and behind a reduction of one group"
            )
        return dropped

    def out(self, text: str) -> None:
        """Add a line at the loop's present depth."""
        self.e.line(self.indent + text)

    def strides_of(self, value: Value, ref: CRef) -> tuple[Dim, ...]:
        """Strides over the iteration space; axes the value is broadcast along step by 0."""
        shape, strides = ref.shape, ref.strides
        if value in self.dropped:
            shape, strides = (*shape, 1), (*strides, 0)
        pad = len(self.shape) - len(shape)
        return (0,) * pad + tuple(
            0 if e == 1 and t != 1 else s for e, s, t in zip(shape, strides, self.shape[pad:], strict=True)
        )

    def row_wide(self, value: Value) -> bool:
        """Whether one number serves the whole row."""
        producer = self.producers.get(value)
        if value in self.dropped or (producer is not None and producer.op in REDUCTION_OPS):
            return True
        if self.shape[-1] == 1:
            return False
        return not value.shape or value.shape[-1] == 1

    def emit(self) -> None:
        """Write the loop to the function."""
        lead, columns = self.shape[:-1], c_dim(self.shape[-1])
        self.e.need("loops.h")
        self.e.line("{")
        cut = "false" if self.reductions else "true"
        self.e.line(f"  const Units u = split_units({c_dim(product(lead))}, {columns}, {cut}, team);")
        self.e.line("  for (int64_t unit = u.begin; unit < u.end; unit++) {")
        self.out("const int64_t r = unit / u.per_row;")
        self.out("[[maybe_unused]] const int64_t piece = unit % u.per_row;")
        _decompose(self.e, lead)
        if self.reductions:
            self.out(f"const int64_t first = 0, last = {columns};")
        else:
            self.out("const int64_t first = piece * kColumnChunk, end = first + kColumnChunk;")
            self.out(f"const int64_t last = u.per_row == 1 || end > {columns} ? {columns} : end;")
        self._pointers(lead)
        for node in self.nodes:
            self._row_value(node)
        stored = [v for v in self.results if not self.row_wide(v)]
        if stored:
            self._pass(stored)
        for value, name in self._row_stores():
            self._store(value, name, "0", "1", guard="piece == 0")
        self.e.line("  }")
        self.e.line("}")

    def _row_stores(self) -> list[tuple[Value, str]]:
        return [(v, self.known[v]) for v in self.results if self.row_wide(v)]

    def _pointers(self, lead: tuple[Dim, ...]) -> None:
        self.names: dict[Value, str] = {}
        for value, ref in [*self.sources.items(), *self.results.items()]:
            strides = self.strides_of(value, ref)
            name = f"p{len(self.names)}"
            const = "const " if value in self.sources else ""
            offset = _row_offset(strides[:-1], lead)
            self.out(f"{const}{ref.c_type}* {name} = ({const}{ref.c_type}*){ref.pointer} + {offset};")
            self.names[value] = name

    def _column_step(self, value: Value) -> Dim:
        ref = self.sources.get(value) or self.results[value]
        return self.strides_of(value, ref)[-1]

    def _row_value(self, node: Node) -> None:
        """Compute what is one number a row: reductions by a pass, row-wide arithmetic once."""
        value = node.outputs[0]
        if node.op == "softmax":
            self._softmax_row(node)
        elif node.op in REDUCTION_OPS:
            source = node.inputs[0]
            assert source is not None
            self._reduce(node.op, source, value)
        elif self.row_wide(value):
            self.known[value] = self._declare(value, self._expression(node, self.known, "0", "1"))

    def _reduce(self, op: str, source: Value, value: Value) -> None:
        name = self.e.fresh("r")
        if self.lanes:
            neutral, combine, fold = _REDUCTIONS[op]
            self.out(f"f32x16 {name}a = set1({neutral});")
            self._open_columns()
            x = self._value(source, {**self.known}, "j", "lanes")
            self.out(f"{name}a = " + combine.format(f"{name}a", f"keep({x}, lanes, {neutral})") + ";")
            self._close_columns()
            mean = f" / float({c_dim(self.shape[-1])})" if op == "mean" else ""
            self.out(f"const f32x16 {name} = {self._round(f'set1({fold}({name}a){mean})', value.dtype)};")
        else:
            neutral, combine = _SCALAR_COMBINE[op]
            kind = "int64_t" if value.dtype in ("i64", "i32") else "double"
            if kind == "int64_t" and neutral.endswith("INFINITY"):
                neutral = "INT64_MIN" if neutral.startswith("-") else "INT64_MAX"
            self.out(f"{kind} {name} = {neutral};")
            self._open_columns()
            x = self._value(source, {**self.known}, "j", "1")
            self.out(f"{name} = " + combine.format(name, x) + ";")
            self._close_columns()
            if op == "mean":
                self.out(f"{name} /= double({c_dim(self.shape[-1])});")
        self.known[value] = name

    def _softmax_row(self, node: Node) -> None:
        """Largest value and sum of exponentials of a row; the quotient is formed where it is used."""
        source = node.inputs[0]
        assert source is not None
        if not self.lanes:
            raise UnsupportedByTarget(f"@{self.e.graph.name}: softmax of {source.dtype} has no CPU kernel")
        name = self.e.fresh("s")
        self.out(f"f32x16 {name}m = set1(-INFINITY);")
        self._open_columns()
        self.out(
            f"{name}m = vmax({name}m, keep({self._value(source, {**self.known}, 'j', 'lanes')}, lanes, -INFINITY));"
        )
        self._close_columns()
        self.out(f"{name}m = set1(reduce_max({name}m));")
        self.out(f"f32x16 {name}a = zero16();")
        self._open_columns()
        self.out(
            f"{name}a = {name}a + keep(vexp({self._value(source, {**self.known}, 'j', 'lanes')} - {name}m), lanes, 0.0f);"
        )
        self._close_columns()
        self.out(f"const f32x16 {name} = set1(1.0f / reduce_add({name}a));")
        self.softmax_names[node.outputs[0]] = name

    def _open_columns(self) -> None:
        if self.lanes:
            self.out("for (int64_t j = first; j < last; j += 16) {")
            self.out("  const int lanes = last - j < 16 ? int(last - j) : 16;")
        else:
            self.out("for (int64_t j = first; j < last; j++) {")
        self.indent += "  "

    def _close_columns(self) -> None:
        self.indent = self.indent[:-2]
        self.out("}")

    def _pass(self, stored: list[Value]) -> None:
        self._open_columns()
        memo = {**self.known}
        for value in stored:
            self._store(value, self._value(value, memo, "j", "lanes"), "j", "lanes")
        self._close_columns()

    def _value(self, value: Value, memo: dict[Value, str], index: str, lanes: str) -> str:
        """C variable holding ``value`` at the current columns; emits what it needs."""
        if value in memo:
            return memo[value]
        if value in self.producers:
            node = self.producers[value]
            memo[value] = self._declare(value, self._expression(node, memo, index, lanes))
        else:
            memo[value] = self._declare(value, self._load(value, index, lanes))
        return memo[value]

    def _declare(self, value: Value, expression: str) -> str:
        name = self.e.fresh("x")
        if self.lanes:
            self.out(f"const f32x16 {name} = {expression};")
        else:
            whole = value.dtype in ("i64", "i32", "i16", "i8", "u8", "bool")
            self.out(f"const {'int64_t' if whole else 'double'} {name} = {expression};")
        return name

    def _load(self, value: Value, index: str, lanes: str) -> str:
        name, step = self.names[value], self._column_step(value)
        if not self.lanes:
            return f"number({name}[{index} * {c_dim(step)}])"
        if step == 0 or self.row_wide(value):
            return f"set1({name}[0] ? 1.0f : 0.0f)" if value.dtype == "bool" else f"set1(to_f32({name}[0]))"
        if step != 1:
            raise UnsupportedByTarget(f"@{self.e.graph.name}: %{value.name} steps by {step} in a group")
        if value.dtype == "bool":
            return f"load_bool({name} + {index}, {lanes})"
        return f"load_part({name} + {index}, {lanes})"

    def _store(self, value: Value, name: str, index: str, lanes: str, guard: str = "") -> None:
        target = self.names[value]
        if not self.lanes:
            step = c_dim(self._column_step(value)) if index != "0" else "1"
            c_type = C_TYPES[value.dtype]
            stored = f"to_bf16(float({name}))" if value.dtype == "bf16" else f"({c_type})({name})"
            text = f"{target}[{index} * {step}] = {stored};"
        elif value.dtype == "bool":
            text = f"store_bool({target} + {index}, {name}, {lanes});"
        else:
            text = f"store_part({target} + {index}, {name}, {lanes});"
        self.out(f"if ({guard}) {text}" if guard else text)

    def _round(self, expression: str, dtype: str) -> str:
        if self.lanes:
            return f"round_bf16({expression})" if dtype == "bf16" else expression
        if dtype in ("bf16", "f32", "f64"):
            return f"rounded({expression}, {C_TYPES[dtype]}())"
        return f"({C_TYPES[dtype]})({expression})" if dtype != "bool" else f"(({expression}) != 0)"

    def _constant(self, value: float) -> str:
        return f"set1(float({c_number(value)}))" if self.lanes else c_number(value)

    def _activation(self, name: str, x: str, dtype: str) -> str:
        """``name`` of ``x``, rounded; an activation is a pointwise op of that name, or made of some."""
        unary = _UNARY_LANES if self.lanes else _UNARY_SCALAR
        if name == "identity":
            return x
        if name == "relu2":
            return self._round(
                unary["square"].format(f"({self._round(unary['relu'].format(x), dtype)})"), dtype
            )
        if name not in unary:
            raise UnsupportedByTarget(f"@{self.e.graph.name}: activation {name!r} has no generated loop")
        return self._round(unary[name].format(x), dtype)

    def _expression(self, node: Node, memo: dict[Value, str], index: str, lanes: str) -> str:
        value = node.outputs[0]
        args = [self._value(v, memo, index, lanes) for v in node.operands]
        if node.op == "softmax":
            name = self.softmax_names[value]
            return self._round(f"vexp({args[0]} - {name}m) * {name}", value.dtype)
        if node.op == "full":
            return self._round(self._constant(float(node.number("value"))), value.dtype)
        if node.op == "softcap":
            cap = node.number("cap")
            inner = self._round(f"{args[0]} / {self._constant(cap)}", value.dtype)
            tanh = self._round(f"{'vtanh' if self.lanes else 'tanh'}({inner})", value.dtype)
            return self._round(f"{tanh} * {self._constant(cap)}", value.dtype)
        if node.op == "gated_act":
            gate = self._activation(node.text("act"), args[0], value.dtype)
            return self._round(f"{gate} * {args[1]}", value.dtype)
        if node.op == "where":
            pick = "select(holds({0}), {1}, {2})" if self.lanes else "({0} ? {1} : {2})"
            return self._round(pick.format(*args), value.dtype)
        unary, binary = (_UNARY_LANES, _BINARY_LANES) if self.lanes else (_UNARY_SCALAR, _BINARY_SCALAR)
        if node.op in unary:
            if (
                node.op == "cast"
                and value.dtype == "bool"
                and node.operands[0].dtype != "bool"
                and self.lanes
            ):
                return f"flag(holds({args[0]}))"
            return self._round(unary[node.op].format(args[0]), value.dtype)
        if "scalar" in node.attrs:
            args.append(self._constant(node.number("scalar")))
            if (
                not self.lanes
                and node.operands[0].dtype in ("i64", "i32")
                and isinstance(node.attrs["scalar"], int)
            ):
                args[-1] = f"int64_t({int(node.attrs['scalar'])})"
            if node.attrs.get("reverse"):
                args.reverse()
        return self._round(binary[node.op].format(*args), value.dtype)
