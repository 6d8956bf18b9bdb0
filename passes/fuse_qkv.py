"""Split a packed qkv, norm and rotate q and k, and store k and v, in one node.

Before::

    %q0 = slice(%qkv, axis=1, start=0, stop=64) : bf16[T, 64]
    %q1 = reshape(%q0, shape=[T, 4, 16]) : bf16[T, 4, 16]
    %q = rope(%q1, %cos, %sin, style="half", head_axis=-2) : bf16[T, 4, 16]
    %k0 = slice(...) ; %k1 = reshape(%k0, ...) ; %k = rope(%k1, ...) ; %v0 = slice(...) ; %v = reshape(%v0, ...)
    kv_write(%kv, %k, %v, %step)

After::

    %q = qkv_rope_write(%kv, %qkv, %step, %cos, %sin, heads=4, style="half") : bf16[T, 4, 16]

q and k may have an rms_norm over each head before the rotation (qwen3, gemma3); the rotation may be missing (gpt2).
"""

from dataclasses import dataclass

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.passes.opinfo import NORMS, axis_of, same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_qkv"


@dataclass(frozen=True)
class _Part:
    """How q, k or v comes out of the packed rows: slice, reshape to heads, then perhaps a norm and a rotation."""

    cut: Node
    heads: Node
    norm: Node | None
    rope: Node | None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(n for n in (self.cut, self.heads, self.norm, self.rope) if n is not None)

    @property
    def result(self) -> Value:
        return self.nodes[-1].output

    @property
    def packed(self) -> Value:
        return self.cut.operands[0]


def fuse_qkv(graph: Graph, report: PassReport) -> Graph:
    """One function with ``qkv_rope_write`` nodes."""
    matcher = Matcher(graph)
    fused: dict[Node, tuple[_Part, _Part, _Part]] = {}
    for node in graph.nodes:
        if node.op != "kv_write":
            continue
        found = _parts(node, graph, matcher)
        if isinstance(found, str):
            report.miss(node, found)
        else:
            report.match()
            fused[node] = found
    if not fused:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node not in fused:
            return None
        q, k, v = fused[node]
        attrs: dict[str, Attr] = {"heads": q.heads.output.shape[1]}
        cos, sin, q_norm, k_norm = None, None, None, None
        if q.rope is not None:
            cos, sin = q.rope.operands[1:]
            attrs |= {key: value for key, value in q.rope.attrs.items() if key != "head_axis"}
        if q.norm is not None and k.norm is not None:
            q_norm, k_norm = q.norm.operands[1], k.norm.operands[1]
            attrs |= dict(q.norm.attrs)
        operands = [node.inputs[0], q.packed, node.inputs[3], cos, sin, q_norm, k_norm]
        origin = node.origin.merge(
            *(n.origin for part in (q, k, v) for n in part.nodes), node.origin
        ).touched(BY)
        mapped = [None if x is None else r.get(x) for x in operands]
        (result,) = r.emit_node("qkv_rope_write", mapped, attrs, name=q.result.name, origin=origin)
        r.set(q.result, result)
        return ()

    covered = frozenset(n for parts in fused.values() for part in parts for n in part.nodes)
    return same_graph(graph, r.run(visit, skip=covered))


def _parts(write: Node, graph: Graph, matcher: Matcher) -> tuple[_Part, _Part, _Part] | str:
    """The three parts, or why they are not what the fused node computes."""
    state, k_value, v_value = write.operands[:3]
    readers = [n for n in graph.nodes if n.op == "paged_attention" and n.inputs[1] is state]
    if len(readers) != 1:
        return f"%{state.name} is read by {len(readers)} attentions, not one"
    if graph.nodes.index(readers[0]) < graph.nodes.index(write):
        return "the attention reads before this write"
    found = [
        _part(v, name, matcher) for v, name in ((readers[0].operands[0], "q"), (k_value, "k"), (v_value, "v"))
    ]
    for part in found:
        if isinstance(part, str):
            return part
    q, k, v = found
    assert isinstance(q, _Part) and isinstance(k, _Part) and isinstance(v, _Part)
    return _unlike(q, k, v, matcher) or (q, k, v)


def _part(value: Value, name: str, matcher: Matcher) -> _Part | str:
    """Walk from what attention takes back to the packed rows."""
    nodes: dict[str, Node] = {}
    taker = next((n for n in matcher.uses[value]), None)
    for op in ("rope", "rms_norm", "reshape", "slice"):
        node = matcher.producers.get(value)
        if node is None or node.op != op:
            if op in ("rope", "rms_norm"):
                continue
            return f"{name} comes from {_made_by(node)} where {_NEEDED[op]} is needed"
        if not matcher.used_once(value):
            return f"{name}: {matcher.who_else(value, taker)}"
        nodes[op] = node
        taker, value = node, node.operands[0]
    return _Part(nodes["slice"], nodes["reshape"], nodes.get("rms_norm"), nodes.get("rope"))


_NEEDED = {"reshape": "a reshape to heads", "slice": "a slice of packed q, k and v"}


def _made_by(node: Node | None) -> str:
    """What a value comes from, for a reason; a norm with the rows that it norms, which tells one head from all of them."""
    if node is None:
        return "an input"
    return f"{node.op} over rows of {node.operands[0].shape[-1]} columns" if node.op in NORMS else node.op


def _unlike(q: _Part, k: _Part, v: _Part, matcher: Matcher) -> str | None:
    """What keeps three parts from being one node; None if nothing does."""
    if q.packed is not k.packed or q.packed is not v.packed:
        return "q, k and v are not cut from one value"
    packed = q.packed
    if packed.tensor.rank != 2:
        return f"the packed value is {packed.type}, not [T, width]"
    at = 0
    for part in (q, k, v):
        if axis_of(part.cut) != 1 or part.cut.attrs["start"] != at or part.cut.integer("step", 1) != 1:
            return "q, k and v do not follow each other in the packed row"
        at = part.cut.integer("stop")
        if part.heads.output.tensor.rank != 3:
            return f"heads are {part.heads.output.type}, not [T, H, D]"
    if at != packed.shape[1]:
        return f"the packed row has {packed.shape[1]} columns, q, k and v only {at}"
    if v.norm is not None or v.rope is not None:
        return "v is normed or rotated too"
    if (q.rope is None) != (k.rope is None):
        return "only one of q and k is rotated"
    if q.rope is not None and k.rope is not None:
        if q.rope.operands[1:] != k.rope.operands[1:] or dict(q.rope.attrs) != dict(k.rope.attrs):
            return "q and k are rotated differently"
        if q.rope.attrs["head_axis"] != -2:
            return "the rotation has heads before tokens"
    if (q.norm is None) != (k.norm is None):
        return "only one of q and k is normed"
    if q.norm is not None and k.norm is not None:
        if dict(q.norm.attrs) != dict(k.norm.attrs):
            return "q and k are normed differently"
        if len(q.norm.operands) != 2 or len(k.norm.operands) != 2:
            return "the norms of q and k have no weight"
    return None
