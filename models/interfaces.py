"""What transformers calls instead of its attention and its experts while a model is captured.

Registering an attention function and no mask function makes every mask builder return None, so no mask enters the
graph: window, softcap and sinks arrive as keyword arguments, causality from the call or the module.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from compilerllm.models import formulas
from compilerllm.models.errors import CaptureError
from compilerllm.models.opset import ops

NAME = "compilerllm"
# Arguments that change nothing when a model runs without a cache and without dropout.
_HARMLESS = frozenset({
    "dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
    "return_dict", "past_key_values", "cache", "layer_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "num_items_in_batch", "position_embeddings", "deterministic",
})  # fmt: skip


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """q [1, H, T, D], k and v [1, Hk, T, D] to [1, T, H, Dv], through one node over [T, H, D]."""
    where = type(module).__name__
    if attention_mask is not None:
        raise CaptureError(
            f"{where} passes a mask tensor to its attention; only causal and windowed masks are known"
        )
    for name, given in others.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise CaptureError(f"{where} calls attention with {name}=, which this compiler does not know")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2).reshape(x.shape[2], x.shape[1], x.shape[3]) for x in (query, key, value))
    out = ops.attention(
        q, k, v, s_aux, query.shape[-1] ** -0.5 if scaling is None else float(scaling), is_causal,
        int(sliding_window or 0), float(softcap or 0.0),
    )  # fmt: skip
    return out.unsqueeze(0), None


def experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden [T, K], ids and weights [T, top] to [T, K]: one node where the gate is known, else ATen."""
    form = getattr(module, "compilerllm_gate", None)
    # transformers before 5.18 knows no norm after the experts.
    post_norm = getattr(module, "has_post_expert_norm", False)
    if form is None or hidden.dim() != 2 or post_norm:
        return batched_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    act, interleaved, limit, alpha = form
    bias = module.has_bias
    out: Tensor = ops.experts(
        hidden, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj,
        module.gate_up_proj_bias if bias else None, module.down_proj_bias if bias else None,
        act, interleaved, bool(module.is_transposed), limit, alpha,
    )  # fmt: skip
    return out


def probe_experts(module: Any) -> tuple[str, bool, float, float] | None:
    """The formula an experts module applies between its projections, or None if none of ours is equal."""
    if not module.has_gate:
        return None
    sample = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * 4
    limit, alpha = float(getattr(module, "limit", 0) or 0), float(getattr(module, "alpha", 0) or 0)
    forms = [(act, interleaved, 0.0, 0.0) for act in formulas.ACTIVATIONS for interleaved in (False, True)]
    forms += [("gpt_oss", interleaved, limit, alpha) for interleaved in (True, False) if limit]
    for dtype in (torch.float32, torch.bfloat16):
        given = sample.to(dtype)
        want = module._apply_gate(given)
        forms = [f for f in forms if torch.equal(formulas.gate(given, *f), want)]
    return forms[0] if forms else None


def register() -> None:
    """Make both known to transformers (again is harmless)."""
    AttentionInterface.register(NAME, attention)
    ExpertsInterface.register(NAME, experts)
