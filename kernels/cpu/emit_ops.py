"""How each op becomes C++: a template of ``csrc`` with constant dims, or a generated loop. One function an op."""

from collections.abc import Callable
from dataclasses import replace

from compilerllm.ir.dims import dim, product
from compilerllm.ir.graph import Node, Value
from compilerllm.ir.types import DTYPE_BYTES
from compilerllm.kernels.cpu.emit import FunctionEmitter
from compilerllm.kernels.cpu.loops import POINTWISE_OPS, REDUCTION_OPS, LoopNest, c_number, emit_copy
from compilerllm.kernels.cpu.refs import Ref, c_dim, dense_strides
from compilerllm.kernels.cpu.select import gated_panels, weight_tag
from compilerllm.kernels.errors import UnsupportedByTarget

Emitter = Callable[[FunctionEmitter, Node], None]
EMITTERS: dict[str, Emitter] = {}
ACTIVATIONS = {
    "silu": "Silu", "gelu": "GeluErf", "gelu_tanh": "GeluTanh", "relu": "Relu", "relu2": "Relu2", "sigmoid": "Sigmoid",
    "identity": "Identity",
}  # fmt: skip


def emitter(*ops: str) -> Callable[[Emitter], Emitter]:
    def register(function: Emitter) -> Emitter:
        for op in ops:
            EMITTERS[op] = function
        return function

    return register


def present(node: Node, index: int) -> Value:
    value = node.input(index)
    if value is None:
        raise UnsupportedByTarget(f"{node!r} lacks operand {index}")
    return value


def optional(e: FunctionEmitter, node: Node, index: int, c_type: str | None = None) -> str:
    """Pointer to an optional operand, or nullptr."""
    value = node.input(index)
    if value is None:
        return f"({c_type}*)nullptr" if c_type else "nullptr"
    return e.dense(value).pointer


def float_type(e: FunctionEmitter, value: Value) -> str:
    """The template argument for activations: bf16 or float."""
    if value.dtype not in ("bf16", "f32"):
        raise UnsupportedByTarget(
            f"@{e.graph.name}: %{value.name} is {value.dtype}; CPU kernels run bf16 and f32. Serve with --dtype bfloat16 or float32"
        )
    return "bf16" if value.dtype == "bf16" else "float"


def activation(node: Node) -> str:
    name = node.text("act")
    if name not in ACTIVATIONS:
        raise UnsupportedByTarget(f"{node!r}: activation {name!r} has no CPU kernel here")
    return ACTIVATIONS[name]


