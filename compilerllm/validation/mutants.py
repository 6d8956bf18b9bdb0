"""Mutants of passes and kernel templates: small wrong edits of a source file, made by operators, never written to it.

An operator knows syntax and nothing of what the file is for. Left out are edits that can mean nothing to what is computed:
names and origins of nodes, what a report says, and how a kernel asks for memory early.
"""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Edit:
    """Characters [start, stop) of a file replaced by ``text``."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """One edit of one file. path: from the checkout's root. where: the function it is in. before, after: what it changes."""

    path: str
    line: int
    operator: str
    where: str
    before: str
    after: str
    edit: Edit

    def source(self) -> str:
        """The file's text with the edit."""
        text = text_of(self.path)
        return text[: self.edit.start] + self.edit.text + text[self.edit.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}: `{self.before}` -> `{self.after}`"


@cache
def text_of(path: str) -> str:
    """A file's text, as it was when first asked for."""
    return (ROOT / path).read_text()


Found = tuple[ast.AST, str, str]  # what is replaced, the operator, the new text
_NAMES = frozenset(("name", "origin", "by", "merge", "touched", "strict"))
_DTYPES = {"f32": "bf16", "bf16": "f32", "i32": "i64", "i64": "i32"}
_FLIP: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_RECIPES = frozenset(("Convert", "Slice", "Permute", "Reshape", "Shift", "Relayout"))


class _Source:
    """A Python file: its tree, and characters of nodes."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = not text.isascii()

    def span(self, node: ast.AST) -> tuple[int, int]:
        a, b = self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return a, b

    def _at(self, line: int, column: int) -> int:
        start = self._lines[line - 1]
        if self._bytes:
            column = len(self.text[start : self._lines[line]].encode()[:column].decode())
        return start + column

    def of(self, node: ast.AST) -> str:
        a, b = self.span(node)
        return self.text[a:b]


def _called(node: ast.Call) -> str:
    """``r.emit`` gives "emit"."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _swapped(s: _Source, node: ast.AST, first: ast.AST, second: ast.AST) -> str:
    """The node's text with two of its parts, the first before the second, in each other's place."""
    (a, b), (c, d), (e, _) = s.span(first), s.span(second), s.span(node)
    text = s.of(node)
    return text[: a - e] + s.of(second) + text[b - e : c - e] + s.of(first) + text[d - e :]


def _without(s: _Source, node: ast.AST, part: ast.AST, before: ast.AST | None, after: ast.AST | None) -> str:
    """The node's text without one of its parts, and without the comma that parted it from a neighbour."""
    e, _ = s.span(node)
    a, b = s.span(part)
    if before is not None:
        a = s.span(before)[1]
    elif after is not None:
        b = s.span(after)[0]
    text = s.of(node)
    return text[: a - e] + text[b - e :]


# -- operators over passes ---------------------------------------------------------------------------------------------


def pass_edits(s: _Source, node: ast.AST) -> Iterator[Found]:
    """Wrong edits of a rewrite at one node of its syntax."""
    match node:
        case ast.Call(func=_, args=args, keywords=keywords):
            name = _called(node)
            parts: list[ast.AST] = sorted([*args, *keywords], key=lambda n: s.span(n))
            for at, part in enumerate(parts):
                if (
                    isinstance(part, ast.keyword)
                    and part.arg not in _NAMES
                    and name not in ("P", "PassReport", "min", "sorted")
                ):
                    before, after = (
                        (parts[at - 1] if at else None),
                        (parts[at + 1] if at + 1 < len(parts) else None),
                    )
                    yield node, "drop an attribute", _without(s, node, part, before, after)
            for first, second in pairwise(args):
                if not any(
                    isinstance(x, ast.Starred | ast.Constant | ast.JoinedStr) for x in (first, second)
                ) and name not in ("isinstance", "miss", "getattr", "zip"):
                    yield node, "swap operands", _swapped(s, node, first, second)
            if name == "emit" and len(args) > 2:
                yield node, "drop an operand", _without(s, node, args[-1], args[-2], None)
            if name in _RECIPES and args:
                yield node, "drop a recipe step", s.of(args[0])
        case ast.Dict(keys=keys, values=values) if len(keys) and not any(k is None for k in keys):
            yield (
                node,
                "drop an attribute",
                "{"
                + ", ".join(
                    f"{s.of(k)}: {s.of(v)}" for k, v in list(zip(keys, values, strict=True))[:-1] if k
                )
                + "}",
            )
        case ast.Tuple(elts=items) | ast.List(elts=items) if len(items) > 1 and isinstance(
            node.ctx, ast.Load
        ):
            for first, second in pairwise(items):
                if s.of(first) != s.of(second) and not any(
                    isinstance(x, ast.Starred) for x in (first, second)
                ):
                    yield node, "swap the order", _swapped(s, node, first, second)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _FLIP:
            negates = isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot)
            new = f"{s.of(left)} {_FLIP[type(op)]} {s.of(right)}"
            yield node, "negate a condition" if negates else "shift a bound", new
        case ast.BoolOp(values=values):
            word = " and " if isinstance(node.op, ast.And) else " or "
            for at in range(len(values)):
                kept = word.join(s.of(v) for i, v in enumerate(values) if i != at)
                yield node, "drop a condition", f"({kept})"
        case ast.If(test=test, body=[ast.Return() | ast.Continue()]):
            if not isinstance(test, ast.NamedExpr) and ":=" not in s.of(test):
                yield test, "delete a guard", "False"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, "negate a condition", f"({s.of(orelse)} if {s.of(test)} else {s.of(body)})"
        case ast.Constant(value=bool(value)):
            yield node, "negate a constant", str(not value)
        case ast.Constant(value=int(value)):
            yield node, "shift a bound", str(value + 1)
        case ast.Constant(value=str(value)) if value in _DTYPES:
            yield node, "change a dtype", repr(_DTYPES[value])
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() | ast.BitOr(), right=right):
            yield node, "drop a term", s.of(left)
            yield node, "drop a term", s.of(right)
        case ast.BinOp(left=left, op=ast.Sub() | ast.FloorDiv() | ast.Mod(), right=right):
            yield node, "swap operands", f"({s.of(right)} {_symbol(node.op)} {s.of(left)})"
        case ast.AugAssign():
            yield node, "delete a statement", "pass"
        case ast.Expr(value=ast.Call() as call) if _called(call) in ("set", "append", "update"):
            yield node, "delete a statement", "pass"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "negate a condition", s.of(operand)


