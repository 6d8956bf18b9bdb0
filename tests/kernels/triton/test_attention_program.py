"""Attention through its emitters: programs of a chunked prompt, a mixed step and decodes against the interpreter."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from compilerllm.cuda_artifact import prepare_bucket
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import allocate_states
from compilerllm.kernels.triton import emit_decode
from tests.kernels.reference.steps import make_step
from tests.kernels.triton.harness import BLOCK, TORCH, Machine, assert_close

LAYERS = """
func @main(%step: step) {{
  dim T in [0, 4096]
  dim S in [1, 4096]
  dim R in [0, 4096]
  param %table : {dtype}[40, 128]
  param %freq : f32[8]
  param %norm : {dtype}[16]
  param %sinks : {dtype}[4]
  state %kv : paged_kv<{dtype}, heads=2, dim=16>
  state %near : paged_kv<{dtype}, heads=2, dim=16, window=20>
  %ids = step_field(%step, field="token_ids") : i32[T]
  %positions = step_field(%step, field="positions") : i32[T]
  %rows = step_field(%step, field="sample_rows") : i32[R]
  %x = embedding(%ids, %table) : {dtype}[T, 128]
  %cos, %sin = rotary_table(%positions, %freq, layout="half", dtype="{dtype}") : {dtype}[T, 16], {dtype}[T, 16]
  %q = qkv_rope_write(%kv, %x, %step, %cos, %sin, %norm, %norm, heads=4, style="half", eps=1e-05) : {dtype}[T, 4, 16]
  %a = paged_attention(%q, %kv, %step, scale=0.25, softcap=4.0) : {dtype}[T, 4, 16]
  %heads = reshape(%x, shape=[T, 8, 16]) : {dtype}[T, 8, 16]
  %k = slice(%heads, axis=1, start=4, stop=6) : {dtype}[T, 2, 16]
  %v = slice(%heads, axis=1, start=6, stop=8) : {dtype}[T, 2, 16]
  %turned = rope(%k, %cos, %sin, style="half", head_axis=-2) : {dtype}[T, 2, 16]
  kv_write(%near, %turned, %v, %step)
  %b = paged_attention(%a, %near, %step, %sinks, scale=0.25, window=20) : {dtype}[T, 4, 16]
  %flat = reshape(%b, shape=[T, 64]) : {dtype}[T, 64]
  %out = gather_rows(%flat, %rows) : {dtype}[R, 64]
  return %out
}}
"""
# (context before, tokens now) of each sequence, step after step.
STEPS: list[list[tuple[int, int]]] = [
    [(0, 33), (0, 3)],
    [(33, 1), (3, 40), (0, 2)],
    [(34, 1), (43, 1), (2, 1)],
]


class Pick:
    """Takes the candidate at ``index``, or the last."""

    def __init__(self, index: int) -> None:
        self.index, self.seen = index, list[str]()

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        self.seen.append(family)
        return candidates[min(self.index, len(candidates) - 1)]


@pytest.mark.parametrize(("dtype", "index"), [("f32", 0), ("bf16", 0), ("f32", 99)])
def test_layers_against_the_interpreter(dtype: str, index: int) -> None:
    module = parse_module(LAYERS.format(dtype=dtype))
    generator = torch.Generator().manual_seed(2)
    params = {
        "table": torch.randn(40, 128, generator=generator).to(TORCH[dtype]),
        "freq": 100.0 ** -(torch.arange(8) / 8),
        "norm": torch.rand(16, generator=generator).to(TORCH[dtype]),
        "sinks": torch.randn(4, generator=generator).to(TORCH[dtype]),
    }
    chooser = Pick(index)
    buckets = [Bucket(44, 3, 44, 44), Bucket(4, 4, 4, 1)]
    machine = Machine(module, params, buckets, num_blocks=12, chooser=chooser)
    assert {"qkv_rope_write", "rope", "kv_write", "prefill_attention", "decode_attention"} <= set(
        chooser.seen
    )
    states = allocate_states(module, 12, 4, BLOCK)
    oracle = Interpreter(module, params)
    for number, lengths in enumerate(STEPS):
        ids = torch.randint(0, 40, (sum(n for _, n in lengths),), generator=generator).tolist()
        step = make_step(lengths, block_size=BLOCK, groups=2, blocks_each=4, token_ids=ids)
        plan = 1 if all(n == 1 for _, n in lengths) else 0
        (out,) = machine.run(plan, step)
        assert_close(out, oracle.run_step(step, states).float(), 1.0 if dtype == "f32" else 2.0)
        for name, state in states.items():
            held = machine.states[name].permute(0, 3, 1, 2, 4)
            assert torch.equal(held.isnan(), state.data.isnan()), (
                f"step {number}: other rows of %{name} were written"
            )


def test_dense_attention_of_a_tensor_module() -> None:
    text = """