def _linear(e: FunctionEmitter, node: Node, epilogue: str, template: str = "linear") -> None:
    """The call shared by every linear; ``epilogue`` is a C++ expression."""
    x, weight = present(node, 0), present(node, 1)
    e.need("linear.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    tag = weight_tag(e.graph.param(weight.name).recipe)
    rows = weight.shape[0]
    e.line(f"{template}<{tag}>(team, {ref.pointer}, {stride}, {count}, params_[{e.graph.params.index(e.graph.param(weight.name))}], {rows}, {width}, {epilogue});")
    e.sync()
    e.note(node, f"{template}<{tag}, {float_type(e, x)}>")


@emitter("linear")
def linear(e: FunctionEmitter, node: Node) -> None:
    x, out = present(node, 0), node.output
    width = c_dim(out.shape[-1])
    bias = optional(e, node, 2)
    if out.dtype == "f32" and x.dtype == "bf16":
        rounding = "float" if node.input(2) is None else "bf16"  # the template takes the bias in its rounding type
        _linear(e, node, f"StoreF32<{rounding}>{{{e.ref(out).pointer}, {width}, {bias}}}")
    else:
        _linear(e, node, f"Store<{float_type(e, out)}>{{{e.ref(out).pointer}, {width}, {bias}}}")


@emitter("linear_act")
def linear_act(e: FunctionEmitter, node: Node) -> None:
    out = node.output
    _linear(e, node, f"Act<{activation(node)}, {float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {optional(e, node, 2)}}}")


@emitter("linear_gated")
def linear_gated(e: FunctionEmitter, node: Node) -> None:
    out, weight = node.output, present(node, 1)
    if not gated_panels(int(weight.shape[0])):
        _linear_then_gate(e, node)
        return
    _linear(e, node, f"Gated<{activation(node)}, {float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {optional(e, node, 2)}}}")


def _linear_then_gate(e: FunctionEmitter, node: Node) -> None:
    """Widths that do not fill panels of 16: the linear stores gate and up, a second stage joins them."""
    out, weight = node.output, present(node, 1)
    kind, rows = float_type(e, out), int(weight.shape[0])
    count = c_dim(product(out.shape[:-1]))
    both = e.scratch(product(out.shape[:-1]) * rows * DTYPE_BYTES[out.dtype], kind)
    _linear(e, node, f"Store<{kind}>{{{both}, {rows}, {optional(e, node, 2)}}}")
    e.need("act.h")
    half = rows // 2
    e.line(f"gated_act<{activation(node)}>(team, {both}, {rows}, {both} + {half}, {rows}, {e.ref(out).pointer}, {half}, {count}, {half});")
    e.sync()


@emitter("linear_add")
def linear_add(e: FunctionEmitter, node: Node) -> None:
    out, residual = node.output, present(node, 2)
    ref, _, _, stride = e.rows(residual, len(residual.shape) - 1)
    _linear(
        e, node,
        f"AddResidual<{float_type(e, out)}>{{{e.ref(out).pointer}, {c_dim(out.shape[-1])}, {ref.pointer}, {stride}, {optional(e, node, 3)}}}",
    )  # fmt: skip


@emitter("embedding")
def embedding(e: FunctionEmitter, node: Node) -> None:
    ids, table, out = present(node, 0), present(node, 1), node.output
    e.need("embed.h")
    kind = float_type(e, out)
    ref = e.dense(ids)
    pointer, count, width = ref.pointer, c_dim(ids.tensor.numel), c_dim(out.shape[-1])
    if ids.dtype == "i64":
        pointer = e.scratch(ids.tensor.numel * 4, "int32_t")
        emit_copy(e, Ref(pointer, "i32", ids.shape, dense_strides(ids.shape), ids), ref)
        e.sync()
    index = e.graph.params.index(e.graph.param(table.name))
    tag = weight_tag(e.graph.param(table.name).recipe, default="")
    target = e.ref(out).pointer
    if tag:
        e.line(f"embed_packed<{tag}>(team, params_[{index}], {pointer}, {target}, {width}, {count}, {width});")
    else:
        e.line(f"embed(team, (const {kind}*)params_[{index}], {pointer}, {target}, {width}, {count}, {width});")
    e.sync()
    e.note(node, f"embed_packed<{tag}>" if tag else "embed")


def norm_params(node: Node) -> str:
    return f"NormParams{{{c_number(node.number('eps'))}f, {c_number(node.number('offset', 0.0))}f, {'true' if node.attrs.get('round_first') else 'false'}}}"


@emitter("rms_norm", "layer_norm")
def norm(e: FunctionEmitter, node: Node) -> None:
    x, out = present(node, 0), node.output
    kind = float_type(e, x)
    e.need("norm.h")
    lead = len(x.shape) - 1
    ref, count, width, stride = e.rows(x, lead)
    head = f"{node.op}<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {count}, {width}, {optional(e, node, 1)}"
    if node.op == "rms_norm":
        e.line(f"{head}, {norm_params(node)});")
    else:
        e.line(f"{head}, {optional(e, node, 2)}, {c_number(node.number('eps'))}f);")
    e.sync()
    e.note(node, f"{node.op}<{kind}>")


@emitter("add_rms_norm", "add_layer_norm")
def add_norm(e: FunctionEmitter, node: Node) -> None:
    x, residual = present(node, 0), present(node, 1)
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
        e.line(f"{head}, {optional(e, node, 3)}, {c_number(node.number('eps'))}f);")
    e.sync()
    e.note(node, f"{node.op}<{kind}>")


@emitter("step_field")
def step_field(e: FunctionEmitter, node: Node) -> None:
    out = node.output
    e.refs[out] = Ref(f"c.step->{node.text('field')}", "i32", out.shape, dense_strides(out.shape), out)


@emitter("rotary_table")
def rotary_table(e: FunctionEmitter, node: Node) -> None:
    positions, freq = present(node, 0), present(node, 1)
    cos, sin = node.outputs
    e.need("rope.h")
    ref = e.dense(positions)
    pointer = ref.pointer
    if positions.dtype != "i32":
        pointer = e.scratch(positions.tensor.numel * 4, "int32_t")
        emit_copy(e, Ref(pointer, "i32", positions.shape, dense_strides(positions.shape), positions), ref)
        e.sync()
    rounds = "true" if cos.dtype == "bf16" else "false"
    half = c_dim(freq.shape[0])
    # A table that is read by more than rope is spread out to an ordinary tensor afterwards.
    tables = [e.ref(v).pointer if v in e.tables else e.scratch(dim(positions.tensor.numel * freq.shape[0] * 4), "float") for v in (cos, sin)]
    e.line(
        f"rope_table(team, {tables[0]}, {tables[1]}, {pointer}, {c_dim(positions.tensor.numel)}, "
        f"{e.dense(freq).pointer}, {half}, {c_number(node.number('scaling', 1.0))}f, {rounds});"
    )
    e.sync()
    for value, table in zip((cos, sin), tables, strict=True):
        if value not in e.tables:
            _spread(e, node, value, table)
    e.note(node, "rope_table")


def _spread(e: FunctionEmitter, node: Node, value: Value, table: str) -> None:
    """A rotary table [.., half] as the tensor [.., width] that the op gives."""
    lead, half = value.shape[:-1], present(node, 1).shape[0]
    rows = dense_strides((*lead, half))[:-1]
    layout = node.text("layout")
    shape, strides = {
        "half": ((*lead, 2, half), (*rows, 0, 1)),
        "repeat": ((*lead, half, 2), (*rows, 1, 0)),
        "half_width": ((*lead, half), (*rows, 1)),
    }[layout]
    to = replace(e.ref(value), shape=shape, strides=dense_strides(shape))
    emit_copy(e, to, Ref(table, "f32", shape, strides, value))
    e.sync()


def rope_style(node: Node) -> str:
    return "kInterleaved" if node.text("style") == "interleaved" else "kHalf"


@emitter("rope")
def rope(e: FunctionEmitter, node: Node) -> None:
    x, cos, out = present(node, 0), present(node, 1), node.output
    if node.integer("head_axis") != -2:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} rotates [.., H, T, D]; the passes should have moved the heads inside")
    e.need("rope.h")
    heads, dim = c_dim(x.shape[-2]), c_dim(x.shape[-1])
    ref, count, width, stride = e.rows(x, len(x.shape) - 2)
    tables = f"{e.ref(cos).pointer}, {e.ref(present(node, 2)).pointer}"
    e.line(
        f"rope<{float_type(e, x)}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {count}, {heads}, {dim}, "
        f"{2 * e.table_half(cos)}, {rope_style(node)}, {tables});"
    )
    e.sync()
    e.note(node, f"rope<{float_type(e, x)}>")


