"""One pointwise node as Triton text: values are f32 (or f64, or whole numbers), rounded to each node's dtype."""

import math
from collections.abc import Sequence

from compilerllm.ir.graph import Node
from compilerllm.ir.op import lookup
from compilerllm.kernels.errors import UnsupportedByTarget

# What a value of an IR dtype is in registers.
REGISTERS: dict[str, str] = {
    "f32": "tl.float32", "bf16": "tl.float32", "f16": "tl.float32", "f64": "tl.float64", "i64": "tl.int64", "i32": "tl.int32",
    "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1",
}  # fmt: skip
STORED: dict[str, str] = REGISTERS | {"bf16": "tl.bfloat16", "f16": "tl.float16"}
FLOATS = frozenset(("f32", "bf16", "f16", "f64"))
# Names without a dot are functions of templates/elementwise.py.
_UNARY = {
    "neg": "-{0}", "abs": "tl.abs({0})", "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})", "reciprocal": "1.0 / {0}", "tanh": "tanh({0})", "sigmoid": "sigmoid({0})", "silu": "silu({0})",
    "relu": "relu({0})", "gelu": "gelu({0})", "gelu_tanh": "gelu_tanh({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "erf": "tl.math.erf({0})", "floor": "tl.floor({0})", "log1p": "log1p({0})", "square": "{0} * {0}",
    "logical_not": "{0} == 0", "cast": "{0}",
}  # fmt: skip
_BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "pow": "power({0}, {1})",
    "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})", "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_WHOLE = {
    "relu": "tl.where({0} < 0, 0, {0})", "remainder": "whole_modulo({0}, {1})", "floor_div": "whole_divide({0}, {1})",
}  # fmt: skip
_FLOAT = {"remainder": "float_modulo({0}, {1})", "floor_div": "tl.floor({0} / {1})"}
_F32 = {"sqrt": "tl.sqrt_rn({0})", "div": "tl.div_rn({0}, {1})", "floor_div": "tl.floor(tl.div_rn({0}, {1}))"}
_SMALL_POWERS = {
    2: "{0} * {0}",
    3: "{0} * {0} * {0}",
    1: "{0}",
    0.5: "tl.sqrt({0})",
    -0.5: "tl.rsqrt({0})",
    -1: "1.0 / {0}",
}
_CLAMPED_SLOPE, _CLAMPED_LIMIT = 1.702, 7.0  # of the activation gpt_oss
POINTWISE_OPS = (
    frozenset(_UNARY)
    | frozenset(_BINARY)
    | frozenset(_COMPARISONS)
    | frozenset(_FLOAT)
    | {"where", "full", "softcap", "gated_act"}
)


def rounded(expression: str, dtype: str) -> str:
    """The expression as a value of ``dtype``, in registers."""
    if dtype == "bool":
        return f"({expression}) != 0"
    if STORED[dtype] != REGISTERS[dtype]:
        return f"({expression}).to({STORED[dtype]}).to({REGISTERS[dtype]})"
    return f"({expression}).to({REGISTERS[dtype]})"


def number(value: float | int | bool, dtype: str) -> str:
    """A constant beside values of ``dtype``."""
    if dtype not in FLOATS:
        return str(int(value))
    value = float(value)
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    return repr(value)


def full(value: float | int | bool, dtype: str, rank: int) -> str:
    """A constant that counts as a tensor of ``rank`` axes."""
    return f"tl.full({[1] * rank}, {number(value, dtype)}, {STORED[dtype]}).to({REGISTERS[dtype]})"


def expression(node: Node, args: Sequence[str], rank: int) -> str:
    """``node`` of operands called ``args``. Raises ``UnsupportedByTarget`` for an op that is not pointwise."""
    dtype = node.output.dtype
    match node.op:
        case "full":
            return full(node.number("value"), dtype, rank)
        case "where":
            picked = [_as(a, v.dtype, dtype) for a, v in zip(args[1:], node.operands[1:], strict=True)]
            return rounded(f"tl.where({args[0]}, {', '.join(picked)})", dtype)
        case "softcap":
            cap = number(node.number("cap"), dtype)
            inner = rounded(f"tanh({rounded(f'{args[0]} / {cap}', dtype)})", dtype)
            return rounded(f"{inner} * {cap}", dtype)
        case "gated_act":
            return _gated(node.text("act"), args[0], args[1], dtype)
        case "cast" if dtype == "bool":
            return f"{args[0]} != 0"
    if node.op in _UNARY:
        return rounded(_form(node.op, dtype).format(*args), dtype)
    if node.op in _BINARY or node.op in _COMPARISONS or node.op in _FLOAT:
        return _binary(node, args)
    raise UnsupportedByTarget(f"{node!r} has no generated CUDA kernel")


def activation(name: str, x: str, dtype: str) -> str:
    """An activation by name, rounded as the ops it is made of are."""
    if name == "identity":
        return x
    if name == "relu2":
        return rounded(f"{rounded(f'relu({x})', dtype)} * relu({x})", dtype)
    if name not in _UNARY:
        raise UnsupportedByTarget(f"activation {name!r} has no generated CUDA kernel")
    return rounded(_UNARY[name].format(x), dtype)


def _gated(act: str, gate: str, up: str, dtype: str) -> str:
    if act != "gpt_oss":
        return rounded(f"{activation(act, gate, dtype)} * {up}", dtype)
    gate = f"smaller({gate}, {_CLAMPED_LIMIT})"
    up = f"larger(smaller({up}, {_CLAMPED_LIMIT}), {-_CLAMPED_LIMIT})"
    slope = rounded(f"sigmoid({rounded(f'{gate} * {_CLAMPED_SLOPE}', dtype)})", dtype)
    return rounded(f"({rounded(f'{up} + 1.0', dtype)}) * ({rounded(f'{gate} * ({slope})', dtype)})", dtype)


def _form(op: str, dtype: str) -> str:
    """How an op is written for results of ``dtype``."""
    if dtype not in FLOATS:
        return _WHOLE.get(op) or _UNARY.get(op) or _BINARY[op]
    if dtype != "f64" and op in _F32:
        return _F32[op]
    return _FLOAT.get(op) or _UNARY.get(op) or _BINARY[op]


def _binary(node: Node, args: Sequence[str]) -> str:
    dtype = node.output.dtype
    if node.op in _COMPARISONS:
        inferred = lookup("add").infer(node.inputs, node.attrs)  # the type both sides are compared in
        assert inferred is not None
        inner = inferred[0].dtype
    else:
        inner = dtype
    both = [_as(a, v.dtype, inner) for a, v in zip(args, node.operands, strict=True)]
    if "scalar" in node.attrs:
        scalar = node.number("scalar")
        if node.op == "pow" and not node.attrs.get("reverse") and scalar in _SMALL_POWERS and dtype in FLOATS:
            return rounded(_SMALL_POWERS[scalar].format(*both), dtype)
        both.append(number(scalar, inner))
        if node.attrs.get("reverse"):
            both.reverse()
    if node.op in _COMPARISONS:
        return f"{both[0]} {_COMPARISONS[node.op]} {both[1]}"
    return rounded(_form(node.op, dtype).format(*both), dtype)


def _as(x: str, have: str, want: str) -> str:
    """A value of one dtype as an operand of another; a narrower result is computed from wider values unrounded."""
    return x if REGISTERS[have] == REGISTERS[want] else f"{x}.to({REGISTERS[want]})"
