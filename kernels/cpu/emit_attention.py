"""How rotary embedding, attention and the KV cache become C++: templates of ``csrc`` with constant dims."""

from dataclasses import replace

from compilerllm.ir.dims import dim
from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.cpu.emit_ops import norm_params
from compilerllm.kernels.cpu.emitter import FunctionEmitter, emitter, float_type, optional
from compilerllm.kernels.cpu.loops import c_number, emit_copy
from compilerllm.kernels.cpu.refs import CRef, c_dim
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import dense_strides


@emitter("rotary_table")
def rotary_table(e: FunctionEmitter, node: Node) -> None:
    positions, freq = node.operand(0), node.operand(1)
    cos, sin = node.outputs
    e.need("rope.h")
    ref = e.dense(positions)
    pointer = ref.pointer
    if positions.dtype != "i32":
        pointer = e.scratch(positions.tensor.numel * 4, "int32_t")
        emit_copy(e, CRef(pointer, "i32", positions.shape, dense_strides(positions.shape), positions), ref)
        e.sync()
    rounds = "true" if cos.dtype == "bf16" else "false"
    half = c_dim(freq.shape[0])
    # A table that is read by more than rope is spread out to an ordinary tensor afterwards.
    tables = [
        e.ref(v).pointer
        if v in e.tables
        else e.scratch(dim(positions.tensor.numel * freq.shape[0] * 4), "float")
        for v in (cos, sin)
    ]
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
    lead, half = value.shape[:-1], node.operand(1).shape[0]
    rows = dense_strides((*lead, half))[:-1]
    layout = node.text("layout")
    shape, strides = {
        "half": ((*lead, 2, half), (*rows, 0, 1)),
        "repeat": ((*lead, half, 2), (*rows, 1, 0)),
        "half_width": ((*lead, half), (*rows, 1)),
    }[layout]
    to = replace(e.ref(value), shape=shape, strides=dense_strides(shape))
    emit_copy(e, to, CRef(table, "f32", shape, strides, value))
    e.sync()


def rope_style(node: Node) -> str:
    return "kInterleaved" if node.text("style") == "interleaved" else "kHalf"


@emitter("rope")
def rope(e: FunctionEmitter, node: Node) -> None:
    x, cos, out = node.operand(0), node.operand(1), node.output
    if node.integer("head_axis") != -2:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r} rotates [.., H, T, D]; the passes should have moved the heads inside"
        )
    e.need("rope.h")
    heads, dim = c_dim(x.shape[-2]), c_dim(x.shape[-1])
    ref, count, width, stride = e.rows(x, len(x.shape) - 2)
    tables = f"{e.ref(cos).pointer}, {e.ref(node.operand(2)).pointer}"
    e.line(
        f"rope<{float_type(e, x)}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {count}, {heads}, {dim}, "
        f"{2 * e.table_half(cos)}, {rope_style(node)}, {tables});"
    )
    e.sync()
    e.note(node, "rope", values=float_type(e, x))


@emitter("kv_write")
def kv_write(e: FunctionEmitter, node: Node) -> None:
    state, k, v = node.operand(0), node.operand(1), node.operand(2)
    e.need("attention.h")
    (kr, count, _, k_stride), (vr, _, _, v_stride) = e.rows(k, 1), e.rows(v, 1)
    e.line(
        f"kv_write<{float_type(e, k)}>(team, {kr.pointer}, {k_stride}, {vr.pointer}, {v_stride}, {count}, {e.state(state)}, "
        f"{state.state['heads']}, {state.state['dim']}, c.step->positions, {e.meta(state)});"
    )
    e.sync()
    e.note(node, "kv_write", values=float_type(e, k))


def float_operand(e: FunctionEmitter, value: Value | None) -> str:
    """Pointer to a small operand as floats, widened where it is stored otherwise; nullptr where there is none."""
    if value is None:
        return "nullptr"
    ref = e.dense(value)
    if value.dtype == "f32":
        return ref.pointer
    pointer, count = e.scratch(value.tensor.numel * 4, "float"), c_dim(value.tensor.numel)
    e.line(
        f"for (int64_t i = team.rank; i < {count}; i += team.size) {pointer}[i] = to_f32({ref.pointer}[i]);"
    )
    e.sync()
    return pointer


