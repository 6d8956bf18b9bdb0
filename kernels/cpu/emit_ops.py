"""How model ops become C++: a template of ``csrc`` with constant dims. One function an op."""

from compilerllm.ir.dims import product
from compilerllm.ir.graph import Node
from compilerllm.ir.types import DTYPE_BYTES
from compilerllm.kernels.cpu.emitter import FunctionEmitter, emitter, float_type, optional
from compilerllm.kernels.cpu.loops import c_number, emit_copy
from compilerllm.kernels.cpu.refs import CRef, c_dim
from compilerllm.kernels.cpu.select import gated_panels, weight_tag
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import dense_strides

ACTIVATIONS = {
    "silu": "Silu", "gelu": "GeluErf", "gelu_tanh": "GeluTanh", "relu": "Relu", "relu2": "Relu2", "sigmoid": "Sigmoid",
    "identity": "Identity",
}  # fmt: skip


def activation(node: Node) -> str:
    """The functor of ``act.h`` that a node's ``act`` names. Raises ``UnsupportedByTarget``."""
    name = node.text("act")
    if name not in ACTIVATIONS:
        raise UnsupportedByTarget(f"{node!r}: activation {name!r} has no CPU kernel here")
    return ACTIVATIONS[name]


def _linear(e: FunctionEmitter, node: Node, epilogue: str, template: str = "linear") -> None:
    """The call shared by every linear; ``epilogue`` is a C++ expression."""
    x, weight = node.operand(0), node.operand(1)
    e.need("linear.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    tag = weight_tag(e.graph.param(weight.name).recipe)
    rows = weight.shape[0]
    e.line(
        f"{template}<{tag}>(team, {ref.pointer}, {stride}, {count}, params_[{e.graph.params.index(e.graph.param(weight.name))}], {rows}, {width}, {epilogue});"
    )
    e.sync()
    e.note(node, template, weights=tag, values=float_type(e, x))


@emitter("linear")
def linear(e: FunctionEmitter, node: Node) -> None:
    x, out = node.operand(0), node.output
    width = c_dim(out.shape[-1])
    bias = optional(e, node, 2)
    if out.dtype == "f32" and x.dtype == "bf16":
        epilogue = f"StoreF32<float, bf16>{{{e.ref(out).pointer}, {width}, {bias}}}"
        _linear(e, node, epilogue)
    else:
        _linear(e, node, f"Store<{float_type(e, out)}>{{{e.ref(out).pointer}, {width}, {bias}}}")


@emitter("linear_act")
def linear_act(e: FunctionEmitter, node: Node) -> None:
    out = node.output
    _linear(
        e,
        node,
        f"Act<{activation(node)}, {float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {optional(e, node, 2)}}}",
    )


@emitter("linear_gated")
def linear_gated(e: FunctionEmitter, node: Node) -> None:
    out, weight = node.output, node.operand(1)
    if not gated_panels(int(weight.shape[0])):
        _linear_then_gate(e, node)
        return
    _linear(
        e,
        node,
        f"Gated<{activation(node)}, {float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {optional(e, node, 2)}}}",
    )


def _linear_then_gate(e: FunctionEmitter, node: Node) -> None:
    """Widths that do not fill panels of 16: the linear stores gate and up, a second stage joins them."""
    out, weight = node.output, node.operand(1)
    kind, rows = float_type(e, out), int(weight.shape[0])
    count = c_dim(product(out.shape[:-1]))
    both = e.scratch(product(out.shape[:-1]) * rows * DTYPE_BYTES[out.dtype], kind)
    _linear(e, node, f"Store<{kind}>{{{both}, {rows}, {optional(e, node, 2)}}}")
    e.need("act.h")
    half = rows // 2
    e.line(
        f"gated_act<{activation(node)}>(team, {both}, {rows}, {both} + {half}, {rows}, {e.ref(out).pointer}, {half}, {count}, {half});"
    )
    e.sync()


@emitter("linear_add")
def linear_add(e: FunctionEmitter, node: Node) -> None:
    out, residual = node.output, node.operand(2)
    ref, _, _, stride = e.rows(residual, len(residual.shape) - 1)
    _linear(
        e, node,
        f"AddResidual<{float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {ref.pointer}, {stride}, {optional(e, node, 3)}}}",
    )  # fmt: skip


@emitter("embedding")
def embedding(e: FunctionEmitter, node: Node) -> None:
    ids, table, out = node.operand(0), node.operand(1), node.output
    e.need("embed.h")
    kind = float_type(e, out)
    ref = e.dense(ids)
    pointer, count, width = ref.pointer, c_dim(ids.tensor.numel), c_dim(out.shape[-1])
    if ids.dtype == "i64":
        pointer = e.scratch(ids.tensor.numel * 4, "int32_t")
        emit_copy(e, CRef(pointer, "i32", ids.shape, dense_strides(ids.shape), ids), ref)
        e.sync()
    index = e.graph.params.index(e.graph.param(table.name))
    tag = weight_tag(e.graph.param(table.name).recipe, default="")
    target = e.ref(out).pointer
    if tag:
        e.line(
            f"embed_packed<{tag}>(team, params_[{index}], {pointer}, {target}, {width}, {count}, {width});"
        )
    else:
        e.line(
            f"embed(team, (const {kind}*)params_[{index}], {pointer}, {target}, {width}, {count}, {width});"
        )
    e.sync()
    if tag:
        e.note(node, "embed_packed", weights=tag, values=kind)
    else:
        e.note(node, "embed", values=kind)


def norm_params(node: Node) -> str:
    """The ``NormParams`` of a node with ``eps``, ``offset`` and ``round_first``."""
    return f"NormParams{{{c_number(node.number('eps'))}f, {c_number(node.number('offset', 0.0))}f, {'true' if node.attrs.get('round_first') else 'false'}}}"


@emitter("rms_norm", "layer_norm")
def norm(e: FunctionEmitter, node: Node) -> None:
    x, out = node.operand(0), node.output
    kind = float_type(e, x)
    e.need("norm.h")
    lead = len(x.shape) - 1
    ref, count, width, stride = e.rows(x, lead)
    head = f"{node.op}<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {count}, {width}, {optional(e, node, 1)}"
    if node.op == "rms_norm":
        e.line(f"{head}, {norm_params(node)});")
    else:
        e.line(f"{head}, {optional(e, node, 2)}, {norm_params(node)});")
    e.sync()
    e.note(node, node.op, values=kind)


@emitter("add_rms_norm", "add_layer_norm")
def add_norm(e: FunctionEmitter, node: Node) -> None:
    x, residual = node.operand(0), node.operand(1)
    normed, total = node.outputs
    kind = float_type(e, x)
    e.need("norm.h")
    lead = len(x.shape) - 1
    ref, count, width, stride = e.rows(x, lead)
    other, _, _, other_stride = e.rows(residual, lead)
    head = (
        f"{node.op}<{kind}>(team, {ref.pointer}, {stride}, {other.pointer}, {other_stride}, {e.ref(total).pointer}, {width}, "
        f"{e.ref(normed).pointer}, {width}, {count}, {width}, {optional(e, node, 2)}"
    )
    if node.op == "add_rms_norm":
        e.line(f"{head}, {norm_params(node)});")
    else:
        e.line(f"{head}, {optional(e, node, 3)}, {norm_params(node)});")
    e.sync()
    e.note(node, node.op, values=kind)


@emitter("step_field")
def step_field(e: FunctionEmitter, node: Node) -> None:
    out = node.output
    e.refs[out] = CRef(f"c.step->{node.text('field')}", "i32", out.shape, dense_strides(out.shape), out)


@emitter("gated_act")
def gated_act(e: FunctionEmitter, node: Node) -> None:
    gate, up, out = node.operand(0), node.operand(1), node.output
    e.need("act.h")
    lead = len(gate.shape) - 1
    (gr, count, width, gs), (ur, _, _, us) = e.rows(gate, lead), e.rows(up, lead)
    e.line(
        f"gated_act<{activation(node)}>(team, {gr.pointer}, {gs}, {ur.pointer}, {us}, {e.ref(out).pointer}, {width}, {count}, {width});"
    )
    e.sync()
    e.note(node, "gated_act", act=activation(node))


@emitter("gated_act_packed")
def gated_act_packed(e: FunctionEmitter, node: Node) -> None:
    x, out = node.operand(0), node.output
    e.need("act.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    half = width // 2
    e.line(
        f"gated_act<{activation(node)}>(team, {ref.pointer}, {stride}, {ref.pointer} + {half}, {stride}, {e.ref(out).pointer}, {half}, {count}, {half});"
    )
    e.sync()
    e.note(node, "gated_act", act=activation(node))


@emitter("gather_rows")
def gather_rows(e: FunctionEmitter, node: Node) -> None:
    x, index, out = node.operand(0), node.operand(1), node.output
    ref, _, width, stride = e.rows(x, 1)
    rows = e.dense(index).pointer
    e.need("loops.h")
    target = e.ref(out)
    e.line(f"for (int64_t r = team.rank; r < {c_dim(index.shape[0])}; r += team.size)")
    e.line(
        f"  memcpy({target.pointer} + r * {width}, {ref.pointer} + int64_t({rows}[r]) * {stride}, {width} * sizeof({target.c_type}));"
    )
    e.sync()
    e.note(node, "gather_rows")


@emitter("experts")
def experts(e: FunctionEmitter, node: Node) -> None:
    x, ids, weights, gate_up, down, out = *(node.operand(i) for i in range(5)), node.output
    kind = float_type(e, x)
    e.need("experts.h")
    ref, count, width, stride = e.rows(x, 1)
    gu, dn = e.graph.param(gate_up.name), e.graph.param(down.name)
    act = "ClampedAct" if node.text("act") == "gpt_oss" else f"PlainAct<{activation(node)}>"
    shape = (
        f"ExpertShape{{{c_dim(gate_up.shape[0])}, {c_dim(ids.shape[1])}, {width}, {c_dim(down.shape[2])}, "
        f"{c_number(node.number('limit', 0.0))}f, {c_number(node.number('alpha', 0.0))}f}}"
    )
    e.line(
        f"experts<{weight_tag(gu.recipe)}, {act}>(team, {ref.pointer}, {stride}, {e.dense(ids).pointer}, {e.dense(weights).pointer}, "
        f"params_[{e.graph.params.index(gu)}], params_[{e.graph.params.index(dn)}], {optional(e, node, 5, 'const ' + kind)}, "
        f"{optional(e, node, 6, 'const ' + kind)}, {e.ref(out).pointer}, {count}, {shape});"
    )
    e.sync()
    e.note(node, "experts", weights=weight_tag(gu.recipe), act=act)


@emitter("topk")
def topk(e: FunctionEmitter, node: Node) -> None:
    x = node.operand(0)
    values, indices = node.outputs
    e.need("experts.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    e.line(
        f"topk(team, {ref.pointer}, {stride}, {e.ref(values).pointer}, {e.ref(indices).pointer}, {count}, {width}, {node.integer('k')});"
    )
    e.sync()
    e.note(node, "topk")
