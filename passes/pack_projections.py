"""Read an input once for all the linears that project it: q, k and v, or gate and up.

Before::

    %q = linear(%x, %q_proj.weight) : bf16[T, 64]
    %k = linear(%x, %k_proj.weight) : bf16[T, 32]
    %v = linear(%x, %v_proj.weight) : bf16[T, 32]

After::

    param %q_proj_k_proj_v_proj.weight : bf16[128, 64] = concat(read("q_proj.weight"), ..., axis=0)
    %qkv = linear(%x, %q_proj_k_proj_v_proj.weight) : bf16[T, 128]
    %q = slice(%qkv, axis=1, start=0, stop=64) : bf16[T, 64]
    ...

Only linears whose results meet again (in one attention or one gated_act) are packed: there a fused node reads the
packed rows in place. Each output element is the same sum as before. Weights may be block-quantised, all alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Param, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.ir.recipe import Concat
from compilerllm.ir.types import TensorType
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

BY = "pack_projections"
# What may stand between a projection and the attention it is for.
_ON_THE_WAY = frozenset(("reshape", "permute", "rms_norm", "layer_norm", "rope", "cast"))


@dataclass(frozen=True)
class _Role:
    """Where a linear's result goes: ``meets`` identifies the attention's state or the gated_act, ``place`` orders."""

    meets: object
    place: int
    parts: int


def pack_projections(graph: Graph, report: PassReport) -> Graph:
    """One function with packed projections."""
    matcher = Matcher(graph)
    params = {p.value: p for p in graph.params}
    groups: dict[object, dict[int, Node]] = {}
    parts: dict[object, int] = {}
    for node in graph.nodes:
        if node.op == "linear" and (role := _role(node, matcher)) is not None:
            groups.setdefault(role.meets, {})[role.place] = node
            parts[role.meets] = role.parts
    packs: dict[Node, list[Node]] = {}
    for meets, found in groups.items():
        linears = [found[place] for place in sorted(found)]
        why = _not_packable(linears, parts[meets], matcher, params)
        if why is None:
            report.match()
            first = min(linears, key=graph.nodes.index)
            packs[first] = linears
        elif len(linears) > 1:
            report.miss(linears[0], why)
    if not packs:
        return graph
    r = Rewriter(graph, by=BY)
    members = frozenset(n for linears in packs.values() for n in linears)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node not in packs:
            return None
        for linear, part in zip(packs[node], _pack(r, packs[node], params), strict=True):
            r.set(linear.output, part)
        return (r.get(node.output),)

    return same_graph(graph, r.run(visit, skip=members - packs.keys()))


def _role(linear: Node, matcher: Matcher) -> _Role | None:
    """Follow the result to where it meets its siblings."""
    value = linear.output
    while matcher.used_once(value):
        user = matcher.uses[value][0]
        if user.op == "gated_act":
            return _Role(user, user.inputs.index(value), 2)
        if user.op in ("attention", "varlen_attention"):
            return _Role(user, user.inputs.index(value), 3)
        if user.op == "kv_write":
            return _Role(user.inputs[0], user.inputs.index(value), 3)
        if user.op == "paged_attention":
            return _Role(user.inputs[1], 0, 3) if user.inputs[0] is value else None
        if user.op not in _ON_THE_WAY or user.inputs[0] is not value:
            return None
        value = user.output
    return None


def _not_packable(
    linears: list[Node], parts: int, matcher: Matcher, params: dict[Value, Param]
) -> str | None:
    if len(linears) < parts:
        return f"only {len(linears)} of {parts} parts are linears of their own"
    if len({n.inputs[0] for n in linears}) > 1:
        return "the linears have different inputs"
    weights, biases = [n.operands[1] for n in linears], [n.input(2) for n in linears]
    if any(v not in params for v in weights) or any(b is not None and b not in params for b in biases):
        return "a weight is computed, not a parameter"
    if len(dtypes := {v.dtype for v in weights}) > 1:
        return f"the weights are {' and '.join(sorted(dtypes))}"
    if any(b is None for b in biases) and any(b is not None for b in biases):
        return "some linears have a bias, others none"
    if any("out_dtype" in n.attrs for n in linears):
        return "a linear's result is converted"
    if shared := [v for v in (*weights, *biases) if v is not None and not matcher.used_once(v)]:
        return f"%{shared[0].name} is used elsewhere too"
    return None


def _pack(r: Rewriter, linears: list[Node], params: dict[Value, Param]) -> list[Value]:
    x = r.get(linears[0].operands[0])
    weight = _joined(r, [params[n.operands[1]] for n in linears])
    biases = [params[b] for n in linears if (b := n.input(2)) is not None]
    bias = _joined(r, biases) if biases else None
    origin = linears[0].origin.merge(*(n.origin for n in linears)).touched(BY)
    packed = r.emit("linear", x, weight, bias, name="packed", origin=origin)
    start, results = 0, []
    for node in linears:
        width = node.output.shape[-1]
        assert isinstance(width, int)
        part = r.emit(
            "slice", packed, axis=packed.tensor.rank - 1, start=start, stop=start + width, name=node.output.name,
            origin=node.origin.touched(BY),
        )  # fmt: skip
        results.append(part)
        start += width
    return results


def _joined(r: Rewriter, parts: Sequence[Param]) -> Value:
    """One parameter with the rows of all."""
    rows = sum(_rows(p) for p in parts)
    first = parts[0].value.tensor
    type = TensorType(first.dtype, (rows, *first.shape[1:]))
    return r.param(packed_name([p.name for p in parts]), type, Concat(tuple(p.recipe for p in parts), 0))


def _rows(param: Param) -> int:
    rows = param.value.shape[0]
    assert isinstance(rows, int)
    return rows


def packed_name(names: Sequence[str]) -> str:
    """``attn.q.weight`` and ``attn.k.weight`` give ``attn.q_k.weight``."""
    paths = [name.split(".") for name in names]
    head = 0
    while all(len(p) > head + 1 for p in paths) and len({p[head] for p in paths}) == 1:
        head += 1
    tail = 0
    while all(len(p) > head + tail + 1 for p in paths) and len({p[-1 - tail] for p in paths}) == 1:
        tail += 1
    middle = "_".join("_".join(p[head : len(p) - tail]) for p in paths)
    return ".".join((*paths[0][:head], middle, *paths[0][len(paths[0]) - tail :]))