@emitter("kv_write")
def kv_write(e: FunctionEmitter, node: Node) -> None:
    state, k, v = present(node, 0), present(node, 1), present(node, 2)
    e.need("attention.h")
    (kr, count, _, k_stride), (vr, _, _, v_stride) = e.rows(k, 1), e.rows(v, 1)
    e.line(
        f"kv_write<{float_type(e, k)}>(team, {kr.pointer}, {k_stride}, {vr.pointer}, {v_stride}, {count}, {e.state(state)}, "
        f"{state.state['heads']}, {state.state['dim']}, c.step->positions, {e.meta(state)});"
    )
    e.sync()
    e.note(node, f"kv_write<{float_type(e, k)}>")


def float_operand(e: FunctionEmitter, value: Value | None) -> str:
    """Pointer to a small operand as floats, widened where it is stored otherwise; nullptr where there is none."""
    if value is None:
        return "nullptr"
    ref = e.dense(value)
    if value.dtype == "f32":
        return ref.pointer
    pointer, count = e.scratch(value.tensor.numel * 4, "float"), c_dim(value.tensor.numel)
    e.line(f"for (int64_t i = team.rank; i < {count}; i += team.size) {pointer}[i] = to_f32({ref.pointer}[i]);")
    e.sync()
    return pointer


@emitter("paged_attention")
def paged_attention(e: FunctionEmitter, node: Node) -> None:
    q, state, out = present(node, 0), present(node, 1), node.output
    kind, kv = float_type(e, q), state.state
    e.need("attention.h")
    ref, _, width, stride = e.rows(q, 1)
    sink_pointer = float_operand(e, node.input(3))
    params = (
        f"AttnParams{{{c_dim(q.shape[1])}, {kv['heads']}, {kv['dim']}, {c_number(node.number('scale'))}f, "
        f"{node.integer('window', 0)}, {c_number(node.number('softcap', 0.0))}f, true, {sink_pointer}}}"
    )
    e.line(f"paged_attention<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {e.state(state)}, {params}, {e.meta(state)});")
    e.sync()
    e.note(node, f"paged_attention<{kind}>")


