"""Plain tensor ops: pointwise, reductions, shapes, indexing."""

from compilerllm.ir.dims import Dim, dim, product
from compilerllm.ir.op import OpCall, Reduction, define, elementwise_flops
from compilerllm.ir.types import DTYPES, QUANTIZED_BLOCKS, TensorType

_RANK = {"bool": 0, "u8": 1, "i8": 2, "i16": 3, "i32": 4, "i64": 5, "bf16": 6, "f16": 6, "f32": 7, "f64": 8}


def broadcast(call: OpCall, *shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """NumPy's rule over symbolic shapes; two different symbolic extents do not match."""
    rank = max(len(s) for s in shapes)
    result: list[Dim] = []
    for axis in range(rank):
        extents = {s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0} - {1}
        call.require(len(extents) <= 1, f"shapes {', '.join(map(str, shapes))} do not broadcast")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def promote(call: OpCall, dtypes: list[str]) -> str:
    """The common dtype; bf16 with f16 is refused, everything else takes the wider."""
    call.require(not {"bf16", "f16"} <= set(dtypes), "bf16 and f16 have no common dtype; cast one")
    call.require(
        not set(dtypes) & set(QUANTIZED_BLOCKS), "block-quantised operands must be dequantised first"
    )
    return max(dtypes, key=lambda d: _RANK[d])


def _unary(call: OpCall) -> tuple[TensorType, ...]:
    return (call["x"],)


def _binary_type(call: OpCall) -> TensorType:
    a, b = call["a"], call.optional("b")
    call.require((b is None) == ("scalar" in call.attrs), "takes either operand 'b' or attribute 'scalar'")
    if b is None:
        call.require(not isinstance(call.attrs["scalar"], str | tuple), "attribute 'scalar' must be a number")
        if isinstance(call.attrs["scalar"], float) and not a.is_float:
            return TensorType("f32", a.shape)
        return a
    # A rank-0 operand does not widen within its kind, as in torch.
    dtypes = [t.dtype for t in (a, b) if t.rank] or [a.dtype, b.dtype]
    if any(t.is_float for t in (a, b)) and not any(d in ("f64", "f32", "bf16", "f16") for d in dtypes):
        dtypes = [a.dtype, b.dtype]
    return TensorType(promote(call, dtypes), broadcast(call, a.shape, b.shape))


def _binary(call: OpCall) -> tuple[TensorType, ...]:
    return (_binary_type(call),)


def _compare(call: OpCall) -> tuple[TensorType, ...]:
    return (_binary_type(call).with_dtype("bool"),)


for _name, _meaning in {
    "neg": "-x", "abs": "|x|", "exp": "e to the x", "log": "natural logarithm", "sqrt": "square root",
    "rsqrt": "1 / sqrt(x)", "reciprocal": "1 / x", "tanh": "hyperbolic tangent", "sigmoid": "1 / (1 + exp(-x))",
    "silu": "x * sigmoid(x)", "relu": "max(x, 0)", "gelu": "x * Phi(x), with erf", "sin": "sine", "cos": "cosine",
    "gelu_tanh": "x * Phi(x), by the tanh formula", "erf": "error function", "floor": "round down",
    "log1p": "log(1 + x)", "square": "x * x", "logical_not": "not x (bool)",
}.items():  # fmt: skip
    define(f"{_name}(x)", f"{_meaning}, elementwise", _unary, flops=elementwise_flops)

for _name, _meaning in {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "pow": "a to the b", "maximum": "larger of a, b",
    "minimum": "smaller of a, b", "remainder": "a modulo b, sign of b", "floor_div": "a / b rounded down",
    "logical_and": "a and b", "logical_or": "a or b",
}.items():  # fmt: skip
    # reverse=true swaps a scalar to the left: 1 - x is sub(%x, scalar=1, reverse=true).
    define(
        f"{_name}(a, b?)", f"{_meaning}, elementwise with broadcasting; b may be the attribute 'scalar'", _binary,
        attrs="scalar?, reverse?", flops=elementwise_flops,
    )  # fmt: skip

for _name, _meaning in {
    "eq": "a == b",
    "ne": "a != b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
}.items():
    define(
        f"{_name}(a, b?)",
        f"{_meaning}, elementwise, as bool",
        _compare,
        attrs="scalar?, reverse?",
        flops=elementwise_flops,
    )


def _where(call: OpCall) -> tuple[TensorType, ...]:
    c, a, b = call["condition"], call["a"], call["b"]
    call.require(c.dtype == "bool", f"condition must be bool, but is {c.dtype}")
    dtypes = [t.dtype for t in (a, b) if t.rank] or [a.dtype, b.dtype]
    return (TensorType(promote(call, dtypes), broadcast(call, c.shape, a.shape, b.shape)),)


def _cast(call: OpCall) -> tuple[TensorType, ...]:
    dtype = call.text("dtype")
    call.require(dtype in DTYPES and dtype not in QUANTIZED_BLOCKS, f"cannot cast to {dtype!r}")
    return (call["x"].with_dtype(dtype),)


define("where(condition, a, b)", "a where condition holds, else b", _where, flops=elementwise_flops)
define("cast(x)", "another dtype, rounding to nearest even", _cast, attrs="dtype", flops=elementwise_flops)


def axis_of(call: OpCall, rank: int, name: str = "axis") -> int:
    """The axis attribute as a number from 0 on. Raises ``TypeMismatch`` outside of ``rank``."""
    axis = call.integer(name)
    call.require(-rank <= axis < rank, f"{name} {axis} is outside rank {rank}")
    return axis % rank


def _reduce(call: OpCall) -> tuple[TensorType, ...]:
    x = call["x"]
    axis = axis_of(call, x.rank)
    keep = bool(call.attrs.get("keepdim", False))
    shape = (*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :])
    return (TensorType("i64" if call.op.name == "argmax" else x.dtype, shape),)


