"""What the serve phase refuses, and what it says."""

import pytest

from compilerllm.ir.text import parse_module
from compilerllm.passes.errors import NotServable
from compilerllm.passes.pipeline import Options, run_pipeline
from tests.passes.captured import Decoder


def served(
    body: str, result: str, params: str = "", inputs: str = "%input_ids: i64[1, T], %positions: i64[1, T]"
) -> None:
    """Run the pipeline over a decoder of one attention with ``body`` after it; %h is [T, 2, 8], f32."""
    text = f"""
func @main({inputs}) {{
  dim T in [1, 64]
  param %table : f32[8, 16]
{params}  %x = embedding(%input_ids, %table) : f32[1, T, 16]
  %q = reshape(%x, shape=[T, 2, 8]) : f32[T, 2, 8]
  %h = attention(%q, %q, %q, scale=0.5, causal=true) : f32[T, 2, 8]
{body}  return %{result}
}}
"""
    run_pipeline(parse_module(text), Options(level=0, verify=True))


def test_a_decoder_is_served() -> None:
    served("", "h")


@pytest.mark.parametrize(
    ("body", "result", "why"),
    [
        ("  %y = mean(%h, axis=0, keepdim=true) : f32[1, 2, 8]\n", "y", "reduces over the tokens"),
        ("  %y = cumsum(%h, axis=0) : f32[T, 2, 8]\n", "y", "reduces over the tokens"),
        (
            "  %f = reshape(%h, shape=[T, 16]) : f32[T, 16]\n  %t = permute(%f, order=[1, 0]) : f32[16, T]\n"
            "  %s = matmul(%f, %t) : f32[T, T]\n  %y = matmul(%s, %f) : f32[T, 16]\n",
            "y",
            r"relates tokens with tokens: f32\[T, T\]",
        ),
        (
            "  %i = iota(size=T) : i64[T]\n  %e = embedding(%i, %table) : f32[T, 16]\n"
            "  %f = reshape(%h, shape=[T, 16]) : f32[T, 16]\n  %y = add(%f, %e) : f32[T, 16]\n",
            "y",
            "made out of the number of tokens",
        ),
        ("  %y = slice(%h, axis=0, start=1, stop=T) : f32[T - 1, 2, 8]\n", "y", "cuts or joins the tokens"),
        (
            "  %y = attention(%h, %h, %h, scale=1.0, causal=false) : f32[T, 2, 8]\n",
            "y",
            "is not causal. A decoder's attention",
        ),
    ],
    ids=["mean", "cumsum", "matmul", "iota", "slice", "encoder"],
)
def test_mixing_tokens_is_refused(body: str, result: str, why: str) -> None:
    with pytest.raises(NotServable, match=rf"@main cannot be served: .*{why}"):
        served(body, result)


def test_a_graph_without_attention_is_refused() -> None:
    text = "\n".join(line for line in Decoder().text().splitlines() if "attention(" not in line)
    text = text.replace("%ab = reshape(%a,", "%ab = reshape(%qa,")
    with pytest.raises(
        NotServable, match=r"it has no attention node.*Capture must turn each attention layer"
    ):
        run_pipeline(parse_module(text))


def test_an_input_that_no_step_holds_is_refused() -> None:
    inputs = "%input_ids: i64[1, T], %positions: i64[1, T], %pixels: f32[1, T, 16]"
    with pytest.raises(NotServable, match="takes %pixels, which a step does not hold"):
        served("", "h", inputs=inputs)


def test_logits_that_are_not_rows_are_refused() -> None:
    with pytest.raises(NotServable, match=r"%y is f32\[2, T, 8\], not \[T, ...\]"):
        served("  %y = permute(%h, order=[1, 0, 2]) : f32[2, T, 8]\n", "y")
