"""What passes promise of their results beside the same numbers: short statements that can be read off the graph.

A rewrite can keep every number and still not do what the rest of the build relies on: leave a call behind, a bound too
wide for 32 bits, logits that are not f32.
"""

from collections.abc import Callable, Iterator

from compilerllm.ir.graph import Module, Node
from compilerllm.ir.op import lookup
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import TensorType

LARGEST = 2**31 - 1  # rows are numbered by i32


def broken(name: str, before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    """Promises of the pass called ``name`` that its result does not keep. bucket: of passes that have one."""
    reached, were = _reached(after), _reached(before)
    for function in sorted(after.functions.keys() - reached):
        if function in were or function not in before.functions:
            yield f"@{function} is left behind, used by nobody"
    for graph in after.functions.values():
        old = before.functions.get(graph.name)
        for d in graph.dims:
            was = (
                next((x.high for x in old.dims if x.name == d.name), LARGEST) if old is not None else LARGEST
            )
            if d.high > max(was, LARGEST):
                yield f"@{graph.name}: {d.name} may be {d.high}, which i32 does not hold"
    if (promise := _PROMISES.get(name)) is not None:
        yield from promise(before, after, bucket)


def _reached(module: Module) -> frozenset[str]:
    found, wanted = set[str](), ["main"]
    while wanted:
        name = wanted.pop()
        if name not in found and name in module.functions:
            found.add(name)
            wanted += [n.fn for n in module.functions[name].nodes if n.op in ("call", "group")]
    return frozenset(found)


def _flat(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    calls = [n for n in after.main.nodes if n.op == "call"]
    if calls:
        yield f"@main still calls @{calls[0].fn}"


def _f32(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    head = after.main.outputs[0] if after.main.outputs else None
    if head is not None and isinstance(head.type, TensorType) and head.type.is_float and head.dtype != "f32":
        yield f"%{head.name} is {head.dtype}, not f32"


def _bounded(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    most = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
    for graph in after.functions.values():
        for d in graph.dims:
            if d.name in most and d.high > most[d.name]:
                yield f"@{graph.name}: {d.name} may be {d.high}, but the bucket holds {most[d.name]}"


def _once(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    for graph in after.functions.values():
        seen: dict[object, Node] = {}
        for node in graph.nodes:
            op = lookup(node.op)
            if not op.pure or op.reads_state or node.op in ("aten", "call", "group"):
                continue
            attrs = tuple(sorted((k, type(v).__name__, str(v)) for k, v in node.attrs.items()))
            if (first := seen.setdefault((node.op, node.inputs, attrs), node)) is not node:
                yield f"@{graph.name}: {node!r} computes what {first!r} has computed"


def _turned(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    for graph in after.functions.values():
        makers = graph.producers()
        for node in graph.nodes:
            maker = makers.get(node.operand(0)) if node.op == "rope" else None
            if maker is None or maker.op != "permute" or node.attrs["head_axis"] != -3:
                continue
            *lead, heads, tokens, width = maker.dimensions("order")
            if (heads, tokens, width) == (len(lead) + 1, len(lead), len(lead) + 2):
                yield f"@{graph.name}: {node!r} rotates what {maker!r} turned, and could before"


def _whole(before: Module, after: Module, bucket: Bucket) -> Iterator[str]:
    for graph in after.functions.values():
        makers, uses = graph.producers(), graph.uses()
        for node in graph.nodes:
            if node.op != "gated_act_packed":
                continue
            maker = makers.get(node.operand(0))
            alone = maker is not None and maker.op == "linear" and len(uses[maker.output]) == 1
            if (
                alone
                and maker is not None
                and maker.output not in graph.outputs
                and "out_dtype" not in maker.attrs
            ):
                yield f"@{graph.name}: {maker!r} is read by {node!r} alone, and not joined with it"


_PROMISES: dict[str, Callable[[Module, Module, Bucket], Iterator[str]]] = {
    "inline_calls": _flat, "float_logits": _f32, "specialize": _bounded, "deduplicate": _once, "fuse_gated": _whole,
    "canonicalise": _turned,
}  # fmt: skip
