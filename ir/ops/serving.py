"""Ops that serving adds: step metadata, paged attention over states, adapters, collectives, sampling."""

from compilerllm.ir.dims import Dim, symbol
from compilerllm.ir.graph import Node
from compilerllm.ir.op import OpCall, Reduction, define, elementwise_flops
from compilerllm.ir.types import StateType, StepType, TensorType

# Fields of StepInputs a graph may ask for, with their types.
STEP_FIELDS: dict[str, TensorType] = {
    "token_ids": TensorType("i32", (symbol("T"),)),
    "positions": TensorType("i32", (symbol("T"),)),
    "query_start": TensorType("i32", (symbol("S") + 1,)),
    "seq_lens": TensorType("i32", (symbol("S"),)),
    "slots": TensorType("i32", (symbol("S"),)),
    "sample_rows": TensorType("i32", (symbol("R"),)),
    "adapter_id": TensorType("i32", (symbol("T"),)),
    "token_types": TensorType("i32", (symbol("T"),)),
}


def state(call: OpCall, kind: str, name: str = "state") -> StateType:
    """Operand ``name`` as a state. Raises ``TypeMismatch`` where it is not of ``kind``."""
    found = call.raw(name)
    if not isinstance(found, StateType) or found.kind != kind:
        call.require(False, f"operand {name!r} must be a {kind}, but is {found}")
    assert isinstance(found, StateType)
    return found


def step(call: OpCall) -> None:
    """Raises ``TypeMismatch`` where operand 'step' is anything else."""
    call.require(
        isinstance(call.raw("step"), StepType), f"operand 'step' must be the step, but is {call.raw('step')}"
    )


def _step_field(call: OpCall) -> tuple[TensorType, ...]:
    step(call)
    name = call.text("field")
    call.require(name in STEP_FIELDS, f"unknown field {name!r}; a step has {', '.join(STEP_FIELDS)}")
    if "extent" in call.attrs:
        return (STEP_FIELDS[name].with_shape(call.integer("extent")),)
    return (STEP_FIELDS[name],)


# extent: how many elements every step of the bucket has, where that is one number.
define("step_field(step)", "one array of the step's metadata", _step_field, attrs="field, extent?")


def _kv_write(call: OpCall) -> tuple[TensorType, ...]:
    kv, k, v = state(call, "paged_kv"), call["k"], call["v"]
    step(call)
    want = (k.shape[0], kv["heads"], kv["dim"])
    call.require(k.shape == want and v.shape == want, f"k and v must be {want}, but are {k} and {v}")
    return ()


def _paged_attention(call: OpCall) -> tuple[TensorType, ...]:
    q, kv = call["q"], state(call, "paged_kv")
    step(call)
    call.require(q.rank == 3, f"q must be [T, H, D], but is {q}")
    call.same(q.shape[2], kv["dim"], "D of q and of the state")
    heads = q.shape[1]
    call.require(
        isinstance(heads, int) and heads % kv["heads"] == 0, f"{heads} heads do not share {kv['heads']}"
    )
    if (sinks := call.optional("sinks")) is not None:
        call.require(sinks.shape == (heads,), f"sinks must be [{heads}], but are {sinks}")
    return (q,)


def paged_flops(node: Node) -> Dim:
    """4 * T * C * H * D with C the mean context a token sees."""
    q = node.operand(0)
    return 4 * q.tensor.numel * symbol("C")


define(
    "kv_write(state, k, v, step)", "store this step's keys and values in their sequences' blocks", _kv_write,
    writes_state=True,
)  # fmt: skip
define(
    "paged_attention(q, state, step, sinks?)", "each token attends to its sequence's context up to itself",
    _paged_attention, attrs="scale, window?, softcap?", flops=paged_flops, reduction=Reduction.CONTEXT, reads_state=True,
)  # fmt: skip


def _varlen_attention(call: OpCall) -> tuple[TensorType, ...]:
    q, k, v = call["q"], call["k"], call["v"]
    step(call)
    call.require(
        q.rank == 3 and k.rank == 3 and v.rank == 3, f"q, k, v must be [T, H, D], but are {q}, {k}, {v}"
    )
    call.same(q.shape[0], k.shape[0], "T of q and k")
    call.same(q.shape[2], k.shape[2], "D of q and k")
    call.require(k.shape[:2] == v.shape[:2], f"k and v must have the same heads, but are {k} and {v}")
    heads, kv = q.shape[1], k.shape[1]
    if isinstance(heads, int) and isinstance(kv, int):
        call.require(heads % kv == 0, f"{heads} heads do not share {kv} key heads")
    if (sinks := call.optional("sinks")) is not None:
        call.require(sinks.shape == (heads,), f"sinks must be [{heads}], but are {sinks}")
    return (q.with_shape(q.shape[0], heads, v.shape[2]),)


# window as for attention: the query itself and what is less than that many tokens away, on both sides where not causal.
define(
    "varlen_attention(q, k, v, step, sinks?)", "attention within each sequence of the step, all of whose tokens are in it",
    _varlen_attention, attrs="scale, causal, window?, softcap?", flops=lambda n: 4 * n.operand(0).tensor.numel * symbol("C"),
    reduction=Reduction.CONTEXT,
)  # fmt: skip


def _slot_conv(call: OpCall) -> tuple[TensorType, ...]:
    x, kept, weight = call["x"], state(call, "slot_conv"), call["weight"]
    step(call)
    call.require(x.rank == 2, f"x must be [T, channels], but is {x}")
    call.same(x.shape[1], kept["channels"], "channels of x and of the state")
    call.require(
        weight.shape == (kept["channels"], kept["width"] + 1),
        f"weight must be [channels, width + 1], but is {weight}",
    )
    return (x,)


define(
    "slot_conv(x, state, weight, step)", "causal depthwise convolution over each sequence, continued from its slot",
    _slot_conv, flops=lambda n: 2 * n.operand(2).tensor.numel * n.operand(0).shape[0],
    reads_state=True, writes_state=True,
)  # fmt: skip


def _adapter(call: OpCall) -> tuple[TensorType, ...]:
    x, y, a, b, ids = call["x"], call["y"], call["a"], call["b"], call["adapter_id"]
    call.require(
        a.rank == 3 and b.rank == 3, f"a must be [slots, rank, K] and b [slots, N, rank], but are {a}, {b}"
    )
    call.same(a.shape[2], x.shape[-1], "K of x and a")
    call.same(b.shape[1], y.shape[-1], "N of y and b")
    call.same(a.shape[1], b.shape[2], "rank of a and b")
    call.require(ids.rank == 1, f"adapter_id must be [T], but is {ids}")
    return (y,)


def _adapter_flops(node: Node) -> Dim:
    """2 * T * rank * (K + N)."""
    a, b = node.operand(2), node.operand(3)
    return 2 * node.operand(0).shape[0] * a.shape[1] * (a.shape[2] + b.shape[1])


define(
    "adapter_add(x, y, a, b, adapter_id)", "y plus the low-rank update b a x of each token's slot; slot 0 adds nothing",
    _adapter, flops=_adapter_flops,
    reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _all_reduce(call: OpCall) -> tuple[TensorType, ...]:
    call.text("axis")
    return (call["x"],)


define(
    "all_reduce(x)", "sum over the ranks of a mesh axis", _all_reduce, attrs="axis", flops=elementwise_flops,
    reduction=Reduction.CONTRACTION, effects=True,
)  # fmt: skip
