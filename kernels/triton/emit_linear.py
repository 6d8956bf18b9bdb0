"""How linears become launches, with the norm before them and what comes after; and gated activations of packed rows."""

from dataclasses import dataclass

from compilerllm.ir.dims import Dim, product
from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.cutlass.candidates import find
from compilerllm.kernels.cutlass.instances import Instance
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.triton.cutlass_calls import gated_instances, gemm, instances
from compilerllm.kernels.triton.emitter import ITEM_BYTES, Arg, BucketEmitter, Typed, emitter
from compilerllm.kernels.triton.linear_candidates import candidates
from compilerllm.kernels.triton.linear_shape import Candidate, power_of_two, shape_of
from compilerllm.kernels.triton.source import ConstValue

GPT_OSS = {"LIMIT": 7.0, "ALPHA": 1.702}  # of the activation of that name
FLOATS = ("bf16", "f16", "f32")
WIDEST_NORM = 16384  # columns of a row that one program norms
SCALE_COLUMNS = 4096
AFTER_COLUMNS = 1024


@dataclass(frozen=True)
class Linear:
    """One node: its values by role, and its sizes."""

    node: Node
    x: Value
    weight: Value
    bias: Value | None
    residual: Value | None
    addend: Value | None
    norm_weight: Value | None
    rows: Dim
    n: int
    k: int

    @property
    def out(self) -> Value:
        return self.node.outputs[0]

    @property
    def total(self) -> Value | None:
        return self.node.outputs[1] if self.addend is not None else None

    @property
    def gated(self) -> bool:
        return self.node.op.endswith("gated")

    @property
    def width(self) -> int:
        """Columns of the product: gate and up together."""
        return self.n * (2 if self.gated else 1)

    @property
    def more(self) -> bool:
        """Whether anything but a bias comes after the product."""
        return self.gated or self.residual is not None or self.node.op == "linear_act"

    @property
    def act(self) -> str:
        return self.node.text("act", "identity")


@emitter("linear", "linear_act", "linear_gated", "linear_add", "norm_linear", "norm_linear_gated")
def emit_linear(e: BucketEmitter, node: Node) -> None:
    """The kernel that is fastest for the bucket's rows."""
    it = _linear(node)
    problem: dict[str, int | str] = {
        "op": node.op, "M": e.bound(it.rows), "N": it.n, "K": it.k, "dtype": it.x.dtype, "out": it.out.dtype,
        "act": it.act, "bias": int(it.bias is not None),
    }  # fmt: skip
    shape = shape_of(problem, ITEM_BYTES[it.x.dtype], ITEM_BYTES[it.out.dtype])
    cutlass = _instances(e, it)
    names = tuple(i.name for i in cutlass)
    choice = e.choose(node, "linear", problem, candidates(shape, e.target, it.x.dtype != "f32", names))
    x: Value | Typed = it.x
    if choice.get("norm") == "apart":
        x = _norm(e, it)
    match choice["path"]:
        case "gemv" | "gemv_rows":
            _gemv(e, it, x, choice)
        case "skinny":
            _skinny(e, it, x, choice)
        case "matmul":
            _matmul(e, it, x, choice)
        case "cutlass":
            _cutlass(e, it, x, find(cutlass, choice["instance"]))
        case _:
            _library(e, it, x)


def _linear(node: Node) -> Linear:
    normed = node.op.startswith("norm")
    at = 3 if normed else 1
    adds = node.op == "linear_add"
    x, weight = node.operand(0), node.operand(at)
    if weight.tensor.is_quantized or x.dtype not in FLOATS or node.outputs[0].dtype not in FLOATS:
        raise UnsupportedByTarget(
            f"{node.op} of {x.type} with a weight {weight.type} (from {node.origin.path or 'the graph'}) has no CUDA "
            f"kernel; weights must be {', '.join(FLOATS)}: convert the checkpoint, or compile for a CPU target"
        )
    n, k = weight.shape
    if not isinstance(n, int) or not isinstance(k, int):
        raise UnsupportedByTarget(f"{node.op}'s weight {weight.type} has a size known only at run time")
    return Linear(
        node, x, weight, _operand(node, at + (2 if adds else 1)), node.operand(2) if adds else None,
        node.operand(1) if normed else None, node.operand(2) if normed else None, product(x.shape[:-1]),
        n // 2 if node.op.endswith("gated") else n, k,
    )  # fmt: skip


