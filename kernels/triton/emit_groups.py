"""How tensor ops, pointwise groups and opaque operators become launches of generated kernels and library calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from compilerllm.ir.dims import Dim, free_dims, product, symbol
from compilerllm.ir.graph import Attr, Node, Value
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.cpu.opaque import HostCall, host_call, host_types, is_opaque
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.gpu.program import Extent
from compilerllm.kernels.refs import Ref, view
from compilerllm.kernels.triton.emitter import BucketEmitter, emitter, strided_copy
from compilerllm.kernels.triton.expressions import POINTWISE_OPS, REGISTERS
from compilerllm.kernels.triton.groups import REDUCTION_OPS, ROW_OPS, WIDEST_ROW, Generated, Nest

FLAT_BLOCK = 1024  # elements of a program without rows: 16 bytes of bf16 for each of 128 threads
ROW_TILE = 2048  # elements of a program with rows, where rows are shorter than that


def launch_nest(
    e: BucketEmitter,
    node: Node,
    nodes: Sequence[Node],
    loads: Mapping[Value, Ref],
    stores: Sequence[tuple[Value, Ref]],
) -> None:
    """Generate the kernel of ``nodes`` and launch it. Raises ``UnsupportedByTarget``."""
    where = f"{node.op} of {node.origin.path}" if node.origin.path else node.op
    for ref in (*loads.values(), *(r for _, r in stores)):
        if ref.dtype not in REGISTERS:
            raise UnsupportedByTarget(
                f"{where} reads %{ref.root.name}, packed as {ref.dtype}; use a checkpoint that is not quantised, or "
                "--weights dense"
            )
    early = {v for v, ref in loads.items() if e.is_param(ref.root)}
    everything = [*loads.values(), *(r for _, r in stores)]
    wide = max(_reach(e, r) for r in everything) >= 2**31
    name = "copy" if not nodes else " ".join(n.op for n in nodes)
    made = Nest(name, nodes, loads, stores, early, wide).generate()
    fixed = {
        name: ref if isinstance(ref.offset, int) else replace(ref, offset=0) for name, ref in made.pointers
    }
    args = {name: e.ref_arg(ref) for name, ref in fixed.items()} | {d: e.extent(symbol(d)) for d in made.dims}
    if made.columns:
        _launch_rows(e, node, made, args)
        return
    e.launch(
        node,
        made.template,
        (covering(e, made.rows, FLAT_BLOCK), 1, 1),
        args,
        {"BLOCK": FLAT_BLOCK},
        num_warps=4,
    )


def _launch_rows(e: BucketEmitter, node: Node, made: Generated, args: Mapping[str, object]) -> None:
    block = min(power_of_two(made.columns), WIDEST_ROW if made.columns <= WIDEST_ROW else WIDEST_ROW // 4)
    rows = max(1, min(power_of_two(e.bound(made.rows)), ROW_TILE // block))
    warps = max(1, min(16, block * rows // 512))
    tile = {"ROWS": rows, "BLOCK": block}
    e.launch(node, made.template, (covering(e, made.rows, rows), 1, 1), args, tile, num_warps=warps)  # type: ignore[arg-type]


def power_of_two(value: int) -> int:
    """The smallest that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def covering(e: BucketEmitter, size: Dim, block: int) -> int | Extent:
    """Programs of ``block`` elements that cover ``size``; never fewer, perhaps a few more."""
    if isinstance(size, int):
        return -(-size // block)
    factor, name = size.as_coeff_Mul()
    if isinstance(name, sympy.Symbol):
        unit = int(factor)
        together = max(1, block // unit)
        return e.extent(name, together, -(-together * unit // block))
    return -(-e.bound(size) // block)  # a launch's sizes are its bucket's


def _reach(e: BucketEmitter, ref: Ref) -> int:
    steps = sum(
        (e.bound(x) - 1) * e.bound(s) for x, s in zip(ref.shape, ref.strides, strict=True) if e.bound(x) > 0
    )
    return max(steps, e.bound(product(ref.shape)))


@strided_copy
def copy_view(e: BucketEmitter, source: Ref, target: Ref) -> None:
    """Elements of one view to another of the same shape."""
    value = Value("copied", source.root.type)
    launch_nest(e, e.node, [], {value: source}, [(value, target)])


@emitter("concat")
def concat(e: BucketEmitter, node: Node) -> None:
    """One copy for each part."""
    out = e.ref(node.output)
    axis = node.integer("axis") % len(out.shape)
    at: Dim = 0
    for value in node.operands:
        offset = out.offset + at * out.strides[axis]
        copy_view(e, e.ref(value), replace(out, shape=value.shape, offset=offset))
        at = at + value.shape[axis]


@emitter("reshape", "permute", "slice", "expand")
def materialise(e: BucketEmitter, node: Node) -> None:
    """A data movement that is no view of what it reads, or that is a result: copied, in the result's order."""
    source = node.operand(0)
    seen = view(node, e.ref(source)) or view(node, e.dense(source))
    if seen is None:
        raise UnsupportedByTarget(f"{node!r} (from {node.origin.path or 'the graph'}) cannot be laid out")
    copy_view(e, seen, e.ref(node.output))


@emitter("group")
def group(e: BucketEmitter, node: Node) -> None:
    """One generated kernel, or one library call where it is made of opaque operators."""
    body = e.module.functions[node.fn]
    if is_opaque(body):
        opaque(e, node)
        return
    loads = {
        inner: e.ref(given)
        for inner, given in zip(body.inputs, node.inputs, strict=True)
        if given is not None
    }
    stores = [(inner, e.ref(given)) for inner, given in zip(body.outputs, node.outputs, strict=True)]
    launch_nest(e, node, body.nodes, loads, stores)


@emitter(*POINTWISE_OPS, *ROW_OPS, "iota")
def single(e: BucketEmitter, node: Node) -> None:
    """One op as a kernel of its own; a reduction over any axis works on a view with that axis last."""
    loads = {v: e.ref(v) for v in node.operands}
    out = e.ref(node.output)
    if node.op in ROW_OPS:
        x = node.operand(0)
        axis = node.integer("axis") % x.tensor.rank
        width = x.shape[axis]
        if not isinstance(width, int) or (node.op == "cumsum" and width > WIDEST_ROW):
            _through_torch(e, node)
            return
        loads = {x: _last(loads[x], axis)}
        if node.op not in REDUCTION_OPS or node.attrs.get("keepdim"):
            out = _last(out, axis)
    launch_nest(e, node, [node], loads, [(node.output, out)])


def _last(ref: Ref, axis: int) -> Ref:
    """The view with ``axis`` moved to the end."""
    order = [i for i in range(len(ref.shape)) if i != axis] + [axis]
    return replace(
        ref, shape=tuple(ref.shape[i] for i in order), strides=tuple(ref.strides[i] for i in order)
    )


@emitter("matmul")
def _through_torch(e: BucketEmitter, node: Node) -> None:
    """An op with no kernel of ours, by the torch operator that means the same."""
    target, args, named = _operator(node)
    where = f"{node.op} {node.origin.path}".strip()
    _library(
        e,
        node,
        HostCall(
            ((target, args, named),), host_types(node.operands), host_types(node.outputs), ("@0.0",), where
        ),
    )


def _operator(node: Node) -> tuple[str, object, object]:
    axis: Attr = node.attrs.get("axis", -1)
    keep, dtype = bool(node.attrs.get("keepdim", False)), f"dtype:{node.output.dtype}"
    match node.op:
        case "matmul":
            return "aten.matmul.default", ["%0", "%1"], []
        case "softmax":
            return "aten.softmax.int", ["%0", axis], []
        case "cumsum":
            return "aten.cumsum.default", ["%0", axis], [["dtype", dtype]]
        case "sum":
            return "aten.sum.dim_IntList", ["%0", [axis], keep], [["dtype", dtype]]
        case "mean":
            return "aten.mean.dim", ["%0", [axis], keep], []
        case "prod":
            return "aten.prod.dim_int", ["%0", axis, keep], [["dtype", dtype]]
        case "argmax":
            return "aten.argmax.default", ["%0", axis, keep], []
        case "amax" | "amin":
            return f"aten.{node.op}.default", ["%0", [axis], keep], []
    raise UnsupportedByTarget(f"{node!r} has neither a CUDA kernel nor a torch operator")


@emitter("aten")
def opaque(e: BucketEmitter, node: Node) -> None:
    """An opaque operator, or a group of them."""
    for value in node.operands:
        if isinstance(value.type, StateType | StepType) or value.dtype not in REGISTERS:
            raise UnsupportedByTarget(
                f"{node!r} (from {node.origin.path or 'the graph'}) cannot take a {value.type}"
            )
    _library(e, node, host_call(e.module, node, f"{node.op} {node.origin.path}".strip()))


def _library(e: BucketEmitter, node: Node, call: HostCall) -> None:
    shapes = [v.shape for v in (*node.operands, *node.outputs)]
    texts = json.dumps([call.steps, call.inputs, call.outputs])
    dims = sorted(
        {n for shape in shapes for d in shape for n in free_dims(d)}
        | {n for n in "TSR" if f"dim:{n}" in texts}
    )
    spec = {
        "steps": call.steps, "inputs": call.inputs, "outputs": call.outputs, "results": call.results, "where": call.where,
        "dims": dims,
    }  # fmt: skip
    args = [e.arg(v) for v in (*node.operands, *node.outputs)]
    e.library(node, "aten", [*args, *(e.extent(symbol(d)) for d in dims)], {"call": json.dumps(spec)})
