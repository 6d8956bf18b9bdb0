"""Bring equal graphs to one spelling: no identities, merged reshapes and permutes, permutes moved past what ignores them.

Before (a captured query, batch axis already gone)::

    %q = reshape(%x, shape=[T, 8, 64]) : bf16[T, 8, 64]
    %qt = permute(%q, order=[1, 0, 2]) : bf16[8, T, 64]
    %r = rope(%qt, %cos, %sin, style="half", head_axis=-3) : bf16[8, T, 64]
    %y = permute(%r, order=[1, 0, 2]) : bf16[T, 8, 64]

After::

    %q = reshape(%x, shape=[T, 8, 64]) : bf16[T, 8, 64]
    %y = rope(%q, %cos, %sin, style="half", head_axis=-2) : bf16[T, 8, 64]

Each rule looks at one node about to be emitted and at what made its operands; what it emits goes through the rules
again. All are exact: only data movement changes, or a cast that loses nothing.
"""

from collections.abc import Callable, Mapping, Sequence

from compilerllm.ir import attributes
from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Node, Origin, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.types import TensorType
from compilerllm.passes.opinfo import BINARY, NORMS, UNARY, same_graph
from compilerllm.passes.report import PassReport

# Casts that keep every value: from -> to.
WIDER = {
    "bf16": ("f32", "f64"), "f16": ("f32", "f64"), "f32": ("f64",), "i32": ("i64", "f64"), "i16": ("i32", "i64", "f32", "f64"),
    "i8": ("i16", "i32", "i64", "f32", "f64"), "u8": ("i16", "i32", "i64", "f32", "f64"),
}  # fmt: skip


def canonicalise(graph: Graph, report: PassReport) -> Graph:
    """Apply every rule of this file until none matches."""
    rewriter = _Canonicaliser(graph, report)
    return same_graph(graph, rewriter.run(lambda _, node: rewriter.simplified(node)))


Operands = tuple[Value | None, ...]
Attrs = Mapping[str, Attr]
Rule = Callable[["_Canonicaliser", Operands, Attrs], Value | None]


class _Canonicaliser(Rewriter):
    """A rewriter that knows who made each new value."""

    def __init__(self, graph: Graph, report: PassReport) -> None:
        super().__init__(graph, by="canonicalise")
        self.report = report
        self.made_by: dict[Value, Node] = {}
        self.hint: str | None = None  # the name of what is being replaced

    def append(self, node: Node) -> None:
        super().append(node)
        self.made_by.update(dict.fromkeys(node.outputs, node))

    def emit_node(
        self, op: str, inputs: Sequence[Value | None], attrs: Attrs, *,
        types: Sequence[TensorType] | None = None, name: str | None = None, origin: Origin | None = None,
    ) -> tuple[Value, ...]:  # fmt: skip
        outputs = super().emit_node(op, inputs, attrs, types=types, name=name or self.hint, origin=origin)
        self.made_by.update(dict.fromkeys(outputs, self._nodes[-1]))
        return outputs

    def maker(self, value: Value | None, op: str) -> Node | None:
        """The node that made ``value``, if it is of kind ``op``."""
        node = self.made_by.get(value) if value is not None else None
        return node if node is not None and node.op == op else None

    def simplified(self, node: Node) -> tuple[Value, ...] | None:
        """What stands for ``node``, or None to keep it."""
        if len(node.outputs) != 1:
            return None
        self.hint = node.output.name
        found = self.simplify(
            node.op, tuple(None if v is None else self.get(v) for v in node.inputs), node.attrs
        )
        return None if found is None else (found,)

    def simplify(self, op: str, inputs: Operands, attrs: Attrs) -> Value | None:
        for rule in RULES.get(op, ()):
            found = rule(self, inputs, attrs)
            if found is not None:
                self.report.match()
                return found
        return None

    def make(self, op: str, *inputs: Value | None, **attrs: Attr) -> Value:
        """Emit, simplified."""
        found = self.simplify(op, inputs, attrs)
        return self.emit_node(op, inputs, attrs)[0] if found is None else found


def _first(inputs: Operands) -> Value:
    value = inputs[0]
    assert value is not None
    return value


def _order(node: Node) -> tuple[int, ...]:
    return node.integers("order")


# ---- identities