def _operand(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


class _Arguments:
    """Arguments and constants of a launch; what is absent is a constant None."""

    def __init__(self, e: BucketEmitter) -> None:
        self.e = e
        self.args: dict[str, Arg] = {}
        self.constants: dict[str, ConstValue] = {}

    def pointer(self, name: str, value: Value | Typed | None) -> None:
        """A dense tensor."""
        if value is None:
            self.constants[name] = None
        else:
            self.args[name] = self.e.arg(value) if isinstance(value, Value) else value

    def rows(self, name: str, stride: str, value: Value | Typed | None, columns: int) -> None:
        """A tensor as rows and its stride; a Typed is dense rows of ``columns``."""
        if isinstance(value, Value):
            rows = self.e.rows(value, len(value.shape) - 1)
            self.args[name] = rows.arg
            self.constants[stride] = rows.stride
        else:
            self.pointer(name, value)
            self.constants[stride] = columns


def _common(e: BucketEmitter, it: Linear, x: Value | Typed) -> _Arguments:
    a = _Arguments(e)
    a.rows("x", "X_STRIDE", x, it.k)
    a.rows("residual", "R_STRIDE", it.residual, it.n)
    a.args |= {"w": e.arg(it.weight), "out": e.arg(it.out), "rows": e.extent(it.rows)}
    a.pointer("bias", it.bias)
    a.constants |= {"N": it.n, "K": it.k, "ACT": it.act, "GATED": it.gated, **GPT_OSS}
    if not e.is_param(it.weight):  # it must not be read before the wait
        a.constants["PDL"] = False
    return a


def _norm_constants(it: Linear) -> dict[str, ConstValue]:
    if it.addend is None:
        return {"EPS": 0.0, "OFFSET": 0.0, "ROUND_FIRST": False}
    node = it.node
    return {
        "EPS": node.number("eps"), "OFFSET": float(node.number("offset", 0.0)),
        "ROUND_FIRST": bool(node.attrs.get("round_first")),
    }  # fmt: skip


def _with_norm(e: BucketEmitter, it: Linear, x: Value | Typed) -> _Arguments:
    """``_common`` for a kernel that may norm: it does where x is not what another launch normed."""
    inside = isinstance(x, Value) and it.addend is not None
    a = _common(e, it, x)
    a.rows("addend", "A_STRIDE", it.addend if inside else None, it.k)
    a.pointer("norm_weight", it.norm_weight if inside else None)
    a.pointer("total", it.total if inside else None)
    a.constants |= _norm_constants(it)
    if inside and not e.is_param(it.norm_weight):
        a.constants["PDL"] = False
    return a


def _gemv(e: BucketEmitter, it: Linear, x: Value | Typed, choice: Candidate) -> None:
    a = _with_norm(e, it, x)
    bn, path = int(choice["bn"]), str(choice["path"])
    a.constants["BN"] = bn
    if path == "gemv":
        columns = min(SCALE_COLUMNS, power_of_two(it.k))
        a.constants |= {"T": e.bound(it.rows), "BK": choice["bk"], "PRE": choice["pre"], "SCALE_BK": columns}
        programs = -(-it.n // bn)
    else:
        a.constants |= {"BK": max(32, power_of_two(it.k)), "STEPS": choice["steps"]}
        programs = -(-it.n // (bn * int(choice["steps"])))
    e.launch(
        it.node,
        f"linear:{path}",
        (programs, 1, 1),
        a.args,
        a.constants,
        num_warps=int(choice["warps"]),
        num_stages=1,
    )


def _skinny(e: BucketEmitter, it: Linear, x: Value | Typed, choice: Candidate) -> None:
    a = _with_norm(e, it, x)
    a.constants |= {
        "BM": choice["bm"], "BN": choice["bn"], "BK": choice["bk"], "PARTS": choice["warps"], "PRE": choice["pre"],
        "SWAP": choice["swap"],
    }  # fmt: skip
    e.launch(
        it.node, "skinny:skinny", (-(-it.n // int(choice["bn"])), 1, 1), a.args, a.constants,
        num_warps=int(choice["warps"]), num_stages=int(choice["stages"]),
    )  # fmt: skip


def _matmul(e: BucketEmitter, it: Linear, x: Value | Typed, choice: Candidate) -> None:
    a = _with_norm(e, it, x)
    bm, bn, split = int(choice["bm"]), int(choice["bn"]), int(choice["split"])
    columns = -(-it.n // bn)
    if split > 1:
        tiles = -(-e.bound(it.rows) // bm) * columns
        sums = split * tiles * bm * bn * (2 if it.gated else 1)
        a.args["partial"] = e.typed(e.scratch(4 * sums), "f32")
        a.args["counters"] = e.typed(e.counters(tiles), "i32")
    else:
        a.constants |= {"partial": None, "counters": None}
    a.constants |= {
        "BM": bm, "BN": bn, "BK": choice["bk"], "SPLIT": split, "SWAP": choice["swap"], "GROUP": choice["group"],
        "AHEAD": choice["ahead"],
    }  # fmt: skip
    e.launch(
        it.node, "matmul:matmul", (e.extent(it.rows, bm, columns), split, 1), a.args, a.constants,
        num_warps=int(choice["warps"]), num_stages=int(choice["stages"]),
    )  # fmt: skip


def _library(e: BucketEmitter, it: Linear, x: Value | Typed) -> None:
    """A product by the library. What follows a bias reads f32 sums, so that they are rounded once."""
    width = it.width
    after = it.bias is not None or it.more
    result = e.arg(it.out)
    if after:
        dtype = "f32" if it.bias is not None else it.x.dtype
        nbytes = e.bound(it.rows) * width * ITEM_BYTES[dtype]
        result = e.typed(e.scratch(nbytes), dtype)
    given = e.arg(x) if isinstance(x, Value) else x
    e.library(
        it.node, "matmul", [given, e.arg(it.weight), result, e.extent(it.rows)], {"k": it.k, "n": width}
    )
    if after:
        _after_product(e, it, result, it.bias)


def _instances(e: BucketEmitter, it: Linear) -> list[Instance]:
    """CUTLASS instances that may be timed for the product, with its bias or its gate."""
    values = [it.x, it.weight, it.out] + ([] if it.bias is None else [it.bias])
    dtypes, rows = {v.dtype for v in values}, e.bound(it.rows)
    found = instances(e, rows, it.width, it.k, dtypes, it.bias is not None)
    if it.gated and it.bias is None:
        found = [*gated_instances(e, rows, it.n, it.k, dtypes, it.act), *found]
    return found


def _cutlass(e: BucketEmitter, it: Linear, x: Value | Typed, instance: Instance) -> None:
    """A product by CUTLASS, with its gate if the instance has one, or with its bias, rounded once; activation, gate and
    residual read rounded products anyway."""
    after = it.more and not instance.gated
    result = e.arg(it.out)
    if after:
        result = e.typed(e.scratch(e.bound(it.rows) * it.width * ITEM_BYTES[it.x.dtype]), it.x.dtype)
    given = e.arg(x) if isinstance(x, Value) else x
    bias = None if it.bias is None else e.arg(it.bias)
    rows = e.extent(it.rows)
    columns = it.n if instance.gated else it.width
    gemm(e, it.node, instance, given, e.arg(it.weight), bias, result, rows, columns, it.k)
    if after:
        _after_product(e, it, result, None)


def _after_product(e: BucketEmitter, it: Linear, product: Typed, bias: Value | None) -> None:
    """What a library's product, dense rows of ``it.width``, still wants."""
    up = e.typed(product.pointer.at(it.n * ITEM_BYTES[product.dtype]), product.dtype) if it.gated else None
    _after(e, it.node, it.rows, it.n, (product, it.width), (up, it.width), bias, it.residual, it.act)


def _after(
    e: BucketEmitter, node: Node, rows: Dim, n: int, y: tuple[Typed, int], up: tuple[Typed | None, int],
    bias: Value | None, residual: Value | None, act: str,
) -> None:  # fmt: skip
    """What ``templates/after`` does to rows of n columns; y and up with their strides."""
    a = _Arguments(e)
    a.rows("residual", "R_STRIDE", residual, n)
    a.pointer("y", y[0])
    a.pointer("up", up[0])
    a.pointer("bias", bias)
    a.args["out"] = e.arg(node.outputs[0])
    block = min(AFTER_COLUMNS, max(32, power_of_two(n)))
    a.constants |= {"Y_STRIDE": y[1], "UP_STRIDE": up[1], "N": n, "BLOCK": block, "ACT": act, **GPT_OSS}
    e.launch(
        node,
        "after:after",
        (e.extent(rows), -(-n // block), 1),
        a.args,
        a.constants,
        num_warps=max(1, block // 256),
    )


def _norm(e: BucketEmitter, it: Linear) -> Typed:
    """The norm as a launch of its own; gives the normed rows."""
    if it.k > WIDEST_NORM:
        raise UnsupportedByTarget(f"{it.node.op} norms rows of {it.k} columns, more than {WIDEST_NORM}")
    a = _Arguments(e)
    a.rows("x", "X_STRIDE", it.x, it.k)
    a.rows("residual", "RESIDUAL_STRIDE", it.addend, it.k)
    normed = e.typed(e.scratch(e.bound(it.rows) * it.k * ITEM_BYTES[it.x.dtype]), it.x.dtype)
    a.args |= {"normed": normed, "rows": e.extent(it.rows)}
    a.pointer("weight", it.norm_weight)
    a.pointer("total", it.total)
    a.constants |= _norm_constants(it) | {
        "bias": None, "index": None, "COLUMNS": it.k, "CENTRE": False, "ROWS": 1, "BLOCK": power_of_two(it.k),
    }  # fmt: skip
    warps = max(1, min(16, power_of_two(it.k) // 512))
    e.launch(it.node, "norm:norm", (e.extent(it.rows), 1, 1), a.args, a.constants, num_warps=warps)
    return normed


@emitter("gated_act_packed")
def emit_gated_packed(e: BucketEmitter, node: Node) -> None:
    """Rows of gate and up side by side, read in place."""
    x = node.operand(0)
    rows = e.rows(x, len(x.shape) - 1)
    n = rows.columns // 2
    up = e.typed(rows.pointer.at(n * ITEM_BYTES[x.dtype]), x.dtype)
    up = Typed(up.pointer, x.dtype, up.aligned and rows.arg.aligned)
    _after(e, node, rows.count, n, (rows.arg, rows.stride), (up, rows.stride), None, None, node.text("act"))