@emitter("attention")
def attention(e: FunctionEmitter, node: Node) -> None:
    q, k, v, out = present(node, 0), present(node, 1), present(node, 2), node.output
    kind = float_type(e, q)
    e.need("attention.h")
    (qr, count, _, qs), (kr, _, _, ks), (vr, _, _, vs) = e.rows(q, 1), e.rows(k, 1), e.rows(v, 1)
    if v.shape[2] != q.shape[2]:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r}: values {v.shape[2]} wide beside keys {q.shape[2]} wide have no CPU kernel")
    sink_pointer = float_operand(e, node.input(3))
    causal = "true" if node.attrs["causal"] else "false"
    params = (
        f"AttnParams{{{c_dim(q.shape[1])}, {c_dim(k.shape[1])}, {c_dim(q.shape[2])}, {c_number(node.number('scale'))}f, "
        f"{node.integer('window', 0)}, {c_number(node.number('softcap', 0.0))}f, {causal}, {sink_pointer}}}"
    )
    bounds = e.fresh("seg")
    e.line(f"const int {bounds}[2] = {{0, int({count})}};")
    width = c_dim(out.shape[1] * out.shape[2])
    e.line(
        f"dense_attention<{kind}>(team, {qr.pointer}, {qs}, {kr.pointer}, {ks}, {vr.pointer}, {vs}, {e.ref(out).pointer}, {width}, {params}, 1, {bounds});"
    )
    e.sync()
    e.note(node, f"dense_attention<{kind}>")


@emitter("qkv_rope_write")
def qkv_rope_write(e: FunctionEmitter, node: Node) -> None:
    state, qkv, out = present(node, 0), present(node, 1), node.output
    kind, kv = float_type(e, qkv), state.state
    e.need("rope.h")
    ref, count, _, stride = e.rows(qkv, 1)
    cos, sin = node.input(3), node.input(4)
    rot = 0 if cos is None else 2 * e.table_half(cos)
    style = rope_style(node) if cos is not None else "kHalf"
    norms = f"{optional(e, node, 5, kind)}, {optional(e, node, 6, kind)}"
    norm = norm_params(node) if node.input(5) is not None or node.input(6) is not None else "NormParams{}"
    tables = "nullptr, nullptr" if cos is None or sin is None else f"{e.ref(cos).pointer}, {e.ref(sin).pointer}"
    heads, dim = node.integer("heads"), kv["dim"]
    e.line(
        f"qkv_rope_write<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {heads * dim}, {count}, {e.state(state)}, "
        f"QkvParams<{kind}>{{{heads}, {kv['heads']}, {dim}, {rot}, {style}, {norms}, {norm}}}, {tables}, c.step->positions, {e.meta(state)});"
    )
    e.sync()
    e.note(node, f"qkv_rope_write<{kind}>")


@emitter("gated_act")
def gated_act(e: FunctionEmitter, node: Node) -> None:
    gate, up, out = present(node, 0), present(node, 1), node.output
    e.need("act.h")
    lead = len(gate.shape) - 1
    (gr, count, width, gs), (ur, _, _, us) = e.rows(gate, lead), e.rows(up, lead)
    e.line(f"gated_act<{activation(node)}>(team, {gr.pointer}, {gs}, {ur.pointer}, {us}, {e.ref(out).pointer}, {width}, {count}, {width});")
    e.sync()
    e.note(node, f"gated_act<{activation(node)}>")


