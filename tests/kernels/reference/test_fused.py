"""Fused forms equal the ops they replace, bit for bit in bf16: the same graph written both ways."""

import pytest
import torch

from compilerllm.ir.text import parse_module
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import Step, allocate_states
from tests.ir.op_samples import function
from tests.kernels.reference.steps import make_step, random_inputs, random_params

_LINEAR = "%x: bf16[T, 32], %w: bf16[8, 32], %b: bf16[8]"
_SPLIT = "%g = slice({0}, axis=-1, start=0, stop=4) : bf16[T, 4]\n%u = slice({0}, axis=-1, start=4, stop=8) : bf16[T, 4]\n"
CASES = {
    "linear_gated": (
        _LINEAR, '%y = linear_gated(%x, %w, %b, act="silu") : bf16[T, 4]',
        "%l = linear(%x, %w, %b) : bf16[T, 8]\n" + _SPLIT.format("%l") + '%y = gated_act(%g, %u, act="silu") : bf16[T, 4]',
    ),
    "gated_act_packed": (
        "%x: bf16[T, 8]", '%y = gated_act_packed(%x, act="gelu_tanh") : bf16[T, 4]',
        _SPLIT.format("%x") + "%a = gelu_tanh(%g) : bf16[T, 4]\n%y = mul(%a, %u) : bf16[T, 4]",
    ),
    "linear_act": (
        _LINEAR, '%y = linear_act(%x, %w, %b, act="gelu") : bf16[T, 8]',
        "%l = linear(%x, %w, %b) : bf16[T, 8]\n%y = gelu(%l) : bf16[T, 8]",
    ),
    "linear_add": (
        _LINEAR + ", %r: bf16[T, 8]", "%y = linear_add(%x, %w, %r, %b) : bf16[T, 8]",
        "%l = linear(%x, %w, %b) : bf16[T, 8]\n%y = add(%l, %r) : bf16[T, 8]",
    ),
    "norm_linear": (
        _LINEAR + ", %r: bf16[T, 32], %n: bf16[32]",
        "%y, %s = norm_linear(%x, %r, %n, %w, %b, eps=1e-05, round_first=true) : bf16[T, 8], bf16[T, 32]",
        "%n1, %s = add_rms_norm(%x, %r, %n, eps=1e-05, round_first=true) : bf16[T, 32], bf16[T, 32]\n"
        "%y = linear(%n1, %w, %b) : bf16[T, 8]",
    ),
    "norm_linear_gated": (
        _LINEAR + ", %r: bf16[T, 32], %n: bf16[32]",
        '%y, %s = norm_linear_gated(%x, %r, %n, %w, %b, act="silu", eps=1e-05, offset=1.0) : bf16[T, 4], bf16[T, 32]',
        "%n1, %s = add_rms_norm(%x, %r, %n, eps=1e-05, offset=1.0) : bf16[T, 32], bf16[T, 32]\n"
        '%y = linear_gated(%n1, %w, %b, act="silu") : bf16[T, 4]',
    ),
    "add_layer_norm": (
        "%x: bf16[T, 8], %r: bf16[T, 8], %w: bf16[8]",
        "%y, %s = add_layer_norm(%x, %r, %w, eps=1e-05) : bf16[T, 8], bf16[T, 8]",
        "%s = add(%x, %r) : bf16[T, 8]\n%y = layer_norm(%s, %w, eps=1e-05) : bf16[T, 8]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_fused_form_equals_its_parts(op: str) -> None:
    torch.manual_seed(0)
    inputs, fused, parts = CASES[op]
    modules = [parse_module(function(inputs, body, "%y")) for body in (fused, parts)]
    given = random_inputs(modules[0], {"T": 5})
    results = [Interpreter(m, random_params(m)).run(*given)[0] for m in modules]
    assert torch.equal(*results)


def test_qkv_rope_write_equals_its_parts() -> None:
    torch.manual_seed(0)
    inputs = "%step: step, %x: bf16[T, 64], %c: bf16[T, 8], %s: bf16[T, 8], %n: bf16[8], %m: bf16[8]"
    state = "state %kv : paged_kv<bf16, heads=2, dim=8>"
    attend = "%y = paged_attention(%q, %kv, %step, scale=0.3) : bf16[T, 4, 8]"
    norm, rope = "eps=1e-06, round_first=true", 'style="half"'
    fused = f"%q = qkv_rope_write(%kv, %x, %step, %c, %s, %n, %m, heads=4, {norm}, {rope}) : bf16[T, 4, 8]\n{attend}"
    parts = f"""%r = reshape(%x, shape=[T, 8, 8]) : bf16[T, 8, 8]
      %q0 = slice(%r, axis=1, start=0, stop=4) : bf16[T, 4, 8]
      %k0 = slice(%r, axis=1, start=4, stop=6) : bf16[T, 2, 8]
      %v = slice(%r, axis=1, start=6, stop=8) : bf16[T, 2, 8]
      %q1 = rms_norm(%q0, %n, {norm}) : bf16[T, 4, 8]
      %k1 = rms_norm(%k0, %m, {norm}) : bf16[T, 2, 8]
      %q = rope(%q1, %c, %s, head_axis=-2, {rope}) : bf16[T, 4, 8]
      %k = rope(%k1, %c, %s, head_axis=-2, {rope}) : bf16[T, 2, 8]
      kv_write(%kv, %k, %v, %step)
      {attend}"""
    results = []
    for body in (fused, parts):
        module = parse_module(function(inputs, body, "%y", state))
        torch.manual_seed(1)
        given = random_inputs(module, {"T": 6})
        states = allocate_states(module, 16, 2, block_size=4)
        results.append(
            Interpreter(module, {}).run_step(Step(make_step([(0, 4), (0, 2)])), states, inputs=given)
        )
        results.append(states["kv"].data.nan_to_num(7.0))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
