"""Random modules for property tests: all ops with random attributes, dims, recipes, states, calls and origins."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from compilerllm.ir.builder import Builder
from compilerllm.ir.dims import Dim, FloorDiv, dim, symbol
from compilerllm.ir.errors import TypeMismatch
from compilerllm.ir.graph import Attr, FuncRef, Graph, Module, Origin, Value
from compilerllm.ir.op import Op, all_ops
from compilerllm.ir.ops.model import ACTIVATIONS
from compilerllm.ir.recipe import (
    Concat,
    Convert,
    Literal,
    Permute,
    Read,
    Recipe,
    Relayout,
    Reshape,
    Shift,
    Slice,
)
from compilerllm.ir.types import DTYPE_BYTES, DTYPES, STATE_KINDS, STEP, StateType, TensorType

NAMES = ("T", "S", "R", "long_name2")
_WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
_PATHS = st.lists(_WORDS | st.integers(0, 99).map(str), max_size=3).map(".".join)
_FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def dims(draw: st.DrawFn, depth: int = 2) -> Dim:
    """Whole numbers and expressions over declared names."""
    kind = draw(st.integers(0, 5 if depth else 1))
    if kind == 0:
        return draw(st.integers(0, 10_000))
    if kind == 1:
        return symbol(draw(st.sampled_from(NAMES)))
    left, right = draw(dims(depth=depth - 1)), draw(dims(depth=depth - 1))
    match kind:
        case 2:
            return dim(left + right)
        case 3:
            return dim(left * right)
        case 4:
            return dim(left - right)
    return dim(FloorDiv(dim(left + 0 * symbol("T")) + symbol("S"), draw(st.integers(1, 64))))


TENSORS = st.builds(TensorType, st.sampled_from(sorted(DTYPES)), st.lists(dims(), max_size=3).map(tuple))
FIXED = st.builds(
    TensorType, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4096), max_size=3).map(tuple)
)


@st.composite
def states(draw: st.DrawFn) -> StateType:
    name = draw(st.sampled_from(sorted(STATE_KINDS)))
    kind = STATE_KINDS[name]
    fields = kind.fields + draw(st.sampled_from([(), kind.optional]))
    given = draw(st.permutations([(f, draw(st.integers(0, 512))) for f in fields]))
    return StateType(name, draw(st.sampled_from(sorted(DTYPE_BYTES))), tuple(given))


def recipes(depth: int = 3) -> st.SearchStrategy[Recipe]:
    """Any tree of steps; shapes need not fit, since only text and structure are tested."""
    whole = st.integers(0, 9)
    wholes = st.lists(whole, max_size=3).map(tuple)
    dtypes = st.sampled_from(sorted(DTYPES))
    leaves = st.builds(Read, st.text(max_size=8)) | st.builds(
        Literal, dtypes, wholes, st.lists(_FLOATS, max_size=3).map(tuple)
    )
    if depth == 0:
        return leaves
    part = st.deferred(lambda: recipes(depth - 1))
    return (
        leaves
        | st.builds(Convert, part, dtypes)
        | st.builds(Shift, part, st.floats(allow_nan=False, allow_infinity=False))
        | st.builds(Slice, part, whole, whole, whole)
        | st.builds(Concat, st.lists(part, min_size=1, max_size=3).map(tuple), whole)
        | st.builds(Permute, part, wholes)
        | st.builds(Reshape, part, wholes)
        | st.builds(Relayout, part, st.text(max_size=5))
    )


ATTRS: st.SearchStrategy[Attr] = st.recursive(
    st.booleans()
    | st.integers(-(2**40), 2**40)
    | _FLOATS
    | st.text(max_size=6)
    | dims()
    | st.builds(FuncRef, _WORDS),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
ORIGINS = st.builds(
    Origin, _PATHS, st.lists(_WORDS, max_size=2).map(tuple), st.lists(_WORDS, max_size=2).map(tuple)
)

# Types that many ops take, so that rules accept more often than chance would.
_FRIENDLY = tuple(
    TensorType(dtype, shape)
    for dtype, shape in (
        ("f32", ("T", 8)), ("f32", ("T", 8)), ("f32", (8,)), ("f32", (6, 8)), ("bool", ("T", 8)), ("i64", ("T",)),
        ("bf16", ("T", 4, 8)), ("bf16", ("T", 4, 8)), ("bf16", ("T", 8)),
    )
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn, name: str = "main") -> Graph:
    """A function that prints; its nodes obey their type rules, since the parser checks those."""
    b = Builder(name)
    for declared in NAMES:
        low = draw(st.integers(0, 100))
        b.dim(declared, low, low + draw(st.integers(0, 10_000)))
    values: list[Value] = [b.input(b.fresh("in"), t) for t in (*_FRIENDLY, draw(TENSORS))]
    values.append(b.input("step", STEP))
    weights = draw(st.lists(st.tuples(_WORDS, FIXED, recipes()), max_size=2))
    values += [b.param(b.fresh(name) + ".weight", type, recipe) for name, type, recipe in weights]
    values += [b.state(b.fresh("kv"), type) for type in draw(st.lists(states(), max_size=2))]
    for _ in range(draw(st.integers(0, 6))):
        b.origin = draw(ORIGINS)
        values += _emit(draw, b, values)
    return b.finish(*draw(st.lists(st.sampled_from(values), max_size=3)))


def _emit(draw: st.DrawFn, b: Builder, values: Sequence[Value]) -> Sequence[Value]:
    """One node of a random op; a combination its rule refuses becomes an ``aten`` node over the same operands."""
    ops = list(all_ops().values())
    # Hypothesis likes small numbers and its own old examples; mixing the bits spreads them over all ops.
    op = ops[(draw(st.integers(0, 2**32 - 1)) * 2654435761 >> 7) % len(ops)]
    inputs = _operands(draw, op, values)
    attrs = {
        a.rstrip("?"): _attr(draw, a.rstrip("?"))
        for a in op.attrs
        if not a.endswith("?") or draw(st.booleans())
    }
    try:
        if op.rule is not None:
            return b.emit_node(op.name, inputs, attrs, name=draw(_WORDS))
    except TypeMismatch:
        pass
    template = {"target": draw(st.text(max_size=6)), "args": draw(ATTRS)}
    types = draw(st.lists(TENSORS, max_size=2))
    return b.emit_node("aten", inputs, template, types=types, name=draw(_WORDS))


def _operands(draw: st.DrawFn, op: Op, values: Sequence[Value]) -> list[Value | None]:
    count = len(op.operands) + (draw(st.integers(0, 2)) if op.operands and op.operands[-1].variadic else 0)
    first = draw(st.sampled_from([*values[:2], *values]))
    like = [v for v in values if v.type == first.type]
    return [first, *(draw(st.sampled_from([*like, *values, None])) for _ in range(count - 1))][:count]


# What makes a rule accept more often than chance would.
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "act": st.sampled_from(ACTIVATIONS), "dtype": st.sampled_from(sorted(DTYPES)), "axis": st.integers(-2, 2),
    "scalar": st.booleans() | st.integers(-5, 5) | _FLOATS, "reverse": st.booleans(), "keepdim": st.booleans(),
    "eps": st.floats(0, 1), "offset": st.floats(0, 1), "round_first": st.booleans(), "size": dims(),
    "shape": st.lists(dims(), max_size=3).map(tuple), "order": st.permutations(range(2)).map(tuple),
    "field": st.sampled_from(("token_ids", "positions", "slots", "sample_rows")), "k": st.integers(0, 4),
    "value": _FLOATS, "style": st.sampled_from(("half", "interleaved")), "head_axis": st.sampled_from((-2, -3)),
    "layout": st.sampled_from(("half", "repeat", "half_width")), "window": st.integers(0, 9), "scale": _FLOATS,
    "start": st.integers(0, 2), "stop": st.integers(2, 4), "step": st.integers(1, 2),
}  # fmt: skip


def _attr(draw: st.DrawFn, name: str) -> Attr:
    value: Attr = draw(_LIKELY.get(name, ATTRS))
    return value


@st.composite
def modules(draw: st.DrawFn) -> Module:
    """One to three functions and module attributes."""
    names = draw(st.lists(_WORDS, max_size=2, unique=True).filter(lambda n: "main" not in n))
    attrs = draw(st.dictionaries(_WORDS, ATTRS, max_size=3))
    return Module({name: draw(graphs(name)) for name in ["main", *names]}, attrs)
