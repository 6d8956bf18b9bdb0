"""Printer and parser are inverse; every mistake in a text is shown with line, column and caret."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from compilerllm.ir.errors import RecipeError, TextError
from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import Convert, Read, Recipe, parse_recipe, print_recipe, reads, rename
from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.types import StateType, TensorType
from tests.ir import generate
from tests.ir.equality import exact, facts

quick = settings(
    max_examples=30, deadline=None, derandomize=True, database=None,
    # Without the phase that explains failures: before Python 3.12 it traces every line, which takes most of the time.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip


@quick
@given(generate.modules())
def test_parse_undoes_print(module: Module) -> None:
    text = print_module(module, origins=True)
    again = parse_module(text)
    assert facts(again) == facts(module)
    assert print_module(again, origins=True) == text


@quick
@given(generate.recipes())
def test_recipe_round_trip(recipe: Recipe) -> None:
    assert exact(parse_recipe(print_recipe(recipe))) == exact(recipe)
    prefixed = rename(recipe, lambda n: f"layers.3.{n}")
    assert [f"layers.3.{n}" for n in reads(recipe)] == list(reads(prefixed))


@quick
@given(generate.TENSORS | generate.states())
def test_type_round_trip(type: TensorType | StateType) -> None:
    kind = "state" if isinstance(type, StateType) else "param"
    graph = parse_module(f"func @main() {{\n  {kind} %a : {type}\n  return\n}}").main
    assert [v.type for v in graph.values()] == [type]


@pytest.mark.parametrize("text", [
    "read(x)", 'read("a", "b")', "eval(1)", 'slice(read("a"), axis=0, start=0)', 'slice(read("a"), axis="0", start=0, stop=1)',
    'convert("a", "f32")', "1", 'concat(read("a"))', 'literal("f32", 3, [1.0])', "(", '__import__("os")',
])  # fmt: skip
def test_recipe_errors_quote_the_text(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    assert repr(text) in str(caught.value)


def test_recipes_default_to_the_own_name() -> None:
    module = parse_module(
        'func @main() {\n  param %a.b : f32[2]\n  param %c : bf16[2] = convert(read("a.b"), "bf16")\n  return\n}'
    )
    assert [p.recipe for p in module.main.params] == [Read("a.b"), Convert(Read("a.b"), "bf16")]
    assert "param %a.b : f32[2]\n" in print_module(module)


def test_floats_keep_their_bits() -> None:
    text = "func @main(%x: f32[2]) {{\n  %y = mul(%x, scalar={}) : f32[2]\n  return %y\n}}\n"
    for number in (0.1, 1e-300, 5e-324, -0.0, 1.0, 1e22, float("inf"), float("-inf"), float("nan"), 1 / 3):
        scalar = parse_module(text.format(repr(number))).main.nodes[0].attrs["scalar"]
        assert isinstance(scalar, float) and repr(scalar) == repr(number)


def test_comments_and_layout_do_not_matter() -> None:
    module = parse_module("""# a comment
        func @main( %x : f32[ T ,  8 ] ) { dim T in [1,2] # bounds
        %y=neg(%x):f32[T,8]return %y}""")
    assert print_module(module) == (
        "func @main(%x: f32[T, 8]) {\n  dim T in [1, 2]\n  %y = neg(%x) : f32[T, 8]\n  return %y\n}\n"
    )


# Each text has one mistake, between the marks; the caret must stand under it. The second half is part of the message.
_BODY = "func @main(%x: f32[T, 8]) {{\n  dim T in [1, 64]\n  {}\n  return %y\n}}\n"
ERRORS = {
    "not defined": (_BODY.format("%y = neg(«%z») : f32[T, 8]"), "%z is not defined"),
    "defined twice": (_BODY.format("«%x» = neg(%x) : f32[T, 8]"), "%x is defined twice"),
    "unknown op": (_BODY.format("%y = «negg»(%x) : f32[T, 8]"), "unknown op 'negg'; did you mean neg"),
    "wrong type": (_BODY.format("%y = neg(%x) : «bf16[T, 8]»"), "neg gives f32[T, 8] here"),
    "no type": (_BODY.format("%y = neg(%x)\n  «r»eturn %x"), "expected ':' and the result's type"),
    "more types": (_BODY.format("%y = neg(%x) : «f32[T, 8], f32[2]»"), "1 results, but 2 types"),
    "unknown attribute": (_BODY.format("%y = «neg»(%x, eps=1) : f32[T, 8]"), "neg: unknown attribute 'eps'"),
    "missing attribute": (_BODY.format("%y = «softmax»(%x) : f32[T, 8]"), "attribute 'axis' is missing"),
    "attribute twice": (_BODY.format("%y = softmax(%x, axis=1, «axis»=0) : f32[T, 8]"), "'axis' is given twice"),
    "missing operand": (_BODY.format("%y = «linear»(%x) : f32[T, 8]"), "operand 'weight' is missing"),
    "too many operands": (_BODY.format("%y = «neg»(%x, %x) : f32[T, 8]"), "2 operands, but it takes 1"),
    "no broadcast": (_BODY.format("%z = reshape(%x, shape=[8, T]) : f32[8, T]\n  %y = «add»(%x, %z) : f32[T, 8]"), "do not broadcast"),
    "small rank": (_BODY.format('%s = full(shape=[], value=1.0, dtype="f32") : f32[]\n  %y = «rms_norm»(%s, %x, eps=1e-5) : f32[]'), "does not fit rms_norm(x, weight?)"),
    "unknown dtype": (_BODY.format('%y = neg(%x) : «f33[T, 8]»'), "unknown dtype 'f33'"),
    "bad dimension": (_BODY.format("%y = neg(%x) : f32[«T / 2», 8]"), "not a dimension: 'T / 2'"),
    "called dimension": (_BODY.format("%y = neg(%x) : f32[«eval(T)», 8]"), "not a dimension"),
    "unknown state": (_BODY.format("state %s : «paged[f32]»"), "unknown dtype 'paged'"),
    "state field": (_BODY.format("state %s : «paged_kv<f32, heads=2>»"), "missing ['dim']"),
    "bad param": (_BODY.format('param %p : f32[2] = «read(1, 2)»'), "read takes 1 arguments, not 2"),
    "open recipe": (_BODY.format('param %p : f32[2] = read«(»"a"'), "this bracket is not closed"),
    "param of state": (_BODY.format("param %p : «paged_kv<f32, heads=2, dim=8>»"), "a parameter must be a tensor"),
    "no return": ("func @main() {\n  dim T in [1, 2]\n«}»\n", "function @main has no return"),
    "no function": ("«m»odel @main() {\n}\n", "expected 'func'"),
    "function twice": ("func @f() {\n  return\n}\n«f»unc @f() {\n  return\n}\n", "function @f is defined twice"),
    "no bracket": ("func @main«%»x: f32[2]) {\n  return\n}\n", "expected '('"),
    "bad dim": (_BODY.format("dim S «f»rom 1"), "expected 'in'"),
    "bad origin": (_BODY.format("%y = neg(%x) : f32[T, 8]  «#»! layer"), "an origin reads"),
    "unclosed string": (_BODY.format('%y = cast(%x, dtype=«"»f32) : f32[T, 8]'), "expected a closed string"),
    "end of text": ("func @main() {\n  dim T in [1, 2]\n«", "function @main has no return"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error_positions(name: str) -> None:
    marked, message = ERRORS[name]
    start = marked.index("«")
    text = marked.replace("«", "")
    length = text.find("»") - start if "»" in text else 1
    text = text.replace("»", "")
    with pytest.raises(TextError) as caught:
        parse_module(text, "some.ir")
    error = caught.value
    line, column = text.count("\n", 0, start) + 1, start - (text.rfind("\n", 0, start) + 1) + 1
    assert message in error.message
    assert (error.line, error.column) == (line, column)
    shown = str(error).split("\n")
    assert shown[0] == f"some.ir:{line}:{column}: {error.message}"
    assert shown[-1].index("^") - 2 == column - 1
    if length > 1:
        assert shown[-1].count("^") == length


@quick
@given(
    st.text(max_size=60)
    | generate.modules().map(print_module).flatmap(lambda t: st.integers(0, len(t)).map(lambda i: t[:i]))
)
def test_any_text_parses_or_is_a_text_error(text: str) -> None:
    try:
        parse_module(text)
    except TextError as error:
        assert 1 <= error.line <= text.count("\n") + 1 and error.column >= 1
