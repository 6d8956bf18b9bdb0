"""The text form: ``print_module`` and ``parse_module`` are inverse, and every error shows line, column and a caret.

Grammar::

    module   = ["module" "(" attrs ")"] function*
    function = "func" "@"name "(" [%name ":" type, ...] ")" "{" decl* node* "return" [%name, ...] "}"
    decl     = "dim" NAME "in" "[" low "," high "]"
             | "param" %name ":" type ["=" recipe]        (without a recipe it is read under its own name)
             | "state" %name ":" type
    node     = [%name, ... "="] op "(" operands, key "=" attr, ... ")" [":" type, ...] ["#!" path "|" ops "|" passes]
    operand  = %name | "none"                             (none: an optional operand left out)
    attr     = true | false | number | "text" | dimension | "@"name | "[" attr, ... "]"
    type     = dtype "[" dimension, ... "]" | kind "<" dtype, key "=" number, ... ">" | "step"

``#`` starts a comment; ``#!`` carries a node's origin.
"""

import json
import math
import re
from collections.abc import Mapping

from compilerllm.ir.dims import Dim, parse_dim, print_dim
from compilerllm.ir.errors import IRError, RecipeError, TextError
from compilerllm.ir.graph import NOWHERE, Attr, DimDecl, FuncRef, Graph, Module, Node, Origin, Param, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.recipe import Read, parse_recipe, print_recipe
from compilerllm.ir.types import STATE_KINDS, STEP, StateType, TensorType, Type


def print_module(module: Module, *, origins: bool = False) -> str:
    """The module as text; ``origins`` adds where each node comes from."""
    parts = [f"module({_attrs(module.attrs)})\n"] if module.attrs else []
    parts += [print_graph(graph, origins=origins) for graph in module.functions.values()]
    return "\n".join(parts)


def print_graph(graph: Graph, *, origins: bool = False) -> str:
    """One function as text."""
    lines = [f"func @{graph.name}({', '.join(f'%{v.name}: {v.type}' for v in graph.inputs)}) {{"]
    lines += [f"  dim {d.name} in [{d.low}, {d.high}]" for d in graph.dims]
    for param in graph.params:
        recipe = "" if param.recipe == Read(param.name) else f" = {print_recipe(param.recipe)}"
        lines.append(f"  param %{param.name} : {param.value.type}{recipe}")
    lines += [f"  state %{v.name} : {v.type}" for v in graph.states]
    lines += [f"  {print_node(node, origins=origins)}" for node in graph.nodes]
    lines.append(f"  return {', '.join(f'%{v.name}' for v in graph.outputs)}".rstrip())
    return "\n".join(lines) + "\n}\n"


def print_node(node: Node, *, origins: bool = False) -> str:
    """One node as text."""
    outs = ", ".join(f"%{v.name}" for v in node.outputs) + " = " if node.outputs else ""
    inside = ["none" if v is None else f"%{v.name}" for v in node.inputs]
    if node.attrs:
        inside.append(_attrs(node.attrs))
    types = " : " + ", ".join(str(v.type) for v in node.outputs) if node.outputs else ""
    origin = ""
    if origins and node.origin != NOWHERE:
        origin = f"  #! {node.origin.path} | {' '.join(node.origin.ops)} | {' '.join(node.origin.passes)}"
    return f"{outs}{node.op}({', '.join(inside)}){types}{origin}"


def _attrs(attrs: Mapping[str, Attr]) -> str:
    return ", ".join(f"{key}={print_attr(value)}" for key, value in attrs.items())


