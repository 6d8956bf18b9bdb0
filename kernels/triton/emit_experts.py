"""Routing and experts as launches. Which of three ways experts run is a choice by bucket: ``gemv`` reads ids directly and
has no more launches than two products; ``grouped`` puts slots in blocks by expert first, so that weights are read once;
``cutlass`` sorts copies of rows by expert, as CUTLASS's grouped products want them.
"""

from collections.abc import Sequence
from typing import Any

import sympy

from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Node, Value
from compilerllm.ir.types import StepType
from compilerllm.kernels.cutlass.candidates import find
from compilerllm.kernels.cutlass.instances import Instance
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.gpu.program import META
from compilerllm.kernels.triton.cutlass_calls import grouped_gemm, grouped_instances
from compilerllm.kernels.triton.emitter import ITEM_BYTES, Arg, BucketEmitter, Typed, emitter

Candidate = dict[str, Any]
WIDEST_ROW = 16384  # columns that one program of topk holds in registers
GEMV_SLOTS = 128  # above, weights read once for each slot can only be slower than blocks
ALIGNED_AT_ONCE = 4096  # slots that every program of ``align`` reads
ROWS_OF_AN_EXPERT = 32  # on average, from which on tiles of CUTLASS are worth timing
CHUNK = 512  # slots of a program of ``count_chunks`` and ``place_chunks``
_COUNTED = {"T": "tokens", "S": "sequences", "R": "rows"}