for _name, _meaning in {
    "sum": "sum", "mean": "arithmetic mean", "amax": "largest", "amin": "smallest",
    "argmax": "index of the first largest", "prod": "product",
}.items():  # fmt: skip
    define(
        f"{_name}(x)", f"{_meaning} over one axis", _reduce, attrs="axis, keepdim?",
        flops=lambda n: n.operand(0).tensor.numel, reduction=Reduction.ROW,
    )  # fmt: skip


def _softmax(call: OpCall) -> tuple[TensorType, ...]:
    axis_of(call, call["x"].rank)
    return (call["x"],)


define(
    "softmax(x)", "exp(x - max) over its sum, along one axis, inside in f32", _softmax, attrs="axis",
    flops=lambda n: 5 * n.output.tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip
define(
    "cumsum(x)",
    "running sum along one axis",
    _softmax,
    attrs="axis",
    flops=elementwise_flops,
    reduction=Reduction.ROW,
)


def _reshape(call: OpCall) -> tuple[TensorType, ...]:
    x, shape = call["x"], call.dimensions("shape")
    call.require(product(shape) == x.numel, f"{x} has {x.numel} elements, {shape} has {product(shape)}")
    return (x.with_shape(*shape),)


def _permute(call: OpCall) -> tuple[TensorType, ...]:
    x, order = call["x"], call.integers("order")
    call.require(sorted(order) == list(range(x.rank)), f"order {order} does not permute rank {x.rank}")
    return (x.with_shape(*(x.shape[i] for i in order)),)


def _expand(call: OpCall) -> tuple[TensorType, ...]:
    x, shape = call["x"], call.dimensions("shape")
    call.require(broadcast(call, x.shape, shape) == shape, f"{x} does not expand to {shape}")
    return (x.with_shape(*shape),)


def _slice(call: OpCall) -> tuple[TensorType, ...]:
    x = call["x"]
    axis = axis_of(call, x.rank)
    start, stop, step = call.dimension("start"), call.dimension("stop"), call.integer("step", 1)
    call.require(step >= 1, f"step {step} must be at least 1")
    extent = x.shape[axis]
    length = dim(stop - start)
    if isinstance(start, int) and isinstance(stop, int):
        call.require(0 <= start <= stop, f"[{start}, {stop}) is not a range")
        call.require(
            not isinstance(extent, int) or stop <= extent, f"[{start}, {stop}) is outside extent {extent}"
        )
        length = (length + step - 1) // step
    else:
        call.require(step == 1, "a symbolic range takes step 1 only")
    return (x.with_shape(*x.shape[:axis], length, *x.shape[axis + 1 :]),)


def _concat(call: OpCall) -> tuple[TensorType, ...]:
    parts = call.variadic
    call.require(bool(parts), "takes at least one operand")
    axis = axis_of(call, parts[0].rank)
    for part in parts[1:]:
        same = part.rank == parts[0].rank and part.dtype == parts[0].dtype
        call.require(
            same
            and all(
                a == b for i, (a, b) in enumerate(zip(part.shape, parts[0].shape, strict=True)) if i != axis
            ),
            f"{part} does not join {parts[0]} along axis {axis}",
        )
    total: Dim = 0
    for part in parts:
        total = total + part.shape[axis]
    return (parts[0].with_shape(*parts[0].shape[:axis], total, *parts[0].shape[axis + 1 :]),)


define("reshape(x)", "same elements in row-major order, another shape", _reshape, attrs="shape")
define("permute(x)", "axes in another order", _permute, attrs="order")
define("expand(x)", "repeat axes of extent 1", _expand, attrs="shape")
define(
    "slice(x)",
    "elements start, start + step, ... below stop of one axis",
    _slice,
    attrs="axis, start, stop, step?",
)
define("concat(*parts)", "join along one axis", _concat, attrs="axis")


def _full(call: OpCall) -> tuple[TensorType, ...]:
    return (TensorType(call.text("dtype"), call.dimensions("shape")),)


def _iota(call: OpCall) -> tuple[TensorType, ...]:
    return (TensorType(call.text("dtype", "i64"), (call.dimension("size"),)),)


def _gather_rows(call: OpCall) -> tuple[TensorType, ...]:
    x, rows = call["x"], call["rows"]
    call.require(
        rows.dtype in ("i32", "i64") and rows.rank == 1, f"rows must be whole numbers [R], but are {rows}"
    )
    return (x.with_shape(*rows.shape, *x.shape[1:]),)


define("full()", "one value everywhere", _full, attrs="shape, value, dtype")
define("iota()", "0, 1, 2, ... size - 1", _iota, attrs="size, dtype?")
define("gather_rows(x, rows)", "rows of x along the first axis", _gather_rows)


def _matmul(call: OpCall) -> tuple[TensorType, ...]:
    a, b = call["a"], call["b"]
    call.require(a.rank >= 2 and b.rank >= 2, f"takes matrices, but got {a} and {b}")
    call.same(a.shape[-1], b.shape[-2], "inner extents")
    call.require(a.dtype == b.dtype, f"dtypes differ: {a.dtype} and {b.dtype}")
    return (TensorType(a.dtype, (*broadcast(call, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


define(
    "matmul(a, b)", "batched matrix product, f32 accumulation", _matmul,
    flops=lambda n: 2 * n.output.tensor.numel * n.operand(0).shape[-1],
    reduction=Reduction.CONTRACTION,
)  # fmt: skip

define(
    "aten(*inputs)", "a torch operator kept as it is: 'target' is its name, 'args' a template of its arguments", None,
    attrs="target, args, kwargs?",
)  # fmt: skip
define("call(*inputs)", "run a function of the module with parameters and states under a prefix", None,
       attrs="fn, params?, states?", effects=True)  # fmt: skip
define(
    "group(*inputs)",
    "a group of pointwise and row-reduction ops, or of opaque ones: the function 'fn', run as one kernel or host call",
    None,
    attrs="fn",
)
