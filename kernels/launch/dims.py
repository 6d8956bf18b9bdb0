"""Dimensions as text, evaluated without sympy: what an artifact says of shapes, once T, S and R are numbers."""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache

from compilerllm.kernels.errors import ArtifactError

Evaluator = Callable[[Mapping[str, int]], int]


@lru_cache(maxsize=4096)
def evaluator(text: str) -> Evaluator:
    """A function from dimension values to the extent that ``text`` means. Raises ``ArtifactError`` for other text."""
    try:
        return _convert(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ArtifactError(f"not a dimension in the artifact: {text!r}; rebuild it") from error


def evaluate(text: str, dims: Mapping[str, int]) -> int:
    """The extent that ``text`` means."""
    return evaluator(text)(dims)


def _convert(node: ast.expr) -> Evaluator:
    match node:
        case ast.Constant(value=int(number)):
            return lambda dims: number
        case ast.Name(id=name):
            return lambda dims: dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _convert(operand)
            return lambda dims: -inner(dims)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _convert(left), _convert(right)
            match op:
                case ast.Add():
                    return lambda dims: a(dims) + b(dims)
                case ast.Sub():
                    return lambda dims: a(dims) - b(dims)
                case ast.Mult():
                    return lambda dims: a(dims) * b(dims)
                case ast.Pow():
                    return lambda dims: int(a(dims) ** b(dims))
        case ast.Call(func=ast.Name(id="FloorDiv"), args=[first, second]):
            above, below = _convert(first), _convert(second)
            return lambda dims: above(dims) // below(dims)
    raise ValueError("unknown form")