def power_of_two(count: int) -> int:
    """The smallest that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def _row_warps(columns: int) -> int:
    return min(16, max(1, power_of_two(columns) // 512))


def _check_row(node: Node, x: Value, columns: int) -> None:
    if x.dtype not in ("f32", "bf16", "f16") or columns > WIDEST_ROW:
        raise UnsupportedByTarget(
            f"{node!r}: the largest of rows of {columns} {x.dtype} cannot be found by one program "
            f"(f32, bf16 or f16, at most {WIDEST_ROW}); compile with --optimization-level 0 to run it through torch"
        )


@emitter("topk")
def emit_topk(e: BucketEmitter, node: Node) -> None:
    """One program a row."""
    x, k = node.operand(0), node.integer("k")
    values, indices = node.outputs
    rows = e.rows(x, len(x.shape) - 1)
    _check_row(node, x, rows.columns)
    width = power_of_two(rows.columns)
    e.launch(
        node, "route:topk", (e.extent(rows.count), 1, 1),
        {"x": rows.arg, "values": e.arg(values), "indices": e.arg(indices), "rows": e.extent(rows.count)},
        {"STRIDE": rows.stride, "N": rows.columns, "N2": width, "TOP": k, "TOP2": power_of_two(k), "ROWS": 1},
        num_warps=_row_warps(width),
    )  # fmt: skip


@emitter("route")
def emit_route(e: BucketEmitter, node: Node) -> None:
    """One program a row."""
    logits = node.operand(0)
    weights, ids = node.outputs
    rows = e.rows(logits, len(logits.shape) - 1)
    _check_row(node, logits, rows.columns)
    e.launch(
        node, "route:route", (e.extent(rows.count), 1, 1),
        {"logits": rows.arg, "weights": e.arg(weights), "ids": e.arg(ids), "rows": e.extent(rows.count)},
        {"STRIDE": rows.stride, "ROWS": 1, **_choice(node, rows.columns)},
        num_warps=_row_warps(rows.columns),
    )  # fmt: skip


@emitter("norm_route")
def emit_norm_route(e: BucketEmitter, node: Node) -> None:
    """Programs for a few logits of a row; what they share is in scratch memory, and a counter for each row."""
    x, residual, norm_weight, weight = (node.operand(i) for i in range(4))
    normed, total, weights, ids = node.outputs
    rows, other, bias = e.rows(x, 1), e.rows(residual, 1), node.input(4)
    count, width = int(weight.shape[0]), rows.columns
    _check_row(node, x, count)
    tokens, k = e.bound(x.shape[0]), node.integer("k")
    problem: dict[str, int | str] = {"M": tokens, "N": count, "K": width, "k": k, "dtype": x.dtype}
    chosen = e.choose(
        node,
        "norm_route",
        problem,
        [{"part": p, "warps": w} for p, w in ((2, 4), (1, 4), (4, 8), (4, 4), (8, 8))],
    )
    args = {
        "x": rows.arg, "residual": other.arg, "norm_weight": e.arg(norm_weight), "weight": e.arg(weight),
        "normed": e.arg(normed), "total": e.arg(total), "weights": e.arg(weights), "ids": e.arg(ids),
        "logits": e.typed(e.scratch(tokens * count * ITEM_BYTES[x.dtype]), x.dtype),
        "counters": e.typed(e.counters(tokens), "i32"),
    } | ({"bias": e.arg(bias)} if bias is not None else {})  # fmt: skip
    e.launch(
        node, "route:norm_route", (-(-count // chosen["part"]), e.extent(x.shape[0]), 1), args,
        {
            "X_STRIDE": rows.stride, "RESIDUAL_STRIDE": other.stride, "COLUMNS": width, "BLOCK": power_of_two(width),
            "EPS": node.number("eps"), "OFFSET": node.number("offset", 0.0),
            "ROUND_FIRST": bool(node.attrs.get("round_first")), "PART": chosen["part"], **_choice(node, count),
        } | ({"bias": None} if bias is None else {}),
        num_warps=chosen["warps"],
    )  # fmt: skip


def _choice(node: Node, columns: int) -> dict[str, Any]:
    """Constants of ``weighed``."""
    k = node.integer("k")
    return {
        "N": columns, "N2": power_of_two(columns), "TOP": k, "TOP2": power_of_two(k),
        "BEFORE": node.text("softmax") == "before", "NORMALISE": bool(node.attrs.get("normalise")),
    }  # fmt: skip


class Experts:
    """One experts node: its sizes at the bucket's bounds, and the arguments that its kernels share."""

    def __init__(self, e: BucketEmitter, node: Node) -> None:
        self.e, self.node = e, node
        x, ids, weights, gate_up, down = (node.operand(i) for i in range(5))
        self._check(x, gate_up, down)
        self.x = e.rows(x, 1)
        self.ids, self.weights, self.gate_up, self.down = (
            e.arg(ids),
            e.arg(weights),
            e.arg(gate_up),
            e.arg(down),
        )
        self.out = e.arg(node.output)
        gate_up_bias, down_bias = node.input(5), node.input(6)
        self.gate_up_bias = None if gate_up_bias is None else e.arg(gate_up_bias)
        self.down_bias = None if down_bias is None else e.arg(down_bias)
        self.dtype, self.item = x.dtype, ITEM_BYTES[x.dtype]
        self.tokens, self.top = e.bound(ids.shape[0]), int(ids.shape[1])
        self.count = int(gate_up.shape[0])
        self.hidden, self.width = int(down.shape[1]), int(down.shape[2])
        self.slots = self.tokens * self.top
        self.rows = e.extent(ids.shape[0])
        self.meta, self.entry = self._live(ids.shape[0])

    def _check(self, x: Value, gate_up: Value, down: Value) -> None:
        if x.dtype not in ("f32", "bf16", "f16") or gate_up.dtype != x.dtype or down.dtype != x.dtype:
            raise UnsupportedByTarget(
                f"{self.node!r}: experts of {gate_up.dtype} for {x.dtype} activations have no CUDA kernel (from "
                f"{self.node.origin.path or 'the graph'}); load the checkpoint in {x.dtype}"
            )

    def _live(self, rows: Dim) -> tuple[Typed, int]:
        """Where a kernel finds the number of real rows: the step's meta and its entry; any pointer and -1 if all are.

        A step has a token at least, so a bucket of one has no padding to look for.
        """
        takes_step = any(isinstance(v.type, StepType) for v in self.e.graph.inputs)
        if not takes_step or isinstance(rows, int) or self.tokens == 1:
            return self.ids, -1
        if not isinstance(rows, sympy.Symbol):
            raise UnsupportedByTarget(f"{self.node!r}: {rows} rows are no count that a step tells")
        return self.e.step_arg("meta"), META.index(_COUNTED[str(rows.name)])

    def problem(self) -> dict[str, int | str]:
        """What decides the speed."""
        return {
            "M": self.tokens, "E": self.count, "k": self.top, "H": self.hidden, "F": self.width,
            "dtype": self.dtype,
        }  # fmt: skip

    def blocks(self, bm: int) -> int:
        """Blocks of ``bm`` slots at most."""
        return max(1, min(self.slots, self.slots // bm + min(self.count, self.slots)))

    # -- launches --------------------------------------------------------------------------------------------------

    def _gate_up_constants(self) -> dict[str, Any]:
        node, split = self.node, not self.node.attrs.get("interleaved")
        return {
            "STRIDE": self.x.stride, "K": self.hidden, "F": self.width, "TOP": self.top, "STEP": 1 if split else 2,
            "UP": self.width if split else 1, "ACT": node.text("act"), "LIMIT": node.number("limit", 7.0),
            "ALPHA": node.number("alpha", 1.702), "BIAS": self.gate_up_bias is not None,
        }  # fmt: skip

    def gemv(self, c: Candidate) -> None:
        """Two products straight from the ids."""
        h = self._memory(self.slots * self.width * self.item, self.dtype)
        self.e.launch(
            self.node, "experts:gate_up_gemv",
            (self.e.extent(self.node.operand(1).shape[0], mul=self.top), -(-self.width // c["gu_bn"]), 1),
            {"x": self.x.arg, "ids": self.ids, "weight": self.gate_up, "bias": self.gate_up_bias or self.gate_up, "h": h,
             "meta": self.meta, "rows": self.rows},
            self._gate_up_constants() | {"COUNT": self.entry, "BN": c["gu_bn"], "BK": c["gu_bk"]},
            num_warps=c["gu_warps"],
        )  # fmt: skip
        self.e.launch(
            self.node, "experts:down_gemv", (self.rows, -(-self.hidden // c["down_bn"]), 1),
            {"h": h, "ids": self.ids, "weights": self.weights, "weight": self.down, "bias": self.down_bias or self.down,
             "out": self.out, "meta": self.meta, "rows": self.rows},
            {"H": self.hidden, "F": self.width, "TOP": self.top, "TOP2": power_of_two(self.top),
             "BIAS": self.down_bias is not None, "COUNT": self.entry, "BN": c["down_bn"], "BK": c["down_bk"]},
            num_warps=c["down_warps"],
        )  # fmt: skip

    def grouped(self, c: Candidate) -> None:
        """Blocks by expert, two grouped products, and the sum over a token's experts."""
        bm = int(c["bm"])
        blocks = self.blocks(bm)
        listed = {
            "slots": self._memory(blocks * bm * 4, "i32"), "owners": self._memory(blocks * 4, "i32"),
            "used": self._memory(4, "i32"),
        }  # fmt: skip
        self._align(listed, bm)
        h = self._memory(self.slots * self.width * self.item, self.dtype)
        self.e.launch(
            self.node, "experts:grouped_gate_up", (-(-self.width // c["gu_bn"]), blocks, 1),
            {"x": self.x.arg, "weight": self.gate_up, "bias": self.gate_up_bias or self.gate_up, "h": h, **listed},
            self._gate_up_constants() | {"BM": bm, "BN": c["gu_bn"], "BK": c["gu_bk"]},
            num_warps=c["gu_warps"], num_stages=c["gu_stages"],
        )  # fmt: skip
        y = self._memory(self.slots * self.hidden * self.item, self.dtype)
        self.e.launch(
            self.node, "experts:grouped_down", (-(-self.hidden // c["down_bn"]), blocks, 1),
            {"h": h, "weights": self.weights, "weight": self.down, "bias": self.down_bias or self.down, "y": y, **listed},
            {"H": self.hidden, "F": self.width, "BIAS": self.down_bias is not None, "BM": bm, "BN": c["down_bn"],
             "BK": c["down_bk"]},
            num_warps=c["down_warps"], num_stages=c["down_stages"],
        )  # fmt: skip
        width = min(2048, power_of_two(self.hidden))
        self.e.launch(
            self.node, "experts:combine", (self.rows, -(-self.hidden // width), 1),
            {"y": y, "ids": self.ids, "out": self.out, "meta": self.meta, "rows": self.rows},
            {"H": self.hidden, "TOP": self.top, "TOP2": power_of_two(self.top), "COUNT": self.entry, "BN": width},
        )  # fmt: skip

    def instances(self) -> list[Instance]:
        """CUTLASS's for both products, where enough rows meet in an expert and nothing but the activation comes between."""
        plain = (
            self.gate_up_bias is None and self.down_bias is None and not self.node.attrs.get("interleaved")
        )
        if not plain or self.slots < ROWS_OF_AN_EXPERT * self.count:
            return []
        sizes = [(2 * self.width, self.hidden), (self.hidden, self.width)]
        return grouped_instances(self.e, sizes, {self.dtype, self.weights.dtype})

    def sorted(self, instance: Instance) -> None:
        """Rows sorted by expert, two products by CUTLASS, and the sum over a token's experts."""
        e, node, rows = self.e, self.node, self.e.extent(self.node.operand(1).shape[0], mul=self.top)
        listed = {
            "slots": self._memory(self.slots * 4, "i32"), "owners": self._memory(self.slots * 4, "i32"),
            "used": self._memory(4, "i32"),
        }  # fmt: skip
        self._align(listed, 1)
        x = self._memory(self.slots * self.hidden * self.item, self.dtype)
        places = self._memory(self.slots * 4, "i32")
        offsets = self._memory((self.count + 1) * 4, "i32")
        columns = min(2048, power_of_two(self.hidden))
        e.launch(
            node, "sorted_experts:sort_rows", (rows, -(-self.hidden // columns), 1),
            {"x": self.x.arg, **listed, "rows": x, "places": places, "offsets": offsets},
            {"STRIDE": self.x.stride, "H": self.hidden, "TOP": self.top, "EXPERTS": self.count,
             "E2": power_of_two(self.count + 1), "BN": columns},
        )  # fmt: skip
        both = self._memory(self.slots * 2 * self.width * self.item, self.dtype)
        sizes = 2 * self.width, self.hidden
        grouped_gemm(e, node, instance, x, self.gate_up, offsets, both, rows, self.count, *sizes)
        h = self._memory(self.slots * self.width * self.item, self.dtype)
        up = e.typed(both.pointer.at(self.width * self.item), self.dtype)
        block = min(1024, power_of_two(self.width))
        constants = self._gate_up_constants()
        e.launch(
            node, "after:after", (rows, -(-self.width // block), 1), {"y": both, "up": up, "out": h},
            {"bias": None, "residual": None, "Y_STRIDE": 2 * self.width, "UP_STRIDE": 2 * self.width,
             "R_STRIDE": self.width, "N": self.width, "BLOCK": block,
             **{name: constants[name] for name in ("ACT", "LIMIT", "ALPHA")}},
        )  # fmt: skip
        y = x  # the rows are read by now
        sizes = self.hidden, self.width
        grouped_gemm(e, node, instance, h, self.down, offsets, y, rows, self.count, *sizes)
        e.launch(
            node, "sorted_experts:combine_sorted", (self.rows, -(-self.hidden // columns), 1),
            {"y": y, "ids": self.ids, "weights": self.weights, "places": places, "out": self.out, "meta": self.meta,
             "rows": self.rows},
            {"H": self.hidden, "TOP": self.top, "TOP2": power_of_two(self.top), "COUNT": self.entry, "BN": columns},
        )  # fmt: skip

    def _align(self, listed: dict[str, Typed], bm: int) -> None:
        shared: dict[str, Arg] = {"ids": self.ids, "meta": self.meta, "rows": self.rows}
        experts = power_of_two(self.count)
        constants = {"TOP": self.top, "E2": experts, "COUNT": self.entry}
        if self.slots <= ALIGNED_AT_ONCE:
            self.e.launch(
                self.node, "align:align", (self.count, 1, 1), {**shared, **listed},
                constants | {"N2": power_of_two(self.slots), "BM": bm, "BLOCKS2": power_of_two(-(-self.slots // bm))},
                num_warps=4 if self.slots <= 1024 else 8,
            )  # fmt: skip
            return
        chunks = -(-self.slots // CHUNK)
        counts = self._memory(chunks * experts * 4, "i32")
        self.e.launch(
            self.node,
            "align:count_chunks",
            (chunks, 1, 1),
            {**shared, "counts": counts},
            constants | {"CHUNK": CHUNK},
        )
        self.e.launch(
            self.node, "align:place_chunks", (chunks, 1, 1), {**shared, **listed, "counts": counts, "chunks": chunks},
            constants | {"BM": bm, "CHUNK": CHUNK, "STEP": 16, "PART": max(4, min(32, 4096 // experts))}, num_warps=8,
        )  # fmt: skip

    def _memory(self, nbytes: int, dtype: str) -> Typed:
        return self.e.typed(self.e.scratch(nbytes), dtype)


# gate_up columns, K at a time, warps; down columns, K at a time over 8 experts (more of it over fewer), warps
_GEMV = ((2, 1024, 4, 1, 256, 1), (1, 1024, 1, 1, 256, 1), (2, 1024, 2, 1, 512, 1), (1, 1024, 2, 4, 256, 8),
         (1, 2048, 4, 2, 256, 4), (2, 2048, 4, 1, 256, 2), (2, 512, 1, 1, 512, 1), (4, 1024, 8, 1, 256, 4))  # fmt: skip
# block; gate_up columns, K at a time, warps, stages; the same of down
_GROUPED = (
    (16, 64, 64, 4, 5, 128, 64, 4, 5), (16, 64, 128, 4, 4, 128, 128, 4, 4), (16, 32, 128, 4, 4, 64, 128, 4, 4),
    (16, 128, 64, 4, 4, 128, 64, 4, 4), (16, 32, 256, 4, 3, 64, 256, 4, 3),
    (32, 64, 64, 4, 5, 128, 64, 4, 5), (32, 64, 128, 4, 4, 128, 128, 4, 4), (32, 128, 64, 8, 4, 128, 64, 4, 4),
    (64, 64, 64, 4, 4, 128, 64, 4, 4), (64, 128, 64, 8, 4, 256, 64, 8, 4), (64, 32, 64, 4, 4, 64, 64, 4, 4),
    (128, 128, 64, 8, 4, 256, 64, 8, 3), (128, 64, 64, 8, 4, 128, 64, 8, 4), (128, 128, 64, 8, 3, 128, 128, 8, 3),
)  # fmt: skip


def candidates(x: Experts, shared: int, cutlass: Sequence[str] = ()) -> list[Candidate]:
    """Ways to run the node on a target with ``shared`` bytes of shared memory, likely best first; names of CUTLASS's
    instances come after the two best grouped ones: nothing but a measurement puts one first."""
    found: list[Candidate] = [_gemv(x, *g) for g in _GEMV] if x.slots <= GEMV_SLOTS else []
    each = x.slots / x.count
    wanted = 16 if each <= 8 else 32 if each <= 24 else 64 if each <= 96 else 128
    blocks = sorted(_GROUPED, key=lambda g: abs(g[0].bit_length() - wanted.bit_length()))
    # f32 has no tensor cores here (IEEE products): narrow tiles, which registers hold
    grouped = [_grouped(x, *g) for g in (((16, 32, 32, 4, 3, 32, 32, 4, 3),) if x.item == 4 else blocks)]
    fitting = [c for c in grouped if _shared_bytes(x, c) <= shared]
    fitting[2:2] = [{"path": "cutlass", "instance": name} for name in cutlass]
    # a few slots of one expert each are best read directly; with many of them shared, blocks come first
    return _distinct(found + fitting if x.slots <= 64 else fitting + found)


def _gemv(
    x: Experts, gu_bn: int, gu_bk: int, gu_warps: int, down_bn: int, down_bk: int, down_warps: int
) -> Candidate:
    return {
        "path": "gemv", "gu_bn": min(gu_bn, power_of_two(x.width)), "gu_bk": min(gu_bk, power_of_two(x.hidden)),
        "gu_warps": gu_warps, "down_bn": min(down_bn, power_of_two(x.hidden)),
        "down_bk": min(max(32, 8 * down_bk // power_of_two(x.top)), power_of_two(x.width)), "down_warps": down_warps,
    }  # fmt: skip


def _grouped(x: Experts, bm: int, *sizes: int) -> Candidate:
    widths = (
        x.width,
        x.hidden,
        0,
        0,
        x.hidden,
        x.width,
        0,
        0,
    )  # a tile need not be wider than what it covers
    cut = [min(s, max(16, power_of_two(w))) if w else s for s, w in zip(sizes, widths, strict=True)]
    names = [f"{part}_{what}" for part in ("gu", "down") for what in ("bn", "bk", "warps", "stages")]
    return {"path": "grouped", "bm": bm, **dict(zip(names, cut, strict=True))}


def _shared_bytes(x: Experts, c: Candidate) -> int:
    """What Triton's pipeline of a grouped product takes at most: it keeps one stage in registers for small blocks."""

    def of(bn: int, bk: int, stages: int) -> int:
        return (int(c["bm"]) + bn) * bk * x.item * (stages if c["bm"] >= 64 else stages - 1)

    return max(
        of(2 * c["gu_bn"], c["gu_bk"], c["gu_stages"]), of(c["down_bn"], c["down_bk"], c["down_stages"])
    )


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    return list({tuple(c.items()): c for c in found}.values())


@emitter("experts")
def emit_experts(e: BucketEmitter, node: Node) -> None:
    """Matrix-vector products for few slots, blocks by expert or rows sorted by expert for more."""
    x = Experts(e, node)
    cutlass = x.instances()
    names = [i.name for i in cutlass]
    chosen = e.choose(node, "experts", x.problem(), candidates(x, e.target.shared, names))
    match chosen["path"]:
        case "gemv":
            x.gemv(chosen)
        case "cutlass":
            x.sorted(find(cutlass, chosen["instance"]))
        case _:
            x.grouped(chosen)
