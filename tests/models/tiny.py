"""Tiny random models, one per architecture that must run, and what a capture of each must find in it."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HEAD16 = _COMMON | {"head_dim": 16}


@dataclass(frozen=True)
class Tiny:
    """values: of the configuration. norms, ropes: expected nodes over the whole model, each layer counted."""

    values: dict[str, Any]
    norms: int
    ropes: int
    kinds: int = 1
    norm_op: str = "rms_norm"
    attrs: dict[str, Any] = field(default_factory=dict)  # of an attention node, in some layer


TINY: dict[str, Tiny] = {
    "llama": Tiny(_COMMON | {"tie_word_embeddings": True}, norms=7, ropes=6),
    "qwen2": Tiny(_COMMON, norms=7, ropes=6),
    "qwen3": Tiny(_HEAD16, norms=13, ropes=6),
    "mistral": Tiny(_HEAD16 | {"sliding_window": 6}, norms=7, ropes=6, attrs={"window": 6}),
    "gemma2": Tiny(_HEAD16 | {"sliding_window": 6, "query_pre_attn_scalar": 16}, norms=13, ropes=6, kinds=2,
                   attrs={"window": 6, "softcap": 50.0}),
    "gemma3_text": Tiny(_HEAD16 | {"sliding_window": 6, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}, norms=43, ropes=14,
                        kinds=2, attrs={"window": 6}),
    "phi3": Tiny(_COMMON | {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                        "partial_rotary_factor": 0.5}}, norms=7, ropes=6),
    "gpt2": Tiny({"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}, norms=7, ropes=0,
                 norm_op="layer_norm"),
    "gpt_neox": Tiny({k: v for k, v in _COMMON.items() if k != "num_key_value_heads"} | {"rotary_pct": 0.25}, norms=7, ropes=6,
                     norm_op="layer_norm"),
    "olmo2": Tiny(_COMMON, norms=13, ropes=6),
    "granite": Tiny(_COMMON | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                               "attention_multiplier": 0.2}, norms=7, ropes=6, attrs={"scale": 0.2}),
    "starcoder2": Tiny(_COMMON | {"sliding_window": 6}, norms=7, ropes=6, norm_op="layer_norm", attrs={"window": 6}),
    "stablelm": Tiny(_COMMON, norms=7, ropes=6, norm_op="layer_norm"),
    "mixtral": Tiny(_COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, norms=7, ropes=6),
    "qwen3_moe": Tiny(_HEAD16 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
                                 "mlp_only_layers": [1], "norm_topk_prob": True}, norms=13, ropes=6, kinds=2),
    "gpt_oss": Tiny(_HEAD16 | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "intermediate_size": 64},
                    norms=7, ropes=6, kinds=2, attrs={"window": 6}),
}  # fmt: skip
# Not asked for, and here so that what makes new architectures work stays working: logits only.
MORE: dict[str, dict[str, Any]] = {
    "cohere2": _COMMON | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm4": _HEAD16, "olmoe": _COMMON | {"num_experts": 4, "num_experts_per_tok": 2}, "opt": {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96,
        "max_position_embeddings": 128, "word_embed_proj_dim": 64,
    }, "phi": _COMMON | {"num_key_value_heads": 4}, "smollm3": _COMMON | {"no_rope_layers": [1, 1, 0]},
}  # fmt: skip
# What keeps opaque operators when captured: gptj's rotary embedding, the routing and rotation of deepseek_v3.
OPAQUE: dict[str, dict[str, Any]] = {
    "gptj": {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 128, "n_inner": 96,
             "bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v3": _COMMON | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
                              "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
                              "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1},
}  # fmt: skip
EXPERTS = {"mixtral": 3, "qwen3_moe": 2, "gpt_oss": 3}


def tiny_config(name: str, **changed: Any) -> Any:
    from transformers import AutoConfig

    values = (MORE | OPAQUE)[name] if name in MORE or name in OPAQUE else TINY[name].values
    return AutoConfig.for_model(name, **(values | changed))


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The capture of a tiny architecture, made once per test process."""
    from compilerllm.models.capture import capture

    return capture(tiny_config(name), dtype)


def tiny_model(name: str, *, seed: int = 0, **changed: Any) -> Any:
    """Random weights in float32, spread enough that tokens differ, norms and biases included. ``changed``: of the configuration."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **changed)
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.2 * noise)
    return model
