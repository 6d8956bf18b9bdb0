"""How rotary embedding, attention and the KV cache become launches of ``templates/rope.py`` and ``attention.py``.

A bucket whose queries are one a sequence (``max_query`` 1) takes the decode kernels: token t is sequence t's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.gpu.program import Extent
from compilerllm.kernels.triton.emitter import ITEM_BYTES, Arg, BucketEmitter, Rows, emitter
from compilerllm.kernels.triton.source import ConstValue

MOST_ROWS = 128  # query heads of one key head that a program takes at most
MOST_SPLITS = 32
SHORT = 512  # tokens of a step whose prompts do not fill the multiprocessors with large tiles
PARTS_A_WARP = 64 * 32  # elements of parts that a warp adds up without spilling


def pow2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def optional(
    args: dict[str, Arg], consts: dict[str, ConstValue], name: str, e: BucketEmitter, value: Value | None
) -> bool:
    """Add an operand that may be left out (None then); whether it is there."""
    if value is None:
        consts[name] = None
        return False
    args[name] = e.arg(value)
    return True


def search_steps(e: BucketEmitter) -> int:
    """Halvings that find a token's sequence; -1 where it is the token's own number."""
    return -1 if e.bucket.max_query == 1 else (e.bucket.sequences - 1).bit_length()


def step_args(e: BucketEmitter, state: Value, *fields: str) -> dict[str, Arg]:
    """Fields of the step, the state's cache and its block table, by the templates' names."""
    args: dict[str, Arg] = {"cache": e.arg(state), "table": e.step_arg(f"table_{e.group(state)}")}
    return args | {name: e.step_arg(name) for name in fields}


def count_of(e: BucketEmitter, rows: Rows) -> Extent | int:
    """How many rows there are, as an argument."""
    return e.extent(rows.count)


@emitter("rotary_table")
def rotary_table(e: BucketEmitter, node: Node) -> None:
    positions, freq = node.operand(0), node.operand(1)
    cos, sin = node.outputs
    half, width = e.bound(freq.shape[0]), e.bound(cos.shape[-1])
    count = positions.tensor.numel
    tokens = 4
    e.launch(
        node, "rope:rotary_table", (e.extent(count, tokens), 1, 1),
        {
            "positions": e.arg(positions), "inv_freq": e.arg(freq), "cos": e.arg(cos), "sin": e.arg(sin),
            "COUNT": e.extent(count),
        },
        {
            "SCALING": node.number("scaling", 1.0), "HALF": half, "WIDTH": width, "WIDTH_P": pow2(width),
            "REPEAT": node.text("layout") == "repeat", "BT": tokens,
        },
    )  # fmt: skip


def rotation(e: BucketEmitter, node: Node, x: Value, cos: Value | None, sin: Value | None, dim: int) -> tuple[
    dict[str, Arg], dict[str, ConstValue]
]:  # fmt: skip
    """Arguments and constants of what turns heads of ``dim`` columns."""
    if cos is None or sin is None:
        return {}, {
            "cos": None, "sin": None, "COS_STRIDE": 0, "SIN_STRIDE": 0, "ROT": 0, "HALF_P": 1, "REST_P": pow2(dim),
            "INTERLEAVED": False, "HALF_WIDTH": False, "ROUND": False,
        }  # fmt: skip
    c, s = e.rows(cos, len(cos.shape) - 1), e.rows(sin, len(sin.shape) - 1)
    half_width = bool(node.attrs.get("half_width"))
    rot = c.columns * (2 if half_width else 1)
    interleaved = node.text("style") == "interleaved"
    half_width |= not interleaved and repeats(e, cos) and repeats(e, sin)
    rounds = not node.attrs.get("f32") and x.dtype != "f32" and cos.dtype == sin.dtype == x.dtype
    return {"cos": c.arg, "sin": s.arg}, {
        "COS_STRIDE": c.stride, "SIN_STRIDE": s.stride, "ROT": rot, "HALF_P": pow2(rot // 2),
        "REST_P": pow2(dim - rot), "INTERLEAVED": interleaved, "HALF_WIDTH": half_width,
        "ROUND": rounds,
    }  # fmt: skip


def repeats(e: BucketEmitter, table: Value) -> bool:
    """Whether the second half of a table's row is its first half again, so that it need not be read."""
    made = e.producer(table)
    return made is not None and made.op == "rotary_table" and made.text("layout") == "half"


MANY_TOKENS = 1024  # from here on a kernel that moves head rows fills the chip whatever its tiles are