def print_attr(value: Attr) -> str:
    """One attribute as text."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return (
                repr(value)
                if math.isfinite(value)
                else ("nan" if math.isnan(value) else ("inf" if value > 0 else "-inf"))
            )
        case str():
            return json.dumps(value)
        case tuple():
            return f"[{', '.join(print_attr(v) for v in value)}]"
        case FuncRef():
            return str(value)
        case _:
            return print_dim(value)


_SPACE = re.compile(r"(?:\s+|#(?!!)[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][\w]*")
_VALUE = re.compile(r"%([A-Za-z_][\w.]*)")
_FUNC = re.compile(r"@([A-Za-z_][\w.]*)")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_FLOAT = re.compile(r"-?(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])|-?inf\b|nan\b")
_ORIGIN = re.compile(r"#!([^|\n]*)\|([^|\n]*)\|([^\n]*)")
_INT = re.compile(r"-?\d+")


def parse_module(text: str, file: str = "<text>") -> Module:
    """Read what ``print_module`` wrote. Raises ``TextError`` with line, column and a caret."""
    return _Parser(text, file).module()


class _Parser:
    """A cursor over the text; each method reads one rule of the grammar."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0

    def fail(self, message: str, at: int | None = None, length: int = 1) -> TextError:
        return TextError(message, self.text, self.at if at is None else at, length, self.file)

    def space(self) -> None:
        if (found := _SPACE.match(self.text, self.at)) is not None:
            self.at = found.end()

    def peek(self, token: str) -> bool:
        self.space()
        return self.text.startswith(token, self.at)

    def accept(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def expect(self, token: str, why: str = "") -> None:
        if not self.accept(token):
            raise self.fail(f"expected {token!r}{why}")

    def regex(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        self.space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fail(f"expected {what}")
        self.at = found.end()
        return found

    def word(self, word: str) -> bool:
        self.space()
        found = _NAME.match(self.text, self.at)
        if found is not None and found.group() == word:
            self.at = found.end()
            return True
        return False

    def module(self) -> Module:
        attrs: dict[str, Attr] = {}
        if self.word("module"):
            self.expect("(")
            attrs = self.attrs_until_close(first=True)
        functions: dict[str, Graph] = {}
        while True:
            self.space()
            if self.at == len(self.text):
                return Module(functions, attrs)
            start = self.at
            graph = self.function()
            if graph.name in functions:
                raise self.fail(f"function @{graph.name} is defined twice", start)
            functions[graph.name] = graph

    def function(self) -> Graph:
        if not self.word("func"):
            raise self.fail("expected 'func'")
        name = self.regex(_FUNC, "a function name such as @main").group(1)
        scope: dict[str, Value] = {}
        inputs: list[Value] = []
        self.expect("(")
        while not self.accept(")"):
            if inputs:
                self.expect(",")
            found = self.regex(_VALUE, "an input such as %x")
            self.expect(":")
            inputs.append(self.declare(scope, found, self.type()))
        self.expect("{")
        dims: list[DimDecl] = []
        params: list[Param] = []
        states: list[Value] = []
        nodes: list[Node] = []
        while not self.word("return"):
            if self.peek("}") or self.at == len(self.text):
                raise self.fail(f"function @{name} has no return")
            if self.word("dim"):
                dims.append(self.dim_decl())
            elif self.word("param"):
                params.append(self.param(scope))
            elif self.word("state"):
                found = self.regex(_VALUE, "a state such as %kv")
                self.expect(":")
                states.append(self.declare(scope, found, self.type()))
            else:
                nodes.append(self.node(scope))
        outputs: list[Value] = []
        if not self.peek("}"):
            outputs.append(self.use(scope))
            while self.accept(","):
                outputs.append(self.use(scope))
        self.expect("}")
        return Graph(
            name, tuple(dims), tuple(inputs), tuple(params), tuple(states), tuple(nodes), tuple(outputs)
        )

    def declare(self, scope: dict[str, Value], found: re.Match[str], type: Type) -> Value:
        name = found.group(1)
        if name in scope:
            raise self.fail(f"%{name} is defined twice", found.start(), len(found.group()))
        scope[name] = Value(name, type)
        return scope[name]

    def use(self, scope: dict[str, Value]) -> Value:
        found = self.regex(_VALUE, "a value such as %x")
        if found.group(1) not in scope:
            raise self.fail(f"{found.group()} is not defined", found.start(), len(found.group()))
        return scope[found.group(1)]

    def integer(self) -> int:
        return int(self.regex(_INT, "a whole number").group())

    def dim_decl(self) -> DimDecl:
        name = self.regex(_NAME, "a dimension's name").group()
        if not self.word("in"):
            raise self.fail("expected 'in'")
        self.expect("[")
        low = self.integer()
        self.expect(",")
        high = self.integer()
        self.expect("]")
        return DimDecl(name, low, high)

    def param(self, scope: dict[str, Value]) -> Param:
        found = self.regex(_VALUE, "a parameter such as %weight")
        self.expect(":")
        self.space()
        start = self.at
        type = self.type()
        if not isinstance(type, TensorType):
            raise self.fail("a parameter must be a tensor", start, self.at - start)
        value = self.declare(scope, found, type)
        if not self.accept("="):
            return Param(value, Read(value.name))
        self.space()
        start = self.at
        self.regex(_NAME, "a recipe such as read(...)")
        self.skip_brackets()
        try:
            return Param(value, parse_recipe(self.text[start : self.at]))
        except RecipeError as error:
            raise self.fail(str(error), start, self.at - start) from error

    def skip_brackets(self) -> None:
        """Go past one balanced bracket, strings respected."""
        self.space()
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.regex(_STRING, "a closed string")
                continue
            depth += (char in "([") - (char in ")]")
            self.at += 1
            if depth == 0:
                return
        raise self.fail("this bracket is not closed", start)

    def type(self) -> Type:
        self.space()
        start = self.at
        name = self.regex(_NAME, "a type").group()
        if name == "step":
            return STEP
        try:
            if name in STATE_KINDS:
                return self.state_type(name)
            self.expect("[", f" after dtype {name!r}")
            shape: list[Dim] = []
            while not self.accept("]"):
                if shape:
                    self.expect(",")
                shape.append(self.dimension())
            return TensorType(name, tuple(shape))
        except ValueError as error:
            raise self.fail(str(error), start, self.at - start) from error

    def state_type(self, kind: str) -> StateType:
        self.expect("<")
        dtype = self.regex(_NAME, "a dtype").group()
        fields: list[tuple[str, int]] = []
        while not self.accept(">"):
            self.expect(",")
            key = self.regex(_NAME, "a field's name").group()
            self.expect("=")
            fields.append((key, self.integer()))
        return StateType(kind, dtype, tuple(fields))

    def dimension(self) -> Dim:
        """A dimension: the text up to a comma or bracket at depth 0."""
        self.space()
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if (char in ",)]\n" and depth == 0) or char == "#":
                break
            depth += (char == "(") - (char == ")")
            self.at += 1
        try:
            return parse_dim(self.text[start : self.at])
        except ValueError as error:
            raise self.fail(str(error), start, self.at - start) from error

    def node(self, scope: dict[str, Value]) -> Node:
        results: list[re.Match[str]] = []
        if self.peek("%"):
            results.append(self.regex(_VALUE, "a result"))
            while self.accept(","):
                results.append(self.regex(_VALUE, "a result"))
            self.expect("=")
        self.space()
        start = self.at
        op_name = self.regex(_NAME, "an op, 'dim', 'param', 'state' or 'return'").group()
        length = self.at - start
        self.expect("(")
        inputs: list[Value | None] = []
        attrs: dict[str, Attr] = {}
        while not self.accept(")"):
            if inputs or attrs:
                self.expect(",")
            if self.peek("%"):
                inputs.append(self.use(scope))
            elif self.word("none"):
                inputs.append(None)
            else:
                attrs = self.attrs_until_close()
                break
        types: list[TensorType] = []
        types_at = self.at
        if results:
            self.expect(":", " and the result's type")
            self.space()
            types_at = self.at
            types.append(self.tensor_type())
            while self.accept(","):
                types.append(self.tensor_type())
        if len(types) != len(results):
            raise self.fail(f"{len(results)} results, but {len(types)} types", types_at, self.at - types_at)
        types_length = self.at - types_at
        origin = self.origin()
        try:
            inferred = lookup(op_name).infer(tuple(inputs), attrs)
        except IRError as error:
            raise self.fail(str(error), start, length) from error
        if inferred is not None and inferred != tuple(types):
            gives = ", ".join(map(str, inferred)) or "nothing"
            raise self.fail(f"{op_name} gives {gives} here", types_at, types_length)
        outputs = tuple(self.declare(scope, found, t) for found, t in zip(results, types, strict=True))
        return Node(op_name, tuple(inputs), attrs, outputs, origin)

    def tensor_type(self) -> TensorType:
        self.space()
        start = self.at
        type = self.type()
        if not isinstance(type, TensorType):
            raise self.fail("a node's result must be a tensor", start, self.at - start)
        return type

    def origin(self) -> Origin:
        self.space()
        found = _ORIGIN.match(self.text, self.at)
        if found is None:
            if self.text.startswith("#!", self.at):
                raise self.fail("an origin reads '#! path | ops | passes'")
            return NOWHERE
        self.at = found.end()
        path, ops, passes = found.groups()
        return Origin(path.strip(), tuple(ops.split()), tuple(passes.split()))

    def attrs_until_close(self, first: bool = True) -> dict[str, Attr]:
        attrs: dict[str, Attr] = {}
        if self.accept(")"):
            return attrs
        while True:
            self.space()
            start = self.at
            key = self.regex(_NAME, "an attribute such as eps=1e-06").group()
            if key in attrs:
                raise self.fail(f"attribute {key!r} is given twice", start, len(key))
            self.expect("=", f" after attribute {key!r}")
            attrs[key] = self.attr()
            if self.accept(")"):
                return attrs
            self.expect(",")

    def attr(self) -> Attr:
        self.space()
        if self.word("true"):
            return True
        if self.word("false"):
            return False
        if self.accept("["):
            items: list[Attr] = []
            while not self.accept("]"):
                if items:
                    self.expect(",")
                items.append(self.attr())
            return tuple(items)
        if self.peek('"'):
            return str(json.loads(self.regex(_STRING, "a closed string").group()))
        if self.peek("@"):
            return FuncRef(self.regex(_FUNC, "a function name").group(1))
        found = _FLOAT.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            return float(found.group())
        return self.dimension()