def _symbol(op: ast.operator) -> str:
    return {ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/"}[type(op)]


# -- operators over Triton templates -----------------------------------------------------------------------------------

_LAUNCH = frozenset(
    ("cache_modifier", "eviction_policy", "num_stages", "sem", "scope", "input_precision", "volatile")
)
_NOTHING = frozenset(
    ("multiple_of", "max_contiguous", "debug_barrier", "static_assert", "warm", "gdc_wait", "gdc_launch_dependents", "range",
     "static_range", "constexpr", "num_programs", "inline_asm_elementwise")
)  # fmt: skip


def triton_edits(s: _Source, node: ast.AST) -> Iterator[Found]:
    """Wrong edits of a kernel at one node of its syntax."""
    match node:
        case ast.Call(args=args, keywords=keywords):
            name = _called(node)
            if name in ("load", "store"):
                parts: list[ast.AST] = sorted([*args, *keywords], key=lambda n: s.span(n))
                kept = [p for p in parts if not (isinstance(p, ast.keyword) and p.arg in ("mask", "other"))]
                if len(kept) < len(parts):
                    yield node, "skip a mask", f"{s.of(node.func)}({', '.join(map(s.of, kept))})"
            if name == "where" and len(args) == 3:
                yield node, "swap operands", _swapped(s, node, args[1], args[2])
                yield node, "skip a mask", s.of(args[1])
            if name in ("minimum", "maximum") and len(args) == 2:
                yield (
                    node,
                    "swap a bound",
                    s.of(node).replace(name, "maximum" if name == "minimum" else "minimum", 1),
                )
                yield node, "drop a bound", s.of(args[0])
                yield node, "drop a bound", s.of(args[1])
            if name in ("max", "sum", "exp2", "rsqrt") and args:
                other = {"max": "min", "sum": "max", "exp2": "exp", "rsqrt": "sqrt"}[name]
                if isinstance(node.func, ast.Attribute):
                    yield node, "change a function", s.of(node).replace(f".{name}", f".{other}", 1)
            if name == "dot" and len(args) == 3:
                yield node, "drop the accumulator", f"tl.dot({s.of(args[0])}, {s.of(args[1])})"
            # Offsets are widened for what lies beyond 2 GiB, which no case has.
            if (
                name == "to"
                and isinstance(node.func, ast.Attribute)
                and not s.of(node).endswith(".to(tl.int64)")
            ):
                yield node, "drop a conversion", s.of(node.func.value)
            if name in ("rounded", "round_to") and args:
                yield node, "drop a rounding", s.of(args[0])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _FLIP:
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield node, "shift a bound", f"({s.of(left)} {_FLIP[type(op)]} {s.of(right)})"
            elif not isinstance(op, ast.Is | ast.IsNot):
                yield node, "negate a condition", f"({s.of(left)} {_FLIP[type(op)]} {s.of(right)})"
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            yield node, "drop a condition", f"({s.of(left)})"
            yield node, "drop a condition", f"({s.of(right)})"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield node, "drop a term", f"({s.of(left)})"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            yield node, "drop a factor", f"({s.of(left)})"
            yield node, "drop a factor", f"({s.of(right)})"
        case ast.BinOp(left=left, op=ast.Sub() | ast.FloorDiv() | ast.Mod() | ast.Div(), right=right):
            yield node, "swap operands", f"({s.of(right)} {_symbol(node.op)} {s.of(left)})"
            yield node, "drop a term", f"({s.of(left)})"
        case ast.BoolOp(values=values) if len(values) == 2:
            yield node, "drop a condition", f"({s.of(values[0])})"
        case ast.If(test=test):
            if "PDL" not in s.of(test):
                yield test, "negate a condition", f"(not ({s.of(test)}))"
        case ast.Constant(value=int(value)) if not isinstance(node.value, bool):
            yield node, "shift a bound", str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, "change a constant", repr(value * 1.5 + 0.25)
        case ast.AugAssign():
            yield node, "delete a statement", "pass"
        case ast.Expr(value=ast.Call() as call) if _called(call) == "store":
            yield node, "delete a statement", "pass"


# -- whole files -------------------------------------------------------------------------------------------------------


def _skipped(s: _Source, triton: bool) -> set[ast.AST]:
    """Nodes that no edit touches: docstrings, decorators, annotations, defaults, messages, names of nodes, memory hints."""
    skipped: set[ast.AST] = set()

    def skip(node: ast.AST | None) -> None:
        if node is not None:
            skipped.update(ast.walk(node))

    for node in ast.walk(s.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skip(first)
        if isinstance(node, ast.FunctionDef):
            skip(node.args)
            skip(node.returns)
            for decorator in node.decorator_list:
                skip(decorator)
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                skip(decorator)
        if isinstance(node, ast.AnnAssign | ast.arg):
            skip(node.annotation)
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            skip(node)
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in ("miss", "touched", "refuse", "cast", "merge") or (triton and name in _NOTHING):
                skip(node)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            skipped.update(node.comparators)  # the order of what something is looked for in
        if isinstance(node, ast.AugAssign) and "report." in s.of(node.target):
            skip(node)
        if isinstance(node, ast.keyword) and (node.arg in _NAMES or node.arg in _LAUNCH):
            skip(node)
        if triton and isinstance(node, ast.If) and "PDL" in s.of(node.test):
            skip(node)
        if triton and isinstance(node, ast.Subscript):
            skip(node.slice)  # shapes: [:, None] and the like
    return skipped


Operators = Callable[[_Source, ast.AST], Iterator[Found]]


def python_mutants(path: str, edits: Operators, triton: bool = False) -> list[Mutant]:
    """Every mutant of a Python file that its operators make and that still parses."""
    text = text_of(path)
    s = _Source(text)
    skipped = _skipped(s, triton)
    owners: dict[ast.AST, str] = {}
    for function in ast.walk(s.tree):
        if isinstance(function, ast.FunctionDef):
            for inner in ast.walk(function):
                owners[inner] = function.name
    made: list[Mutant] = []
    for node in ast.walk(s.tree):
        if node in skipped or (
            node not in owners and not isinstance(node, ast.Constant | ast.Tuple | ast.Call)
        ):
            continue
        for target, operator, new in edits(s, node):
            a, b = s.span(target)
            old = text[a:b]
            if new == old:
                continue
            try:
                ast.parse(text[:a] + new + text[b:])
            except SyntaxError:
                continue
            line, where = text.count("\n", 0, a) + 1, owners.get(node, "")
            made.append(Mutant(path, line, operator, where, shortened(old), shortened(new), Edit(a, b, new)))
    return list({m.edit: m for m in made}.values())


def shortened(text: str) -> str:
    """On one line, its middle left out where it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 90 else f"{flat[:43]} ... {flat[-43:]}"


def sample(mutants: Sequence[Mutant], count: int, seed: int = 0) -> list[Mutant]:
    """``count`` of one file's mutants: operators take turns, a line's second mutant waits for all other lines' first."""
    draw = random.Random(f"{seed} {mutants[0].path}" if mutants else seed)
    shuffled = sorted(mutants, key=lambda m: (m.edit.start, m.edit.stop, m.edit.text))
    draw.shuffle(shuffled)
    by_operator: dict[str, list[Mutant]] = {}
    for m in shuffled:
        by_operator.setdefault(m.operator, []).append(m)
    queues = list(by_operator.values())
    draw.shuffle(queues)
    taken: list[Mutant] = []
    lines: dict[int, int] = {}
    while len(taken) < count and any(queues):
        for queue in queues:
            if queue and len(taken) < count:
                best = min(queue, key=lambda m: lines.get(m.line, 0))
                queue.remove(best)
                lines[best.line] = lines.get(best.line, 0) + 1
                taken.append(best)
    return sorted(taken, key=lambda m: (m.line, m.edit.start))