@emitter("paged_attention")
def paged_attention(e: FunctionEmitter, node: Node) -> None:
    q, state, out = node.operand(0), node.operand(1), node.output
    kind, kv = float_type(e, q), state.state
    e.need("attention.h")
    ref, _, width, stride = e.rows(q, 1)
    sink_pointer = float_operand(e, node.input(3))
    params = (
        f"AttnParams{{{c_dim(q.shape[1])}, {kv['heads']}, {kv['dim']}, {c_number(node.number('scale'))}f, "
        f"{node.integer('window', 0)}, {c_number(node.number('softcap', 0.0))}f, true, {sink_pointer}}}"
    )
    e.line(
        f"paged_attention<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {width}, {e.state(state)}, {params}, {e.meta(state)});"
    )
    e.sync()
    e.note(node, "paged_attention", values=kind)


@emitter("attention")
def attention(e: FunctionEmitter, node: Node) -> None:
    count = e.rows(node.operand(0), 1)[1]
    bounds = e.fresh("seg")
    e.line(f"const int {bounds}[2] = {{0, int({count})}};")
    _dense_attention(e, node, node.input(3), "1", bounds)


@emitter("varlen_attention")
def varlen_attention(e: FunctionEmitter, node: Node) -> None:
    _dense_attention(e, node, node.input(4), "int(c.step->sequences)", "c.step->query_start")


def _dense_attention(e: FunctionEmitter, node: Node, sinks: Value | None, segments: str, bounds: str) -> None:
    """Attention among the rows of each segment. ``segments`` and ``bounds`` are C++: how many, and where each begins."""
    q, k, v, out = node.operand(0), node.operand(1), node.operand(2), node.output
    kind = float_type(e, q)
    e.need("attention.h")
    (qr, _, _, qs), (kr, _, _, ks), (vr, _, _, vs) = e.rows(q, 1), e.rows(k, 1), e.rows(v, 1)
    if v.shape[2] != q.shape[2]:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r}: values {v.shape[2]} wide beside keys {q.shape[2]} wide have no CPU kernel"
        )
    sink_pointer = float_operand(e, sinks)
    causal = "true" if node.attrs["causal"] else "false"
    params = (
        f"AttnParams{{{c_dim(q.shape[1])}, {c_dim(k.shape[1])}, {c_dim(q.shape[2])}, {c_number(node.number('scale'))}f, "
        f"{node.integer('window', 0)}, {c_number(node.number('softcap', 0.0))}f, {causal}, {sink_pointer}}}"
    )
    width = c_dim(out.shape[1] * out.shape[2])
    e.line(
        f"dense_attention<{kind}>(team, {qr.pointer}, {qs}, {kr.pointer}, {ks}, {vr.pointer}, {vs}, {e.ref(out).pointer}, {width}, {params}, {segments}, {bounds});"
    )
    e.sync()
    e.note(node, "dense_attention", values=kind)


@emitter("qkv_rope_write")
def qkv_rope_write(e: FunctionEmitter, node: Node) -> None:
    state, qkv, out = node.operand(0), node.operand(1), node.output
    kind, kv = float_type(e, qkv), state.state
    e.need("rope.h")
    ref, count, _, stride = e.rows(qkv, 1)
    cos, sin = node.input(3), node.input(4)
    rot = 0 if cos is None else 2 * e.table_half(cos)
    style = rope_style(node) if cos is not None else "kHalf"
    norms = f"{optional(e, node, 5, kind)}, {optional(e, node, 6, kind)}"
    norm = norm_params(node) if node.input(5) is not None or node.input(6) is not None else "NormParams{}"
    tables = (
        "nullptr, nullptr" if cos is None or sin is None else f"{e.ref(cos).pointer}, {e.ref(sin).pointer}"
    )
    heads, dim = node.integer("heads"), kv["dim"]
    e.line(
        f"qkv_rope_write<{kind}>(team, {ref.pointer}, {stride}, {e.ref(out).pointer}, {heads * dim}, {count}, {e.state(state)}, "
        f"QkvParams<{kind}>{{{heads}, {kv['heads']}, {dim}, {rot}, {style}, {norms}, {norm}}}, {tables}, c.step->positions, {e.meta(state)});"
    )
    e.sync()
    e.note(node, "qkv_rope_write", values=kind)
