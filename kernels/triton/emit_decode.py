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
Shape = tuple[int, int, int, int, int]
# Keys of a tile, warps, stages, whether products are tl.dot's, and the fewest tiles of a split; likely best first.
FEW: list[Shape] = [
    (64, 8, 1, 0, 1), (64, 4, 1, 0, 1), (64, 4, 3, 1, 1), (32, 4, 1, 0, 1), (128, 8, 1, 0, 1), (64, 8, 1, 0, 2),
    (128, 8, 1, 0, 2), (64, 8, 3, 1, 1), (64, 8, 1, 0, 4), (32, 1, 4, 1, 1), (32, 8, 1, 0, 1), (64, 4, 3, 1, 2),
    (128, 8, 2, 1, 1), (64, 4, 3, 1, 4), (64, 2, 3, 1, 1),
    (16, 4, 2, 1, 1),
]  # fmt: skip
MANY: list[Shape] = [
    (32, 1, 4, 1, 1), (64, 2, 3, 1, 1), (64, 4, 3, 1, 1), (32, 2, 4, 1, 1), (64, 4, 1, 0, 1), (128, 4, 2, 1, 1),
    (64, 8, 1, 0, 1), (32, 2, 1, 0, 1), (128, 8, 2, 1, 1), (16, 4, 2, 1, 1),
]  # fmt: skip
WIDE: list[Shape] = [(32, 4, 1, 0, 1), (16, 4, 1, 0, 1), (32, 4, 2, 1, 1), (16, 4, 1, 1, 1)]  # f32


def qkv_candidates(e: BucketEmitter, dtype: str, heads: int, kv_heads: int, dim: int) -> list[dict[str, Any]]:
    """Splits, the fewest tiles that one takes (least), the shape of a program, and how many query heads it takes.

    As many splits as multiprocessors hold at once; those that a context has no tiles for end early.
    ``least`` keeps short contexts together: adding up parts takes as long as reading a few tiles.
    """
    whole = heads_a_program(heads, kv_heads)
    part = max(g for g in range(1, min(whole, MOST_HEADS) + 1) if whole % g == 0)
    few = e.bucket.sequences * heads // whole <= e.target.sms
    shapes = WIDE if dtype == "f32" else FEW if few else MANY
    made: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    for tile, warps, stages, dot, least in shapes:
        group = whole if dot else part  # the parts of a key head's heads each read its keys
        programs = e.bucket.sequences * heads // group
        most = 128 if dot else 64 if group <= 2 else 32  # elements of a tile that a thread has room for
        if tile * pow2(dim) > most * 32 * warps or (group < whole and programs > e.target.sms):
            continue
        resident = (4 if warps == 1 else 1 if warps == 8 and not dot else 2) * e.target.sms
        splits = max(1, min(pow2(resident // programs + 1) // 2, MOST_SPLITS))
        shape = {"least": least, "BN": tile, "warps": warps, "stages": stages, "dot": dot, "heads": group}
        if splits > 1 or least == 1:
            made.append({"splits": splits} | shape)
        if len(again) < 2 and least == 1:
            again.append({"splits": 2 if splits == 1 else splits // 2} | shape)
    made[6:6] = again
    fit = fitting(e, dtype, max(16, pow2(whole)), dim, [c for c in made if c["dot"]])
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
    sequences = e.bucket.sequences
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
    splits, warps, group = chosen["splits"], chosen["warps"], chosen["heads"]
    programs = heads // group
    parts = sequences * heads * splits * 4 if splits > 1 else 4
    args |= step_args(e, state, "seq_lens", "meta")
    more: dict[str, Arg] = {
        "qkv": rows.arg, "out": to.arg, "partial": e.typed(e.scratch(parts * dim), "f32"),
        "stats": e.typed(e.scratch(parts * 2), "f32"),
        "counters": e.typed(e.counters(sequences * programs if splits > 1 else 1), "i32"),
    }  # fmt: skip
    shape: dict[str, ConstValue] = {
        "X_STRIDE": rows.stride, "OUT_STRIDE": to.stride, "G": group, "GP": pow2(group),
        "M": max(16, pow2(group)) if chosen["dot"] else pow2(group), "EPS": node.number("eps", 0.0),
        "OFFSET": node.number("offset", 0.0), "ROUND_FIRST": bool(node.attrs.get("round_first")), "TILE": chosen["BN"],
        "SPLITS": splits, "CHUNK": parts_at_once(splits, warps, group, dim), "LEAST": chosen["least"],
        "SINGLE": sequences == 1, "DOT": bool(chosen["dot"]),
    }  # fmt: skip
    e.launch(
        node, "decode:qkv_attention", (programs, splits, e.extent(qkv.shape[0])), args | more, consts | shape,
        num_warps=warps, num_stages=chosen["stages"],
    )  # fmt: skip
