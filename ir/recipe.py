"""How a parameter comes about: a small tree of steps that one streaming loader executes.

Sharding, quantizing and packing are edits of recipes, in that order; nothing else touches weights. Standard library
only, since serving reads recipes from an artifact. Text: ``concat(read("q.weight"), read("k.weight"), axis=0)``.
"""

import ast
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from compilerllm.ir.errors import RecipeError


@dataclass(frozen=True)
class Read:
    """A tensor of the checkpoint, by its name in the model's own state dict."""

    name: str


@dataclass(frozen=True)
class Literal:
    """Numbers that no checkpoint stores, such as rotary frequencies. ``dtype`` is an IR dtype, values row-major."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Convert:
    """Change the dtype, rounding to nearest even."""

    source: "Recipe"
    dtype: str


@dataclass(frozen=True)
class Shift:
    """Add a number to every element, in f32 (a GGUF file stores Gemma's norm weights with 1 added)."""

    source: "Recipe"
    amount: float


@dataclass(frozen=True)
class Slice:
    """Rows [start, stop) of one axis."""

    source: "Recipe"
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Concat:
    """Join along one axis."""

    sources: tuple["Recipe", ...]
    axis: int


@dataclass(frozen=True)
class Permute:
    """Reorder the axes."""

    source: "Recipe"
    order: tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    """Same elements, another shape."""

    source: "Recipe"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Relayout:
    """Store in a kernel's packed layout (``n16k2``, ``n16``, ``q4_1_n16``, ``n16k2_gu16`` ...); always outermost."""

    source: "Recipe"
    layout: str


Recipe = Read | Literal | Convert | Shift | Slice | Concat | Permute | Reshape | Relayout


def sources(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes one step takes in."""
    match recipe:
        case Read() | Literal():
            return ()
        case Concat(sources=parts):
            return parts
        case _:
            return (recipe.source,)


def reads(recipe: Recipe) -> Iterator[str]:
    """Names of the checkpoint's tensors, in reading order."""
    if isinstance(recipe, Read):
        yield recipe.name
    for part in sources(recipe):
        yield from reads(part)


def rename(recipe: Recipe, name: Callable[[str], str]) -> Recipe:
    """The same recipe with every tensor's name changed, as a call does when it binds a layer's prefix."""
    match recipe:
        case Read(name=old):
            return Read(name(old))
        case Literal():
            return recipe
        case Convert(source=s, dtype=dtype):
            return Convert(rename(s, name), dtype)
        case Shift(source=s, amount=amount):
            return Shift(rename(s, name), amount)
        case Slice(source=s, axis=axis, start=start, stop=stop):
            return Slice(rename(s, name), axis, start, stop)
        case Concat(sources=parts, axis=axis):
            return Concat(tuple(rename(p, name) for p in parts), axis)
        case Permute(source=s, order=order):
            return Permute(rename(s, name), order)
        case Reshape(source=s, shape=shape):
            return Reshape(rename(s, name), shape)
        case Relayout(source=s, layout=layout):
            return Relayout(rename(s, name), layout)


def print_recipe(recipe: Recipe) -> str:
    """Text that ``parse_recipe`` reads back to an equal recipe."""
    match recipe:
        case Read(name=name):
            return f"read({_quoted(name)})"
        case Literal(dtype=dtype, shape=shape, values=values):
            return f"literal({_quoted(dtype)}, {list(shape)}, [{', '.join(map(_number, values))}])"
        case Convert(source=s, dtype=dtype):
            return f"convert({print_recipe(s)}, {_quoted(dtype)})"
        case Shift(source=s, amount=amount):
            return f"shift({print_recipe(s)}, {_number(amount)})"
        case Slice(source=s, axis=axis, start=start, stop=stop):
            return f"slice({print_recipe(s)}, axis={axis}, start={start}, stop={stop})"
        case Concat(sources=parts, axis=axis):
            return f"concat({', '.join(print_recipe(p) for p in parts)}, axis={axis})"
        case Permute(source=s, order=order):
            return f"permute({print_recipe(s)}, {list(order)})"
        case Reshape(source=s, shape=shape):
            return f"reshape({print_recipe(s)}, {list(shape)})"
        case Relayout(source=s, layout=layout):
            return f"relayout({print_recipe(s)}, {_quoted(layout)})"


def _quoted(text: str) -> str:
    """A string that JSON and Python read alike (JSON's pairs of escapes for rare characters are two in Python)."""
    return json.dumps(text, ensure_ascii=False)


def _number(value: float) -> str:
    """A float that Python reads as a literal; what is not finite is quoted."""
    return repr(float(value)) if math.isfinite(value) else f'"{value}"'


def parse_recipe(text: str) -> Recipe:
    """Read what ``print_recipe`` wrote. Raises ``RecipeError`` for anything else; no code is evaluated."""
    try:
        return _convert(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise RecipeError(f"not a recipe: {text!r} ({error})") from error


_ARITY = {
    "read": 1, "literal": 3, "convert": 2, "shift": 2, "slice": 1, "permute": 2, "reshape": 2, "relayout": 2,
}  # fmt: skip


def _convert(node: ast.expr) -> Recipe:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("a recipe is a call such as read(...) or concat(...)")
    keys = {k.arg: ast.literal_eval(k.value) for k in node.keywords}

    def value(index: int) -> Any:
        return ast.literal_eval(node.args[index])

    def whole(key: str) -> int:
        if not isinstance(keys.get(key), int):
            raise ValueError(f"{key} must be a whole number")
        return int(keys[key])

    def ints(index: int) -> tuple[int, ...]:
        return tuple(int(v) for v in value(index))

    arity = _ARITY.get(node.func.id)
    if arity is not None and len(node.args) != arity:
        raise ValueError(f"{node.func.id} takes {arity} arguments, not {len(node.args)}")
    match node.func.id:
        case "read":
            return Read(str(value(0)))
        case "literal":
            return Literal(str(value(0)), ints(1), tuple(float(v) for v in value(2)))
        case "convert":
            return Convert(_convert(node.args[0]), str(value(1)))
        case "shift":
            return Shift(_convert(node.args[0]), float(value(1)))
        case "slice":
            return Slice(_convert(node.args[0]), whole("axis"), whole("start"), whole("stop"))
        case "concat":
            if not node.args:
                raise ValueError("concat takes at least one recipe")
            return Concat(tuple(_convert(a) for a in node.args), whole("axis"))
        case "permute":
            return Permute(_convert(node.args[0]), ints(1))
        case "reshape":
            return Reshape(_convert(node.args[0]), ints(1))
        case "relayout":
            return Relayout(_convert(node.args[0]), str(value(1)))
    raise ValueError(f"unknown step {node.func.id!r}")