def row_candidates(tokens: int, heads: int) -> list[dict[str, Any]]:
    """Tokens and heads a program of a kernel that moves head rows, and its warps; likely best first."""
    narrow = [{"BT": 1, "BH": 8, "warps": 2}, {"BT": 1, "BH": 4, "warps": 1}, {"BT": 1, "BH": 16, "warps": 4}]
    wide = [{"BT": 2, "BH": 16, "warps": 4}, {"BT": 1, "BH": 16, "warps": 4}, {"BT": 4, "BH": 16, "warps": 4}]
    order = (
        narrow + wide[:1]
        if tokens <= 64
        else [*wide, {"BT": 4, "BH": 8, "warps": 4}, {"BT": 8, "BH": 8, "warps": 8}]
    )
    if tokens >= MANY_TOKENS:
        shapes = ((8, 8, 4), (8, 4, 4), (4, 4, 2), (16, 4, 8), (2, 8, 2))
        order += [{"BT": bt, "BH": bh, "warps": warps} for bt, bh, warps in shapes]
    limit = pow2(heads)
    fitting = [c | {"BH": min(c["BH"], limit)} for c in order]
    return [c for i, c in enumerate(fitting) if c not in fitting[:i]]


@emitter("rope")
def rope(e: BucketEmitter, node: Node) -> None:
    x, cos, sin, out = node.operand(0), node.operand(1), node.operand(2), node.output
    if node.integer("head_axis") != -2:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r} rotates [.., H, T, D]; the passes should have moved the heads inside"
        )
    heads, dim = e.bound(x.shape[-2]), e.bound(x.shape[-1])
    rows, to = e.rows(x, len(x.shape) - 2), e.rows(out, len(out.shape) - 2)
    args, consts = rotation(e, node, x, cos, sin, dim)
    if e.rows(cos, len(cos.shape) - 1).count != rows.count:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r}: a rotary table of {cos.type} for several batches has no CUDA kernel; "
            "expand it before"
        )
    problem: dict[str, int | str] = {"T": e.bound(rows.count), "H": heads, "D": dim, "dtype": x.dtype}
    chosen = e.choose(node, "rope", problem, row_candidates(e.bound(rows.count), heads))
    e.launch(
        node, "rope:rope", (e.extent(rows.count, chosen["BT"]), -(-heads // chosen["BH"]), 1),
        args | {"x": rows.arg, "out": to.arg, "COUNT": count_of(e, rows)},
        consts | {"X_STRIDE": rows.stride, "OUT_STRIDE": to.stride, "HEADS": heads, "D": dim, "BT": chosen["BT"], "BH": chosen["BH"]},
        num_warps=chosen["warps"],
    )  # fmt: skip


@emitter("kv_write")
def kv_write(e: BucketEmitter, node: Node) -> None:
    state, k, v = node.operand(0), node.operand(1), node.operand(2)
    kv = state.state
    require_dtype(e, node, k, state)
    kr, vr = e.rows(k, 1), e.rows(v, 1)
    problem: dict[str, int | str] = {
        "T": e.bound(kr.count),
        "HK": kv["heads"],
        "D": kv["dim"],
        "dtype": k.dtype,
    }
    chosen = e.choose(node, "kv_write", problem, row_candidates(e.bound(kr.count), kv["heads"]))
    e.launch(
        node, "rope:kv_write", (e.extent(kr.count, chosen["BT"]), -(-kv["heads"] // chosen["BH"]), 1),
        step_args(e, state, "positions", "query_start", "meta") | {"k": kr.arg, "v": vr.arg, "COUNT": count_of(e, kr)},
        {
            "K_STRIDE": kr.stride, "V_STRIDE": vr.stride, "HK": kv["heads"], "D": kv["dim"], "DP": pow2(kv["dim"]),
            "STEPS": search_steps(e), "BT": chosen["BT"], "BH": chosen["BH"],
        },
        num_warps=chosen["warps"],
    )  # fmt: skip


@emitter("qkv_rope_write")
def qkv_rope_write(e: BucketEmitter, node: Node) -> None:
    state, qkv, out = node.operand(0), node.operand(1), node.output
    kv, heads = state.state, node.integer("heads")
    require_dtype(e, node, qkv, state)
    rows, to = e.rows(qkv, 1), e.rows(out, 1)
    args, consts = rotation(e, node, qkv, node.input(3), node.input(4), kv["dim"])
    args |= step_args(e, state, "positions", "query_start", "meta")
    args |= {"qkv": rows.arg, "out": to.arg, "COUNT": count_of(e, rows)}
    q_norm = optional(args, consts, "q_norm", e, node.input(5))
    k_norm = optional(args, consts, "k_norm", e, node.input(6))
    total = heads + 2 * kv["heads"]
    problem: dict[str, int | str] = {
        "T": e.bound(rows.count), "H": heads, "HK": kv["heads"], "D": kv["dim"], "dtype": qkv.dtype,
        "norm": int(q_norm or k_norm), "steps": search_steps(e),
    }  # fmt: skip
    chosen = e.choose(node, "qkv_rope_write", problem, row_candidates(e.bound(rows.count), total))
    e.launch(
        node, "rope:qkv_rope_write", (e.extent(rows.count, chosen["BT"]), -(-total // chosen["BH"]), 1), args,
        consts | {
            "X_STRIDE": rows.stride, "OUT_STRIDE": to.stride, "H": heads, "HK": kv["heads"], "D": kv["dim"],
            "Q_NORM": q_norm, "K_NORM": k_norm, "EPS": node.number("eps", 0.0), "OFFSET": node.number("offset", 0.0),
            "ROUND_FIRST": bool(node.attrs.get("round_first")), "STEPS": search_steps(e), "BT": chosen["BT"],
            "BH": chosen["BH"],
        },
        num_warps=chosen["warps"],
    )  # fmt: skip


def require_dtype(e: BucketEmitter, node: Node, x: Value, state: Value) -> None:
    """Raises ``UnsupportedByTarget`` where the cache holds another dtype than ``x``."""
    if x.dtype != state.state.dtype:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r}: {x.dtype} values beside a cache of {state.state.dtype} have no CUDA kernel; "
            "declare the state with the activations' dtype"
        )


def positive_scale(e: BucketEmitter, node: Node) -> float:
    """The op's scale. Raises ``UnsupportedByTarget`` where it is not positive: the kernels scale the largest score."""
    scale = float(node.number("scale"))
    if scale <= 0:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r}: a scale of {scale} has no CUDA kernel; negate q instead"
        )
    return scale


def heads_a_program(heads: int, kv_heads: int) -> int:
    """Query heads of one key head that a program takes: all, or the largest part of at most MOST_ROWS."""
    group = heads // kv_heads
    return next(g for g in range(min(group, MOST_ROWS), 0, -1) if group % g == 0)


def fitting(
    e: BucketEmitter, dtype: str, rows: int, dim: int, candidates: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Candidates whose queries and stages of key and value tiles the target's shared memory holds."""
    item, width = ITEM_BYTES[dtype], pow2(dim)

    def nbytes(c: Mapping[str, Any]) -> int:
        most, tile, stages = int(c.get("BM", rows)), int(c["BN"]), int(c["stages"])
        return item * (most * width + most * tile + stages * 2 * tile * width)

    return [c for c in candidates if nbytes(c) <= e.target.shared]


def decode_candidates(
    e: BucketEmitter, dtype: str, heads: int, kv_heads: int, dim: int
) -> list[dict[str, Any]]:
    """Splits, tiles, and the fewest tiles a split takes. About six programs for each multiprocessor come first.

    fused: the last program adds the parts up, which it holds in registers all at once; otherwise a second kernel does.
    """
    group = heads_a_program(heads, kv_heads)
    want = min(pow2(-(-6 * e.target.sms // (e.bucket.sequences * heads // group))), MOST_SPLITS)
    splits = [want, *(s for s in (want // 2, want * 2, want // 4, want * 4) if 1 <= s <= MOST_SPLITS)]
    if dtype == "f32":
        shapes = [(32, 4, 2), (16, 4, 1)]
    else:
        shapes = [
            (64, 4, 3), (32, 1, 4), (64, 2, 3), (128, 4, 2), (64, 4, 4), (32, 2, 4), (128, 8, 3), (32, 4, 2), (32, 4, 1),
        ]  # fmt: skip
    made: list[dict[str, Any]] = []
    for place, (n, w, stages) in enumerate(shapes):
        shape = {"BN": n, "warps": w, "stages": stages}
        fused = [s for s in splits if pow2(group) * s * pow2(dim) <= PARTS_A_WARP * w]
        few = fused if place == 0 else fused[:2]
        made += [{"splits": s, "least": 1, "fused": 1} | shape for s in few]
        if place < 2:
            made += [{"splits": s, "least": 2, "fused": 1} | shape for s in fused[:2] if s > 1]
            made += [{"splits": s, "least": 1, "fused": 0} | shape for s in splits[:2] if s > 1]
    if not any(c["fused"] for c in made):
        made += [
            {"splits": 1, "least": 1, "fused": 1, "BN": n, "warps": w, "stages": st} for n, w, st in shapes
        ]
    return fitting(e, dtype, max(16, pow2(group)), dim, made)


def parts_at_once(splits: int, warps: int, group: int, dim: int) -> int:
    """Splits whose parts a program adds up at once: few, as contexts rarely have more, and as registers hold."""
    fit = PARTS_A_WARP * warps // (pow2(group) * pow2(dim))
    return max(1, min(pow2(fit + 1) // 2, pow2(splits), 8))


def prefill_candidates(e: BucketEmitter, dtype: str, group: int, dim: int) -> list[dict[str, Any]]:
    """Rows, keys, warps and stages of a program; ``group`` heads must fit into the rows."""
    if dtype == "f32":
        shapes = [(32, 32, 4, 2), (128, 16, 8, 2), (16, 16, 4, 1), (128, 16, 8, 1)]
    elif dim > 128:  # the accumulator takes half of the registers
        shapes = [
            (128, 32, 8, 3),
            (128, 64, 8, 2),
            (64, 32, 4, 2),
            (64, 64, 4, 2),
            (64, 32, 4, 1),
            (128, 16, 8, 1),
        ]
    elif e.bucket.tokens <= 2 * e.bucket.sequences:  # mostly decodes: rows would idle
        shapes = [(64, 64, 4, 3), (16, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 2), (128, 32, 8, 1)]
    elif e.bucket.tokens <= SHORT:  # few tiles, and some of them one decode's
        shapes = [
            (64, 64, 4, 3), (32, 64, 4, 3), (16, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (32, 32, 2, 3), (64, 64, 4, 2),
            (64, 32, 4, 1),
        ]  # fmt: skip
    else:
        shapes = [
            (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3),
            (128, 32, 8, 1), (64, 32, 4, 1),
        ]  # fmt: skip
    made = [
        {"BM": m, "BN": n, "warps": w, "stages": s, "registers": 0} for m, n, w, s in shapes if m >= group
    ]
    # two programs on a multiprocessor, one's softmax beside the other's products, at the price of a few spills
    shared = [
        c | {"registers": 128}
        for c in made
        if dtype != "f32" and c["BM"] * dim <= 128 * 128 and c["warps"] == 8
    ]
    return fitting(e, dtype, 0, dim, made + [c for c in shared if c["BN"] <= 64])


@emitter("paged_attention")
def paged_attention(e: BucketEmitter, node: Node) -> None:
    require_dtype(e, node, node.operand(0), node.operand(1))
    (decode if e.bucket.max_query == 1 else prefill)(e, node)


def attention_consts(
    e: BucketEmitter, node: Node, heads: int, kv_heads: int, dim: int
) -> dict[str, ConstValue]:
    """Constants that all attention kernels share."""
    return {
        "H": heads, "HK": kv_heads, "G": heads_a_program(heads, kv_heads), "D": dim, "DP": max(16, pow2(dim)),
        "SCALE": positive_scale(e, node), "WINDOW": node.integer("window", 0), "SOFTCAP": node.number("softcap", 0.0),
    }  # fmt: skip


def attention_problem(e: BucketEmitter, node: Node, consts: Mapping[str, Any]) -> dict[str, int | str]:
    """What decides the speed of an attention kernel."""
    return {
        "T": e.bucket.tokens, "S": e.bucket.sequences, "H": consts["H"], "HK": consts["HK"], "D": consts["D"],
        "dtype": node.operand(0).dtype, "window": consts["WINDOW"],
    }  # fmt: skip


def decode(e: BucketEmitter, node: Node) -> None:
    q, state, out = node.operand(0), node.operand(1), node.output
    heads, kv = e.bound(q.shape[1]), state.state
    common = attention_consts(e, node, heads, kv["heads"], kv["dim"])
    group = heads_a_program(heads, kv["heads"])
    sequences, programs = e.bucket.sequences, heads // group
    found = decode_candidates(e, q.dtype, heads, kv["heads"], kv["dim"])
    chosen = e.choose(node, "decode_attention", attention_problem(e, node, common), found)
    splits = chosen["splits"]
    parts = sequences * heads * splits * 4 if splits > 1 else 4
    partial, stats = e.typed(e.scratch(parts * kv["dim"]), "f32"), e.typed(e.scratch(parts * 2), "f32")
    source, to = e.rows(q, 1), e.rows(out, 1)
    shared: dict[str, ConstValue] = {
        "OUT_STRIDE": to.stride, "TILE": chosen["BN"], "SPLITS": splits, "LEAST": chosen["least"],
        "CHUNK": parts_at_once(splits, chosen["warps"], group, kv["dim"]),
    }  # fmt: skip
    args: dict[str, Arg] = {
        "out": to.arg,
        "partial": partial,
        "stats": stats,
        "seq_lens": e.step_arg("seq_lens"),
    }
    shared["SINKS"] = optional(args, shared, "sinks", e, node.input(3))
    fused = bool(chosen["fused"]) or splits == 1
    e.launch(
        node, "attention:decode", (programs, splits, e.extent(q.shape[0])),
        args | step_args(e, state, "meta")
        | {"q": source.arg, "counters": e.typed(e.counters(sequences * programs if splits > 1 else 1), "i32")},
        common | shared | {"Q_STRIDE": source.stride, "M": max(16, pow2(group)), "GP": pow2(group), "FUSED": fused},
        num_warps=chosen["warps"], num_stages=chosen["stages"],
    )  # fmt: skip
    if not fused:
        names = ("H", "D", "DP", "WINDOW")
        e.launch(
            node, "attention:decode_reduce", (heads, e.extent(q.shape[0]), 1), args,
            shared | {name: common[name] for name in names},
        )  # fmt: skip


def prefill(e: BucketEmitter, node: Node) -> None:
    q, state, out = node.operand(0), node.operand(1), node.output
    heads, kv = e.bound(q.shape[1]), state.state
    consts = attention_consts(e, node, heads, kv["heads"], kv["dim"])
    group = heads_a_program(heads, kv["heads"])
    found = prefill_candidates(e, q.dtype, group, kv["dim"])
    chosen = e.choose(node, "prefill_attention", attention_problem(e, node, consts), found)
    source, to = e.rows(q, 1), e.rows(out, 1)
    queries = chosen["BM"] // group
    tiles = e.extent(q.shape[0], queries)
    # every sequence may end within a tile
    tiles = (
        replace(tiles, add=e.bucket.sequences) if isinstance(tiles, Extent) else tiles + e.bucket.sequences
    )
    args: dict[str, Arg] = {"q": source.arg, "out": to.arg}
    args |= step_args(e, state, "query_start", "seq_lens", "meta")
    consts["SINKS"] = optional(args, consts, "sinks", e, node.input(3))
    e.launch(
        node, "attention:prefill", (heads // group, tiles, 1), args,
        consts | {
            "Q_STRIDE": source.stride, "OUT_STRIDE": to.stride, "BQ": queries, "BM": chosen["BM"], "BN": chosen["BN"],
            "STEPS": (e.bucket.sequences - 1).bit_length(),
        },
        num_warps=chosen["warps"], num_stages=chosen["stages"], registers=chosen["registers"],
    )  # fmt: skip


@emitter("attention")
def attention(e: BucketEmitter, node: Node) -> None:
    q, k, v, out = node.operand(0), node.operand(1), node.operand(2), node.output
    heads, dim, width = e.bound(q.shape[1]), e.bound(q.shape[2]), e.bound(v.shape[2])
    consts = attention_consts(e, node, heads, e.bound(k.shape[1]), dim)
    group = heads_a_program(heads, e.bound(k.shape[1]))
    found = prefill_candidates(e, q.dtype, group, max(dim, width))
    chosen = e.choose(node, "attention", attention_problem(e, node, consts), found)
    qr, kr, vr, to = e.rows(q, 1), e.rows(k, 1), e.rows(v, 1), e.rows(out, 1)
    queries = chosen["BM"] // group
    args: dict[str, Arg] = {
        "q": qr.arg, "k": kr.arg, "v": vr.arg, "out": to.arg, "QUERIES": count_of(e, qr), "KEYS": count_of(e, kr),
    }  # fmt: skip
    consts["SINKS"] = optional(args, consts, "sinks", e, node.input(3))
    e.launch(
        node, "attention:dense", (heads // group, e.extent(q.shape[0], queries), 1), args,
        consts | {
            "Q_STRIDE": qr.stride, "K_STRIDE": kr.stride, "V_STRIDE": vr.stride, "OUT_STRIDE": to.stride, "BQ": queries,
            "BM": chosen["BM"], "BN": chosen["BN"], "DV": width, "DVP": max(16, pow2(width)),
            "CAUSAL": bool(node.attrs["causal"]),
        },
        num_warps=chosen["warps"], num_stages=chosen["stages"], registers=chosen["registers"],
    )  # fmt: skip
