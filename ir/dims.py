"""Symbolic dimensions: whole numbers, or sympy expressions over declared names such as ``T`` and ``S``.

Division is our own opaque ``FloorDiv``: sympy would turn ``(S + 15) // 16`` into something that does not read back.
Text becomes an expression through ``ast``, never through ``sympify`` (which evaluates code).
"""

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import sympy

Dim: TypeAlias = int | sympy.Expr


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """``FloorDiv(a, b)``: a over b rounded down. It evaluates only when both are numbers, or b is 1."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        return a if b == 1 else None


_SYMBOLS: dict[str, sympy.Symbol] = {}


def symbol(name: str) -> sympy.Symbol:
    """The dimension called ``name``: a whole number, zero or more."""
    if name not in _SYMBOLS:
        _SYMBOLS[name] = sympy.Symbol(name, integer=True, nonnegative=True)
    return _SYMBOLS[name]


def dim(value: "Dim | str") -> Dim:
    """Normalise: plain ``int`` where the value is a number, otherwise a sympy expression."""
    if isinstance(value, str):
        return parse_dim(value)
    if isinstance(value, int):
        return int(value)
    return int(value) if value.is_Integer else _expanded(value)


@lru_cache(maxsize=4096)
def _expanded(value: sympy.Expr) -> sympy.Expr:
    """Multiplied out, so that equal sizes are equal expressions and text reads back to the same one."""
    return value if value.is_Symbol else sympy.expand(value)


def free_dims(value: Dim) -> frozenset[str]:
    """The names an expression depends on."""
    return frozenset() if isinstance(value, int) else frozenset(s.name for s in value.free_symbols)


def substitute(value: Dim, binding: Mapping[str, Dim]) -> Dim:
    """Replace names by numbers or expressions; names not in ``binding`` stay."""
    if isinstance(value, int):
        return value
    return dim(value.xreplace({symbol(k): sympy.sympify(v) for k, v in binding.items()}))


def product(values: "tuple[Dim, ...] | list[Dim]") -> Dim:
    """The number of elements of a shape."""
    result: Dim = 1
    for value in values:
        result = result * value
    return dim(result)


@lru_cache(maxsize=4096)
def print_dim(value: Dim) -> str:
    """Text that ``parse_dim`` reads back to an equal expression."""
    return str(value)


def parse_dim(text: str) -> Dim:
    """Read ``T``, ``9*T``, ``FloorDiv(T + 15, 16)`` and the like. Raises ``ValueError`` for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a dimension: {text!r}") from error
    return dim(_convert(tree, text))


def _convert(node: ast.expr, text: str) -> Dim:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return dim(-_convert(operand, text))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _convert(left, text), _convert(right, text)
            match op:
                case ast.Add():
                    return dim(a + b)
                case ast.Sub():
                    return dim(a - b)
                case ast.Mult():
                    return dim(a * b)
                case ast.Pow() if isinstance(b, int):
                    return dim(a**b)
        case ast.Call(func=ast.Name(id="FloorDiv"), args=[first, second], keywords=[]):
            return dim(FloorDiv(sympy.sympify(_convert(first, text)), sympy.sympify(_convert(second, text))))
    raise ValueError(f"not a dimension: {text!r} (names, whole numbers, + - * and FloorDiv are)")