func @main(%q: f32[T, 64], %kv: f32[T, 2, 32]) {
  dim T in [1, 4096]
  %heads = reshape(%q, shape=[T, 4, 16]) : f32[T, 4, 16]
  %k = slice(%kv, axis=2, start=0, stop=16) : f32[T, 2, 16]
  %v = slice(%kv, axis=2, start=16, stop=32) : f32[T, 2, 16]
  %a = attention(%heads, %k, %v, scale=0.25, causal=true) : f32[T, 4, 16]
  return %a
}
"""
    module = parse_module(text)
    inputs = [torch.randn(37, 64), torch.randn(37, 2, 32)]
    machine = Machine(module, {}, [Bucket(37, 1, 1, 37)])
    (out,) = machine.run(0, None, inputs)
    assert_close(out, Interpreter(module, {}).run(*inputs)[0])


FUSED = """
func @main(%step: step) {{
  dim T in [0, 4096]
  dim S in [1, 4096]
  dim R in [0, 4096]
  param %table : {dtype}[40, 128]
  param %freq : f32[8]
  param %norm : {dtype}[16]
  param %sinks : {dtype}[4]
  param %up : {dtype}[128, 64]
  state %kv : paged_kv<{dtype}, heads=2, dim=16>
  state %near : paged_kv<{dtype}, heads=2, dim=16, window=20>
  %ids = step_field(%step, field="token_ids") : i32[T]
  %positions = step_field(%step, field="positions") : i32[T]
  %rows = step_field(%step, field="sample_rows") : i32[R]
  %x = embedding(%ids, %table) : {dtype}[T, 128]
  %cos, %sin = rotary_table(%positions, %freq, layout="half", dtype="{dtype}") : {dtype}[T, 16], {dtype}[T, 16]
  %q = qkv_rope_write(%kv, %x, %step, %cos, %sin, %norm, %norm, heads=4, style="half", eps=1e-05) : {dtype}[T, 4, 16]
  %a = paged_attention(%q, %kv, %step, scale=0.25, softcap=4.0) : {dtype}[T, 4, 16]
  %flat = reshape(%a, shape=[T, 64]) : {dtype}[T, 64]
  %y = linear(%flat, %up) : {dtype}[T, 128]
  %q2 = qkv_rope_write(%near, %y, %step, %cos, %sin, heads=4, style="half") : {dtype}[T, 4, 16]
  %b = paged_attention(%q2, %near, %step, %sinks, scale=0.25, window=20) : {dtype}[T, 4, 16]
  %last = reshape(%b, shape=[T, 64]) : {dtype}[T, 64]
  %out = gather_rows(%last, %rows) : {dtype}[R, 64]
  return %out
}}
"""


@pytest.mark.parametrize(("dtype", "index"), [("f32", 99), ("bf16", 0)])
def test_a_prompt_then_fused_decodes(dtype: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode buckets take qkv_attention, over the cache that the prompt's bucket wrote."""
    monkeypatch.setattr(emit_decode, "MOST_SPLITS", 2)  # programs are slow in the interpreter
    module = parse_module(FUSED.format(dtype=dtype))
    generator = torch.Generator().manual_seed(3)
    shapes = {"table": (40, 128), "norm": (16,), "sinks": (4,), "up": (128, 64)}
    params = {n: torch.randn(*s, generator=generator).to(TORCH[dtype]) for n, s in shapes.items()}
    params["up"] /= 8
    params["freq"] = 100.0 ** -(torch.arange(8) / 8)
    chooser = Pick(index)
    buckets = [Bucket(44, 3, 44, 44), Bucket(4, 4, 4, 1), Bucket(1, 1, 1, 1)]
    machine = Machine(module, params, buckets, num_blocks=12, chooser=chooser, prepare=prepare_bucket)
    assert {"qkv_rope_write", "prefill_attention", "decode_qkv"} <= set(chooser.seen)
    assert "decode_attention" not in chooser.seen
    states = allocate_states(module, 12, 4, BLOCK)
    oracle = Interpreter(module, params)
    steps = [[(0, 33), (0, 3), (0, 1)], [(33, 1), (3, 1), (1, 1)], [(34, 1), (4, 1), (2, 1)]]
    for number, lengths in enumerate(steps):
        ids = torch.randint(0, 40, (sum(n for _, n in lengths),), generator=generator).tolist()
        step = make_step(lengths, block_size=BLOCK, groups=2, blocks_each=4, token_ids=ids)
        (out,) = machine.run(0 if number == 0 else 1, step)
        assert_close(out, oracle.run_step(step, states).float(), 1.0 if dtype == "f32" else 2.0)
        for name, state in states.items():
            held = machine.states[name].permute(0, 3, 1, 2, 4)
            assert torch.equal(held.isnan(), state.data.isnan()), (
                f"step {number}: other rows of %{name} were written"
            )
    step = make_step([(35, 1)], block_size=BLOCK, groups=2, blocks_each=4, token_ids=[7])
    (out,) = machine.run(2, step)
    assert_close(out, oracle.run_step(step, states).float(), 1.0 if dtype == "f32" else 2.0)


def test_qkv_attention_is_for_decode_buckets_only() -> None:
    text = """
func @main(%step: step, %x: f32[T, 128]) {
  dim T in [0, 4096]
  state %kv : paged_kv<f32, heads=2, dim=16>
  %a = qkv_attention(%kv, %x, %step, heads=4, scale=0.25) : f32[T, 4, 16]
  return %a
}
"""
    with pytest.raises(UnsupportedByTarget, match="one query a sequence"):
        Machine(parse_module(text), {}, [Bucket(8, 2, 2, 8)])
