"""How ``qkv_attention`` of decode steps becomes launches of ``templates/decode.py``."""

from typing import Any

from compilerllm.ir.graph import Node
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.triton.emit_attention import (
    MOST_SPLITS,
    attention_consts,
    fitting,
    heads_a_program,
    optional,
    parts_at_once,
    pow2,
    require_dtype,
    rotation,
    step_args,
)
from compilerllm.kernels.triton.emitter import Arg, BucketEmitter, emitter
from compilerllm.kernels.triton.source import ConstValue

MOST_HEADS = 4  # of one key head, for products in registers
# Tiles, warps, stages and whether products are tl.dot's, likely best first.
FEW: list[tuple[int, int, int, int]] = [
    (64, 4, 3, 1), (64, 4, 1, 0), (64, 8, 1, 0), (32, 1, 4, 1), (32, 4, 1, 0), (128, 8, 1, 0), (64, 8, 3, 1),
    (32, 2, 1, 0), (128, 8, 2, 1),
]  # fmt: skip
MANY: list[tuple[int, int, int, int]] = [
    (32, 1, 4, 1), (64, 2, 3, 1), (64, 4, 3, 1), (32, 2, 4, 1), (128, 4, 2, 1), (64, 4, 1, 0), (32, 2, 1, 0),
    (128, 8, 2, 1),
]  # fmt: skip
WIDE: list[tuple[int, int, int, int]] = [(32, 4, 1, 0), (16, 4, 1, 0), (32, 4, 2, 1), (16, 4, 1, 1)]  # f32


def qkv_candidates(e: BucketEmitter, dtype: str, heads: int, kv_heads: int, dim: int) -> list[dict[str, Any]]:
    """Splits, the fewest tiles that one takes (least), and the shape of a program.

    Splits beyond what a context needs cost next to nothing, as their programs leave at once; what a context shares out
    is held back by ``least``: adding up parts takes as long as reading a few tiles.
    """
    group = heads_a_program(heads, kv_heads)
    programs = e.bucket.sequences * heads // group
    splits = max(1, min(pow2(4 * e.target.sms // programs + 1) // 2, MOST_SPLITS))
    few = programs <= e.target.sms
    shapes = WIDE if dtype == "f32" else FEW if few else MANY
    able = [
        {"BN": tile, "warps": warps, "stages": stages, "dot": dot}
        for tile, warps, stages, dot in shapes
        if dot or (pow2(group) <= MOST_HEADS and tile * dim <= 128 * 32 * warps)
    ]
    if not able:
        able = [{"BN": 16, "warps": 4, "stages": 1, "dot": 1}]
    more = [(0, splits, 2), (1, splits, 2), (0, splits // 2, 1), (1, splits, 4), (0, splits, 4)]
    if splits == 1:
        more = [(0, 2, 1), (2, 2, 1)]
    made = [{"splits": splits, "least": 1} | shape for shape in able[:4]]
    made += [{"splits": n, "least": least} | able[i] for i, n, least in more if i < len(able)]
    made += [{"splits": splits, "least": 1} | shape for shape in able[4:]]
    fit = fitting(e, dtype, max(16, pow2(group)), dim, [c for c in made if c["dot"]])
    return [c for c in made if not c["dot"] or c in fit]


@emitter("qkv_attention")
def qkv_attention(e: BucketEmitter, node: Node) -> None:
    state, qkv, out = node.operand(0), node.operand(1), node.output
    if e.bucket.max_query != 1:
        raise UnsupportedByTarget(
            f"@{e.graph.name}: {node!r}: qkv_attention is for steps of one query a sequence; leave qkv_rope_write and "
            "paged_attention apart in other buckets"
        )
    require_dtype(e, node, qkv, state)
    kv, heads = state.state, node.integer("heads")
    dim, kv_heads = kv["dim"], kv["heads"]
    consts = attention_consts(e, node, heads, kv_heads, dim)
    group, sequences = heads_a_program(heads, kv_heads), e.bucket.sequences
    programs = heads // group
    args, turn = rotation(e, node, qkv, node.input(3), node.input(4), dim)
    consts |= {name: value for name, value in turn.items() if name not in ("HALF_P", "REST_P")}
    rows, to = e.rows(qkv, 1), e.rows(out, 1)
    consts["Q_NORM"] = optional(args, consts, "q_norm", e, node.input(5))
    consts["K_NORM"] = optional(args, consts, "k_norm", e, node.input(6))
    consts["SINKS"] = optional(args, consts, "sinks", e, node.input(7))
    problem: dict[str, int | str] = {
        "M": sequences, "H": heads, "HK": kv_heads, "D": dim, "dtype": qkv.dtype, "window": node.integer("window", 0),
        "norm": int(bool(consts["Q_NORM"] or consts["K_NORM"])),
    }  # fmt: skip
    found = qkv_candidates(e, qkv.dtype, heads, kv_heads, dim)
    chosen = e.choose(node, "decode_qkv", problem, found)
    splits, warps = chosen["splits"], chosen["warps"]
    parts = sequences * heads * splits * 4 if splits > 1 else 4
    args |= step_args(e, state, "seq_lens", "meta")
    more: dict[str, Arg] = {
        "qkv": rows.arg, "out": to.arg, "partial": e.typed(e.scratch(parts * dim), "f32"),
        "stats": e.typed(e.scratch(parts * 2), "f32"),
        "counters": e.typed(e.counters(sequences * programs if splits > 1 else 1), "i32"),
    }  # fmt: skip
    shape: dict[str, ConstValue] = {
        "X_STRIDE": rows.stride, "OUT_STRIDE": to.stride, "GP": pow2(group),
        "M": max(16, pow2(group)) if chosen["dot"] else pow2(group), "EPS": node.number("eps", 0.0),
        "OFFSET": node.number("offset", 0.0), "ROUND_FIRST": bool(node.attrs.get("round_first")), "TILE": chosen["BN"],
        "SPLITS": splits, "CHUNK": parts_at_once(splits, warps, group, dim), "LEAST": chosen["least"],
        "SINGLE": sequences == 1, "DOT": bool(chosen["dot"]),
    }  # fmt: skip
    e.launch(
        node, "decode:qkv_attention", (programs, splits, e.extent(qkv.shape[0])), args | more, consts | shape,
        num_warps=warps, num_stages=chosen["stages"],
    )  # fmt: skip
