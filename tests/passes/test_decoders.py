"""Whole pipelines over whole decoders: every level computes what the captured module does, whatever the batch."""

from dataclasses import replace

import pytest
import torch

from compilerllm.ir.graph import Graph, Module
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.validation.weights import checkpoint, random_tensor
from tests.models.tiny import TINY, tiny_config
from tests.passes.captured import Decoder
from tests.passes.running import SEQUENCES, run_captured, served_logits

DECODERS = {
    "llama": Decoder(),
    "bias": Decoder(bias=True),
    "qk_norm": Decoder(qk_norm=True),
    "packed": Decoder(packed=True),
    "window": Decoder(window=4),
    "q8_0": Decoder(weights="q8_0"),
    "scaled_residual": Decoder(factor=0.22),
    "f32": Decoder(dtype="f32", qk_norm=True, bias=True),
    "one_key_head": Decoder(kv_heads=1, qk_norm=True),
    "one_head": Decoder(heads=1, kv_heads=1, hidden=8, qk_norm=True),
}
# Logits of the served module stay unrounded; the captured ones were rounded to bf16, which has 8 bits.
TOLERANCE = {"bf16": 2**-7, "f32": 1e-5}
LLAMA = "add_rms_norm linear qkv_rope_write paged_attention linear add_rms_norm linear_gated linear"


def nodes(graph: Graph) -> str:
    """Ops in order, views left out."""
    return " ".join(n.op for n in graph.nodes if n.op != "reshape")


@pytest.mark.parametrize("name", DECODERS)
def test_levels_agree_with_the_captured_module(name: str) -> None:
    decoder = DECODERS[name]
    module = decoder.module()
    tensors = checkpoint(module)
    want = [run_captured(module, tensors, ids) for ids in SEQUENCES]
    levels = [run_pipeline(module, Options(level=level, verify=True))[0] for level in (0, 1)]
    plain, fused = (served_logits(m, tensors) for m in levels)
    for a, b, c in zip(want, plain, fused, strict=True):
        torch.testing.assert_close(b, a.float(), rtol=TOLERANCE[decoder.dtype], atol=TOLERANCE[decoder.dtype])
        assert torch.equal(b, c), "fusing changes no bit"


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "scaled_residual"])
def test_a_layer_is_eight_nodes(name: str) -> None:
    module, _ = run_pipeline(DECODERS[name].module())
    assert nodes(module.functions["layer"]) == LLAMA


def test_main_gathers_before_the_last_add_and_norm() -> None:
    module, _ = run_pipeline(Decoder().module())
    *_, a, b, norm, head = module.main.nodes
    assert [n.op for n in (a, b, norm, head)] == ["gather_rows", "gather_rows", "add_rms_norm", "linear"]
    assert str(module.main.outputs[0].type) == "f32[R, 48]"


def test_weights_that_differ_in_dtype_are_not_packed_but_right() -> None:
    text = replace(Decoder(), weights="q8_0").text().replace("v_proj.weight : q8_0", "v_proj.weight : q4_0")
    from compilerllm.ir.text import parse_module

    module = parse_module(text)
    tensors = checkpoint(module)
    fused, reports = run_pipeline(module, Options(verify=True))
    assert "qkv_rope_write" not in nodes(fused.functions["layer"])
    misses = [str(m) for r in reports for m in r.near_misses]
    assert any("the weights are q4_0 and q8_0" in m for m in misses)
    assert any("kv_write" in m for m in misses)
    plain = served_logits(run_pipeline(module, Options(level=0))[0], tensors)
    assert all(map(torch.equal, plain, served_logits(fused, tensors)))


# What one layer of each kind is made of after fusing, views left out.
_LLAMA_LIKE = "add_rms_norm linear qkv_rope_write paged_attention linear add_rms_norm linear_gated linear"
_SANDWICH = "add_rms_norm linear qkv_rope_write paged_attention linear rms_norm add_rms_norm linear_gated linear rms_norm"
_ROUTED = (
    "add_rms_norm linear qkv_rope_write paged_attention linear add_rms_norm linear group topk group experts"
)
FUSED: dict[str, tuple[str, ...]] = {
    "llama": (_LLAMA_LIKE,),
    "gemma3_text": (_SANDWICH, _SANDWICH),
    "phi3": (_LLAMA_LIKE,),
    "gpt2": (
        "add_layer_norm linear qkv_rope_write paged_attention linear add_layer_norm linear group linear",
    ),
    "gpt_neox": (
        "add_layer_norm linear qkv_rope_write paged_attention layer_norm linear_act linear linear_add",
    ),
    "qwen3_moe": (_ROUTED, _LLAMA_LIKE),
}
SLOW: dict[str, tuple[str, ...]] = {
    "granite": (
        "add_rms_norm linear qkv_rope_write paged_attention linear mul add_rms_norm linear_gated linear mul",
    ),
    "starcoder2": (
        "add_layer_norm linear qkv_rope_write paged_attention linear add_layer_norm linear_act linear",
    ),
    "stablelm": (
        "add_layer_norm linear qkv_rope_write paged_attention linear add_layer_norm linear_gated linear",
    ),
    "gpt_oss": (_ROUTED.replace("group topk group", "topk softmax"),) * 2,
    "qwen2": (_LLAMA_LIKE,),
    "qwen3": (_LLAMA_LIKE,),
    "mistral": (_LLAMA_LIKE,),
    "gemma2": (_SANDWICH, _SANDWICH),
    "mixtral": (_ROUTED,),
    "olmo2": (
        "add linear slice slice slice rms_norm rms_norm rope rope kv_write paged_attention linear rms_norm add "
        "linear_gated linear rms_norm",
    ),
}


def captured_model(name: str, dtype: torch.dtype) -> tuple[Module, dict[str, torch.Tensor]]:
    from compilerllm.models.capture import capture

    found = capture(tiny_config(name), dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = {n: random_tensor(t, generator) for n, t in found.types.items()}
    return found.module, tensors | {a: tensors[b] for a, b in found.tied.items()}


def check_architecture(name: str, layers: tuple[str, ...]) -> None:
    module, tensors = captured_model(name, torch.bfloat16)
    want = [run_captured(module, tensors, ids) for ids in SEQUENCES]
    plain, fused = (run_pipeline(module, Options(level=level, verify=True))[0] for level in (0, 1))
    found = [nodes(g) for n, g in fused.functions.items() if n != "main" and not n.startswith("group")]
    assert found == list(layers)
    results = (served_logits(m, tensors) for m in (plain, fused))
    for a, b, c in zip(want, *results, strict=True):
        torch.testing.assert_close(b, a.float(), rtol=2**-7, atol=2**-6)
        assert torch.equal(b, c), "fusing changes no bit"


def test_every_architecture_is_listed() -> None:
    assert FUSED.keys() | SLOW.keys() == TINY.keys()


@pytest.mark.parametrize("name", FUSED)
def test_architecture(name: str) -> None:
    check_architecture(name, FUSED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_architecture_slow(name: str) -> None:
    check_architecture(name, SLOW[name])
