"""Symbolic dimensions: text that reads back, our own division, what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compilerllm.ir.dims import (
    Dim,
    FloorDiv,
    dim,
    free_dims,
    parse_dim,
    print_dim,
    product,
    substitute,
    symbol,
)
from tests.ir import generate

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)
T, S = symbol("T"), symbol("S")


@quick
@given(generate.dims(), st.dictionaries(st.sampled_from(generate.NAMES), st.integers(0, 50)))
def test_text_reads_back_and_keeps_its_value(value: Dim, binding: dict[str, int]) -> None:
    again = parse_dim(print_dim(value))
    assert again == value and type(again) is type(value)
    assert substitute(again, dict(binding)) == substitute(value, dict(binding))
    everything = {name: binding.get(name, 3) for name in generate.NAMES}
    assert isinstance(substitute(value, dict(everything)), int)


@pytest.mark.parametrize(("text", "printed"), [
    ("T", "T"), ("8", "8"), ("T + 0", "T"), ("2 * T * 4", "8*T"), ("(T + 1) * 2", "2*T + 2"), ("-T + T", "0"),
    ("FloorDiv(T + 15, 16)", "FloorDiv(T + 15, 16)"), ("FloorDiv(33, 16)", "2"), ("FloorDiv(T, 1)", "T"),
    ("T ** 2", "T**2"), ("-(S + 1) * (T + 1)", "-S*T - S - T - 1"),
])  # fmt: skip
def test_equal_sizes_have_one_text(text: str, printed: str) -> None:
    assert print_dim(parse_dim(text)) == printed
    assert parse_dim(printed) == parse_dim(text)


@pytest.mark.parametrize("text", [
    "", "T / 2", "T // 2", "1.5", "True", "'T'", "T.real", "abs(T)", "__import__('os')", "T if S else 1", "[T]", "T ** S",
    "FloorDiv(T)", "lambda: T",
])  # fmt: skip
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a dimension"):
        parse_dim(text)


def test_floor_div_is_opaque_until_both_are_numbers() -> None:
    blocks = dim(FloorDiv(T + 15, 16))
    assert free_dims(blocks) == {"T"}
    assert [substitute(blocks, {"T": n}) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert substitute(blocks, {"T": S}) == dim(FloorDiv(S + 15, 16))


def test_products_are_numbers_where_they_can_be() -> None:
    assert product((2, 3)) == 6 and isinstance(product((2, 3)), int)
    assert product(()) == 1
    assert product((T, 4)) == product((4, T)) == 4 * T
