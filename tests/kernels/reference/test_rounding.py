"""The reference rounds where transformers' eager modules round: bit for bit in bf16, attention within its sums' order."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.kernels.reference import fused_ops, model_ops

transformers: Any = pytest.importorskip("transformers")
BF16 = torch.bfloat16


def modeling(name: str) -> Any:
    """A model's module, untyped: its classes take whatever the tests give them."""
    return import_module(f"transformers.models.{name}.modeling_{name}")


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a, b), f"differ by {(a.float() - b.float()).abs().max()}"


def test_rms_norms() -> None:
    Gemma3RMSNorm = modeling("gemma3").Gemma3RMSNorm
    GptOssRMSNorm = modeling("gpt_oss").GptOssRMSNorm
    LlamaRMSNorm = modeling("llama").LlamaRMSNorm

    x, weight = normal(50, 64), normal(64)
    for module, attrs in (
        (LlamaRMSNorm(64, 1e-5), {"round_first": True}),
        (GptOssRMSNorm(64, 1e-5), {}),
        (Gemma3RMSNorm(64, 1e-5), {"offset": 1.0}),
    ):
        module.to(BF16).weight.data.copy_(weight)
        same(model_ops.rms_norm(x, weight, eps=1e-5, **attrs), module(x))
        total = x + x.flip(0)
        both = fused_ops.add_rms_norm(x, x.flip(0), weight, eps=1e-5, **attrs)
        same(both[0], module(total))
        same(both[1], total)


def test_layer_norms() -> None:
    CohereLayerNorm = modeling("cohere").CohereLayerNorm

    x, weight, bias = normal(50, 64), normal(64), normal(64) + 1
    plain = torch.nn.LayerNorm(64, 1e-5, dtype=BF16)
    plain.weight.data.copy_(weight)
    plain.bias.data.copy_(bias)
    same(model_ops.layer_norm(x, weight, bias, eps=1e-5), plain(x))
    cohere = CohereLayerNorm(64, 1e-5).to(BF16)
    cohere.weight.data.copy_(weight)
    same(model_ops.layer_norm(x, weight, None, eps=1e-5), cohere(x))


def test_rotary_tables() -> None:
    CohereConfig = transformers.CohereConfig
    LlamaConfig = transformers.LlamaConfig
    CohereRotaryEmbedding = modeling("cohere").CohereRotaryEmbedding
    LlamaRotaryEmbedding = modeling("llama").LlamaRotaryEmbedding

    positions = torch.arange(0, 900, 7).unsqueeze(0)
    for module, layout in (
        (LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4)), "half"),
        (CohereRotaryEmbedding(CohereConfig(hidden_size=64, num_attention_heads=4)), "repeat"),
    ):
        want = module(normal(1, 1), positions)
        got = model_ops.rotary_table(positions, module.inv_freq, layout=layout, dtype="bf16")
        same(got[0], want[0])
        same(got[1], want[1])


def test_rotations() -> None:
    cohere = modeling("cohere")
    glm = modeling("glm")
    gpt_oss = modeling("gpt_oss")
    llama = modeling("llama")

    q, k = normal(1, 4, 30, 16), normal(1, 2, 30, 16)
    angles = torch.outer(torch.arange(30.0), torch.rand(8, generator=torch.Generator().manual_seed(1)))
    cases = (
        (llama, torch.cat((angles, angles), -1), {"style": "half"}),
        (gpt_oss, angles, {"style": "half", "half_width": True}),
        (cohere, angles.repeat_interleave(2, -1), {"style": "interleaved", "f32": True}),
        (
            glm,
            torch.cat((angles[:, :4], angles[:, :4]), -1),
            {"style": "interleaved"},
        ),  # half of the columns turn
    )
    for module, table, attrs in cases:
        cos, sin = table.cos().to(BF16).unsqueeze(0), table.sin().to(BF16).unsqueeze(0)
        want = module.apply_rotary_pos_emb(q, k, cos, sin)
        if module is glm:
            cos, sin = (t[..., :4].repeat_interleave(2, -1) for t in (cos, sin))
        for x, expected in zip((q, k), want, strict=True):
            same(model_ops.rope(x, cos, sin, head_axis=-3, **attrs), expected)
            turned = model_ops.rope(x.transpose(1, 2), cos, sin, head_axis=-2, **attrs)
            same(turned.transpose(1, 2), expected)