@emitter("gated_act_packed")
def gated_act_packed(e: FunctionEmitter, node: Node) -> None:
    x, out = present(node, 0), node.output
    e.need("act.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    half = width // 2
    e.line(
        f"gated_act<{activation(node)}>(team, {ref.pointer}, {stride}, {ref.pointer} + {half}, {stride}, {e.ref(out).pointer}, {half}, {count}, {half});"
    )
    e.sync()
    e.note(node, f"gated_act<{activation(node)}>")


@emitter("gather_rows")
def gather_rows(e: FunctionEmitter, node: Node) -> None:
    x, index, out = present(node, 0), present(node, 1), node.output
    ref, _, width, stride = e.rows(x, 1)
    rows = e.dense(index).pointer
    e.need("loops.h")
    target = e.ref(out)
    e.line(f"for (int64_t r = team.rank; r < {c_dim(index.shape[0])}; r += team.size)")
    e.line(f"  memcpy({target.pointer} + r * {width}, {ref.pointer} + int64_t({rows}[r]) * {stride}, {width} * sizeof({target.c_type}));")
    e.sync()
    e.note(node, "gather_rows")


@emitter("experts")
def experts(e: FunctionEmitter, node: Node) -> None:
    x, ids, weights, gate_up, down, out = *(present(node, i) for i in range(5)), node.output
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
    e.note(node, f"experts<{weight_tag(gu.recipe)}, {act}>")


@emitter("topk")
def topk(e: FunctionEmitter, node: Node) -> None:
    x = present(node, 0)
    values, indices = node.outputs
    e.need("experts.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    e.line(f"topk(team, {ref.pointer}, {stride}, {e.ref(values).pointer}, {e.ref(indices).pointer}, {count}, {width}, {node.integer('k')});")
    e.sync()
    e.note(node, "topk")


@emitter("concat")
def concat(e: FunctionEmitter, node: Node) -> None:
    out = e.ref(node.output)
    axis = node.integer("axis") % len(out.shape)
    at: object = 0
    for value in node.operands:
        target = Ref(out.base, out.dtype, value.shape, out.strides, out.root, out.offset + at * out.strides[axis])  # type: ignore[operator]
        emit_copy(e, target, e.ref(value))
        at = at + value.shape[axis]  # type: ignore[operator]
    e.sync()
    e.note(node, "copy")


@emitter("reshape", "permute", "slice", "expand")
def materialise(e: FunctionEmitter, node: Node) -> None:
    """A data movement that is no view of what it reads: copied, in the result's order."""
    from compilerllm.kernels.cpu.refs import view

    source = present(node, 0)
    seen = view(node, e.ref(source)) or view(node, e.dense(source))
    if seen is None:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} cannot be laid out")
    emit_copy(e, e.ref(node.output), seen)
    e.sync()
    e.note(node, "copy")


@emitter("iota")
def iota(e: FunctionEmitter, node: Node) -> None:
    out = e.ref(node.output)
    e.line(f"for (int64_t i = team.rank; i < {c_dim(node.output.shape[0])}; i += team.size) {out.pointer}[i] = ({out.c_type})i;")
    e.sync()
    e.note(node, "iota")


def loop_source(e: FunctionEmitter, value: Value, shape_rank: int) -> Ref:
    """A group's operand: its last axis must step by one (or be broadcast), otherwise it is made dense."""
    ref = e.ref(value)
    if ref.shape and ref.shape[-1] != 1 and ref.strides[-1] not in (0, 1):
        return e.dense(value)
    return ref


@emitter("group")
def group(e: FunctionEmitter, node: Node) -> None:
    body = e.module.functions[node.fn]
    sources = {
        inner: loop_source(e, given, len(inner.shape))
        for inner, given in zip(body.inputs, node.inputs, strict=True)
        if given is not None
    }
    results: dict[Value, Ref] = {}
    for inner, given in zip(body.outputs, node.outputs, strict=True):
        results[inner] = e.ref(given)
    LoopNest(e, body.nodes, results, sources).emit()
    e.sync()
    e.note(node, "loop")


def pointwise(e: FunctionEmitter, node: Node) -> None:
    sources = {v: loop_source(e, v, len(v.shape)) for v in node.operands}
    axis = node.attrs.get("axis")
    if axis is not None and int(axis) % len(node.operands[0].shape) != len(node.operands[0].shape) - 1:  # type: ignore[arg-type]
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} reduces axis {axis}; CPU loops reduce the last")
    LoopNest(e, [node], {node.output: e.ref(node.output)}, sources).emit()
    e.sync()
    e.note(node, "loop")


for _op in POINTWISE_OPS | REDUCTION_OPS | {"softmax"}:
    EMITTERS[_op] = pointwise


@emitter("argmax")
def argmax(e: FunctionEmitter, node: Node) -> None:
    x, out = present(node, 0), node.output
    if node.integer("axis") % len(x.shape) != len(x.shape) - 1:
        raise UnsupportedByTarget(f"@{e.graph.name}: {node!r} reduces axis {node.attrs['axis']}; CPU loops reduce the last")
    e.need("experts.h")
    ref, count, width, stride = e.rows(x, len(x.shape) - 1)
    e.line(f"argmax_rows(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {count}, {width});")
    e.sync()
    e.note(node, "argmax_rows")