def _same_shape(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """reshape or expand to the shape it has."""
    return (
        _first(inputs) if _first(inputs).shape == attributes.dimensions("reshape", attrs, "shape") else None
    )


def _same_order(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """permute that moves nothing."""
    order = attributes.integers("permute", attrs, "order")
    return _first(inputs) if list(order) == sorted(order) else None


def _same_dtype(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """cast to the dtype it has."""
    return _first(inputs) if _first(inputs).dtype == attrs["dtype"] else None


def _whole_slice(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """slice that takes all."""
    x, axis = _first(inputs), attributes.integer("slice", attrs, "axis")
    if attrs["start"] == 0 and attrs["stop"] == x.shape[axis] and attrs.get("step", 1) == 1:
        return x
    return None


def _one_part(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """concat of one value."""
    return inputs[0] if len(inputs) == 1 else None


def _times_one(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """x * 1 and x / 1."""
    x = _first(inputs)
    exact = attrs.get("scalar") == 1 and not attrs.get("reverse") and x.tensor.is_float
    return x if exact else None


# ---- two into one


def _reshape_of_reshape(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """reshape(reshape(x)) is one reshape."""
    inner = r.maker(inputs[0], "reshape")
    return None if inner is None else r.make("reshape", inner.inputs[0], **attrs)


def _permute_of_permute(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """permute(permute(x)) is one permute."""
    inner = r.maker(inputs[0], "permute")
    if inner is None:
        return None
    first, second = _order(inner), attributes.integers("permute", attrs, "order")
    return r.make("permute", inner.inputs[0], order=tuple(first[i] for i in second))


def _permute_of_ones(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """A permute that moves only axes of extent 1 moves no data: it is a reshape."""
    x, order = _first(inputs), attributes.integers("permute", attrs, "order")
    kept = [i for i in order if x.shape[i] != 1]
    return r.make("reshape", x, shape=tuple(x.shape[i] for i in order)) if kept == sorted(kept) else None


def _cast_of_cast(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """cast(cast(x)) is one cast where the first loses nothing."""
    inner = r.maker(inputs[0], "cast")
    if inner is None:
        return None
    x = _first(inner.inputs)
    return r.make("cast", x, **attrs) if inner.attrs["dtype"] in WIDER.get(x.dtype, ()) else None


def _slice_of_slice(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """A slice of a slice along the same axis is one slice."""
    inner = r.maker(inputs[0], "slice")
    if inner is None or attrs.get("step", 1) != 1 or inner.attrs.get("step", 1) != 1:
        return None
    rank = _first(inputs).tensor.rank
    if attributes.integer("slice", attrs, "axis") % rank != inner.integer("axis") % rank:
        return None
    start, stop = (
        inner.dimension("start") + attributes.dimension("slice", attrs, e) for e in ("start", "stop")
    )
    return r.make("slice", inner.inputs[0], axis=attrs["axis"], start=start, stop=stop)


def _concat_of_slices(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """Neighbouring slices of one value, joined again."""
    axis = attributes.integer("concat", attrs, "axis")
    parts: list[Value] = []
    for value in inputs:
        assert value is not None
        mine, last = r.maker(value, "slice"), r.maker(parts[-1], "slice") if parts else None
        if mine is not None and last is not None and _neighbours(last, mine, axis, value.tensor.rank):
            start, stop = last.attrs["start"], mine.attrs["stop"]
            parts[-1] = r.make("slice", mine.inputs[0], axis=mine.attrs["axis"], start=start, stop=stop)
        else:
            parts.append(value)
    return None if len(parts) == len(inputs) else r.make("concat", *parts, **attrs)


def _neighbours(a: Node, b: Node, axis: int, rank: int) -> bool:
    return (
        a.inputs[0] is b.inputs[0]
        and all(n.integer("axis") % rank == axis % rank and n.integer("step", 1) == 1 for n in (a, b))
        and a.attrs["stop"] == b.attrs["start"]
    )


# ---- permutes and expands sink towards the results, where they meet their inverse


def _unary_of_permute(op: str) -> Rule:
    def rule(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
        inner = r.maker(inputs[0], "permute")
        if inner is None or any(v is not None and v.tensor.rank > 0 for v in inputs[1:]):
            return None
        return r.make("permute", r.make(op, inner.inputs[0], *inputs[1:], **attrs), order=_order(inner))

    rule.__doc__ = f"{op}(permute(x)) is permute({op}(x))."
    return rule


def _binary_of_permutes(op: str) -> Rule:
    def rule(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
        makers = [r.maker(v, "permute") for v in inputs]
        if (
            len(makers) != 2
            or makers[0] is None
            or makers[1] is None
            or _order(makers[0]) != _order(makers[1])
        ):
            return None
        result = r.make(op, makers[0].inputs[0], makers[1].inputs[0], **attrs)
        return r.make("permute", result, order=_order(makers[0]))

    rule.__doc__ = f"{op} of two values permuted alike is permuted afterwards."
    return rule


def _norm_of_permute(op: str) -> Rule:
    def rule(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
        inner = r.maker(inputs[0], "permute")
        if inner is None or _order(inner)[-1] != len(_order(inner)) - 1:
            return None
        return r.make("permute", r.make(op, inner.inputs[0], *inputs[1:], **attrs), order=_order(inner))

    rule.__doc__ = f"{op} works on the last axis, which the permute leaves in place."
    return rule


def _rope_of_permute(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """rope over [H, T, D] is rope over [T, H, D] with the other head axis."""
    inner = r.maker(inputs[0], "permute")
    if inner is None or attrs["head_axis"] != -3:
        return None
    rank = len(_order(inner))
    if _order(inner) != (*range(rank - 3), rank - 2, rank - 3, rank - 1):
        return None
    rotated = r.make("rope", inner.inputs[0], *inputs[1:], **{**attrs, "head_axis": -2})
    return r.make("permute", rotated, order=_order(inner))


def _rope_of_one_head(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """[1, T, D] and [T, 1, D] are the same rows: one head needs no permute, so none shows the order."""
    x = inputs[0]
    if x is None or attrs["head_axis"] != -3 or x.shape[-3] != 1:
        return None
    *lead, _, tokens, width = x.shape
    inside = r.make("reshape", x, shape=(*lead, tokens, 1, width))
    rotated = r.make("rope", inside, *inputs[1:], **{**attrs, "head_axis": -2})
    return r.make("reshape", rotated, shape=x.shape)


def _reshape_of_norm(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """Where only axes of extent 1 differ, the norm's operand is reshaped instead, so that its users meet the norm."""
    for op in NORMS:
        inner = r.maker(inputs[0], op)
        if inner is None:
            continue
        x, shape = inner.operand(0), attributes.dimensions("reshape", attrs, "shape")
        if shape[-1:] == x.shape[-1:] and [d for d in shape if d != 1] == [d for d in x.shape if d != 1]:
            return r.make(op, r.make("reshape", x, shape=shape), *inner.inputs[1:], **inner.attrs)
    return None


def _slice_of_permute(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """slice(permute(x)) is permute(slice(x)) along the axis it came from."""
    inner = r.maker(inputs[0], "permute")
    if inner is None:
        return None
    order = _order(inner)
    axis = order[attributes.integer("slice", attrs, "axis") % len(order)]
    return r.make("permute", r.make("slice", inner.inputs[0], **{**attrs, "axis": axis}), order=order)


def _concat_of_permutes(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
    """Values permuted alike are joined first and permuted afterwards."""
    makers = [r.maker(v, "permute") for v in inputs]
    orders = {_order(m) for m in makers if m is not None}
    if None in makers or len(orders) != 1:
        return None
    order = orders.pop()
    axis = order[attributes.integer("concat", attrs, "axis") % len(order)]
    joined = r.make("concat", *(m.inputs[0] for m in makers if m is not None), axis=axis)
    return r.make("permute", joined, order=order)


def _without_expand(op: str) -> Rule:
    def rule(r: _Canonicaliser, inputs: Operands, attrs: Attrs) -> Value | None:
        if not any(r.maker(v, "expand") for v in inputs):
            return None
        current, wanted = list(inputs), lookup(op).infer(inputs, attrs)
        for i, value in enumerate(inputs):
            inner = r.maker(value, "expand")
            if inner is None:
                continue
            trial = [*current[:i], inner.inputs[0], *current[i + 1 :]]
            # The other operands must still give the shape; a rank-0 operand would change how dtypes promote.
            if _first(inner.inputs).tensor.rank > 0 and lookup(op).infer(tuple(trial), attrs) == wanted:
                current = trial
        return None if current == list(inputs) else r.make(op, *current, **attrs)

    rule.__doc__ = f"{op} broadcasts by itself what an expand spelled out."
    return rule


# The rules by op, in the order they are tried.
RULES: dict[str, tuple[Rule, ...]] = {
    "reshape": (_same_shape, _reshape_of_reshape, _reshape_of_norm),
    "expand": (_same_shape,),
    "permute": (_same_order, _permute_of_permute, _permute_of_ones),
    "cast": (_same_dtype, _cast_of_cast, _unary_of_permute("cast")),
    "slice": (_whole_slice, _slice_of_slice, _slice_of_permute),
    "concat": (_one_part, _concat_of_slices, _concat_of_permutes),
    "rope": (_rope_of_permute, _rope_of_one_head),
    "where": (_without_expand("where"),),
    "softcap": (_unary_of_permute("softcap"),),
}
for _op in UNARY:
    RULES[_op] = (_unary_of_permute(_op),)
for _op in BINARY:
    _ones = (_times_one,) if _op in ("mul", "div") else ()
    RULES[_op] = (*_ones, _without_expand(_op), _unary_of_permute(_op), _binary_of_permutes(_op))
for _op in NORMS:
    RULES[_op] = (_norm_of_permute(_op),)