def test_experts() -> None:
    GptOssConfig = transformers.GptOssConfig
    MixtralConfig = transformers.MixtralConfig
    GptOssExperts = modeling("gpt_oss").GptOssExperts
    MixtralExperts = modeling("mixtral").MixtralExperts

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4}
    x, weights = normal(20, 32), normal(20, 2).abs()
    ids = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)).topk(2).indices
    mixtral = MixtralExperts(MixtralConfig(**sizes)).to(BF16)
    mixtral.gate_up_proj.data.copy_(normal(4, 96, 32))
    mixtral.down_proj.data.copy_(normal(4, 32, 48))
    got = model_ops.experts(x, ids, weights, mixtral.gate_up_proj, mixtral.down_proj, act="silu")
    same(got, mixtral(x, ids, weights))
    oss = GptOssExperts(GptOssConfig(**sizes)).to(BF16)
    oss.gate_up_proj.data.copy_(normal(4, 32, 96))
    oss.down_proj.data.copy_(normal(4, 48, 32))
    oss.gate_up_proj_bias.data.copy_(normal(4, 96))
    oss.down_proj_bias.data.copy_(normal(4, 32))
    bf16 = [oss.gate_up_proj.mT, oss.down_proj.mT, oss.gate_up_proj_bias, oss.down_proj_bias]
    attrs: dict[str, Any] = {"act": "gpt_oss", "interleaved": True, "limit": 7.0, "alpha": 1.702}
    got, eager = model_ops.experts(x, ids, weights, *bf16, **attrs), oss(x, ids, weights)
    wide = oss.float()
    exact = wide(x.float(), ids, weights.float())
    f32 = model_ops.experts(x.float(), ids, weights.float(), *(t.float() for t in bf16), **attrs)
    torch.testing.assert_close(f32, exact, rtol=1e-5, atol=5e-5)  # sums of another order
    # Eager rounds the product before it adds the bias; a linear with a bias rounds once, so it errs less.
    assert (got - exact).norm() <= (eager - exact).norm()


@pytest.mark.parametrize("window", [0, 1, 5])
def test_attention_with_softcap_and_window(window: int) -> None:
    eager_attention_forward = modeling("gemma2").eager_attention_forward

    q, k, v = (normal(9, heads, 16, dtype=torch.float32) for heads in (4, 2, 2))
    distance = torch.arange(9).unsqueeze(1) - torch.arange(9)
    hidden = (distance < 0) | ((distance >= window) if window else torch.zeros(9, 9, dtype=torch.bool))
    mask = torch.zeros(9, 9).masked_fill(hidden, float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    batched = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    want, _ = eager_attention_forward(module, *batched, mask, scaling=0.3, softcap=2.0)
    got = model_ops.attention(q, k, v, scale=0.3, causal=True, window=window, softcap=2.0)
    torch.testing.assert_close(got, want[0])


def test_attention_with_sinks() -> None:
    eager_attention_forward = modeling("gpt_oss").eager_attention_forward

    q, k, v = (normal(9, heads, 16, dtype=torch.float32) for heads in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=normal(4, dtype=torch.float32))
    mask = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    batched = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    want, _ = eager_attention_forward(module, *batched, mask, scaling=0.3)
    torch.testing.assert_close(model_ops.attention(q, k, v, module.sinks, scale=0.3, causal=True), want[0])


def test_a_query_without_keys_is_zero_but_poison_shows() -> None:
    q, k = normal(2, 1, 8), normal(3, 1, 8)
    nothing = torch.tensor([[False] * 3, [True] * 3])
    out = model_ops.masked_attention(q, k, k, nothing, 1.0, 0.0, None)
    assert not out[0].any() and out[1].any()
    k[0] = float("nan")
    assert model_ops.masked_attention(q, k, k, nothing, 1.0, 0.0, None)[1].isnan().all()
