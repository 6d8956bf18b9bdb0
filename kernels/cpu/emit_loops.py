"""How data movement, pointwise ops and their groups become C++: generated loops and strided copies."""

from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.cpu.emitter import FunctionEmitter, emitter
from compilerllm.kernels.cpu.loops import POINTWISE_OPS, REDUCTION_OPS, LoopNest, emit_copy
from compilerllm.kernels.cpu.opaque import emit_opaque, is_opaque
from compilerllm.kernels.cpu.refs import CRef, c_dim
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import view


@emitter("concat")
def concat(e: FunctionEmitter, node: Node) -> None:
    out = e.ref(node.output)
    axis = node.integer("axis") % len(out.shape)
    at: Dim = 0
    for value in node.operands:
        offset = out.offset + at * out.strides[axis]
        target = CRef(out.base, out.dtype, value.shape, out.strides, out.root, offset)
        emit_copy(e, target, e.ref(value))
        at = at + value.shape[axis]
    e.sync()
    e.note(node, "copy")


@emitter("reshape", "permute", "slice", "expand")
def materialise(e: FunctionEmitter, node: Node) -> None:
    """A data movement that is no view of what it reads: copied, in the result's order."""
    source = node.operand(0)
    seen = view(node, e.ref(source)) or view(node, e.dense(source))
    if seen is None:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} cannot be laid out")
    emit_copy(e, e.ref(node.output), seen)
    e.sync()
    e.note(node, "copy")


@emitter("iota")
def iota(e: FunctionEmitter, node: Node) -> None:
    out = e.ref(node.output)
    e.line(
        f"for (int64_t i = team.rank; i < {c_dim(node.output.shape[0])}; i += team.size) {out.pointer}[i] = ({out.c_type})i;"
    )
    e.sync()
    e.note(node, "iota")


def loop_source(e: FunctionEmitter, value: Value) -> CRef:
    """A group's operand: its last axis must step by one (or be broadcast), otherwise it is made dense."""
    ref = e.ref(value)
    if ref.shape and ref.shape[-1] != 1 and ref.strides[-1] not in (0, 1):
        return e.dense(value)
    return ref


@emitter("group")
def group(e: FunctionEmitter, node: Node) -> None:
    """One generated loop, or one host call where it is made of opaque operators."""
    body = e.module.functions[node.fn]
    if is_opaque(body):
        emit_opaque(e, node)
        return
    sources = {
        inner: loop_source(e, given)
        for inner, given in zip(body.inputs, node.inputs, strict=True)
        if given is not None
    }
    results = {inner: e.ref(given) for inner, given in zip(body.outputs, node.outputs, strict=True)}
    LoopNest(e, body.nodes, results, sources).emit()
    e.sync()
    e.note(node, "loop")


def check_last_axis(e: FunctionEmitter, node: Node) -> None:
    """Raises ``UnsupportedByTarget`` where a reduction is over any other axis."""
    axis, rank = node.integer("axis"), len(node.operands[0].shape)
    if axis % rank != rank - 1:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} reduces axis {axis}; CPU loops reduce the last")


def pointwise(e: FunctionEmitter, node: Node) -> None:
    sources = {v: loop_source(e, v) for v in node.operands}
    if "axis" in node.attrs:
        check_last_axis(e, node)
    LoopNest(e, [node], {node.output: e.ref(node.output)}, sources).emit()
    e.sync()
    e.note(node, "loop")


emitter(*POINTWISE_OPS, *REDUCTION_OPS, "softmax")(pointwise)


emitter("aten")(emit_opaque)


@emitter("argmax")
def argmax(e: FunctionEmitter, node: Node) -> None:
    x, out = node.operand(0), node.output
    check_last_axis(e, node)
    e.need("experts.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    e.line(f"argmax_rows(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {count}, {width});")
    e.sync()
    e.note(node, "argmax_rows")
