"""A transformers configuration from a GGUF file's metadata, which is the only configuration such a file has."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from compilerllm.kernels.launch.files import GgufFile
from compilerllm.models.errors import InvalidCheckpoint, UnknownArchitecture, first_line


class _Keys:
    """A file's metadata under its architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.architecture = file, str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        # The file holds float32; 1e-05 would otherwise become 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InvalidCheckpoint(
                f"{self.file.path} lacks the key {self.architecture}.{key}; the file is damaged or was made by an old converter"
            )
        return value

    def per_layer(self, key: str) -> list[Any]:
        return self.file.array(f"{self.architecture}.{key}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def _common(keys: _Keys) -> dict[str, Any]:
    heads = keys["attention.head_count"]
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidCheckpoint(f"{keys.file.path} has no token_embd.weight; it is no language model")
    tokens = keys.file.metadata
    return {
        "hidden_size": keys["embedding_length"], "num_hidden_layers": keys["block_count"], "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length") or keys.get("rope.dimension_count") or keys["embedding_length"] // heads,
        "intermediate_size": keys.get("feed_forward_length"), "max_position_embeddings": keys["context_length"],
        "vocab_size": embedding.shape[0], "tie_word_embeddings": not keys.has("output.weight"),
        "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"), "eos_token_id": tokens.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": tokens.get("tokenizer.ggml.padding_token_id"),
    }  # fmt: skip


def _rms(keys: _Keys) -> dict[str, Any]:
    return {"rms_norm_eps": keys["attention.layer_norm_rms_epsilon"]}


def _rope(keys: _Keys, theta: float = 10000.0) -> dict[str, Any]:
    """Rotary parameters. Llama 3.1's frequency factors are a tensor, from whose largest the scaling is read back."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", theta)}
    factors = keys.file.tensors.get("rope_freqs.weight")
    kind = keys.get("rope.scaling.type")
    if factors is not None:
        raw = keys.file.data[factors.offset : factors.offset + factors.nbytes]
        rope |= {
            "rope_type": "llama3", "factor": max(struct.unpack(f"<{len(raw) // 4}f", raw)), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": keys["rope.scaling.factor"]}
    elif kind not in (None, "none"):
        raise InvalidCheckpoint(
            f"{keys.file.path}: rotary scaling {kind!r} in GGUF is not supported; use the safetensors model"
        )
    return rope


def _llama(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "llama", **_common(keys), **_rms(keys), "rope_parameters": _rope(keys)}
    if keys.get("expert_count"):
        config |= {
            "model_type": "mixtral", "num_local_experts": keys["expert_count"],
            "num_experts_per_tok": keys["expert_used_count"], "sliding_window": None,
        }  # fmt: skip
    config["attention_bias"] = keys.has("blk.0.attn_q.bias")
    return config


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen2", **_common(keys), **_rms(keys), "rope_parameters": _rope(keys)}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {**_qwen2(keys), "model_type": "qwen3"}


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    return {
        **_qwen2(keys), "model_type": "qwen3_moe", "num_experts": keys["expert_count"], "norm_topk_prob": True,
        "num_experts_per_tok": keys["expert_used_count"], "moe_intermediate_size": keys["expert_feed_forward_length"],
    }  # fmt: skip


def _phi3(keys: _Keys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    return {
        "model_type": "phi3", **_common(keys), **_rms(keys), "rope_parameters": _rope(keys),
        "sliding_window": window or None,
    }  # fmt: skip


def _starcoder2(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "starcoder2", **_common(keys), "rope_parameters": _rope(keys),
        "norm_epsilon": keys["attention.layer_norm_epsilon"], "use_bias": keys.has("blk.0.attn_q.bias"),
    }  # fmt: skip


def _gpt2(keys: _Keys) -> dict[str, Any]:
    common = _common(keys)
    return {
        "model_type": "gpt2", "n_embd": common["hidden_size"], "n_layer": common["num_hidden_layers"],
        "n_head": common["num_attention_heads"], "n_inner": common["intermediate_size"],
        "n_positions": common["max_position_embeddings"], "layer_norm_epsilon": keys["attention.layer_norm_epsilon"],
        **{k: common[k] for k in ("vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    }  # fmt: skip


def _gemma2(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "gemma2", **_common(keys), **_rms(keys), "rope_parameters": _rope(keys)}
    # Only the largest model scales queries by the width of the model instead of the head's.
    wide = keys["block_count"] == 46
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return config | {
        "query_pre_attn_scalar": scalar, "sliding_window": keys["attention.sliding_window"],
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
    }  # fmt: skip


def _gemma3(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "gemma3_text", **_common(keys), **_rms(keys)}
    wide = keys["block_count"] == 62
    layers, window = config["num_hidden_layers"], keys.get("attention.sliding_window")
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return config | {
        "query_pre_attn_scalar": scalar, "sliding_window": window,
        "layer_types": ["sliding_attention" if window and (i + 1) % 6 else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": _rope(keys, 1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10000.0)},
        },
    }  # fmt: skip


_READERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3_moe, "phi3": _phi3, "starcoder2": _starcoder2,
    "gpt2": _gpt2, "gemma2": _gemma2, "gemma3": _gemma3,
}  # fmt: skip


def gguf_config(file: GgufFile) -> Any:
    """The configuration object. Raises ``UnknownArchitecture`` or ``InvalidCheckpoint``."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    keys = _Keys(file)
    if keys.architecture not in _READERS:
        raise UnknownArchitecture(
            f"{file.path} is a GGUF file of architecture {keys.architecture!r}; those that can be read are "
            f"{', '.join(sorted(_READERS))}. Use the model's safetensors checkpoint instead"
        )
    try:
        values = {
            k: v
            for k, v in _READERS[keys.architecture](keys).items()
            if v is not None or k == "sliding_window"
        }
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (ArithmeticError, StrictDataclassError) as error:  # such as a width divided by no heads
        reason = first_line(error.__cause__ or error)
        raise InvalidCheckpoint(
            f"{file.path} contradicts itself: {reason}; download it again, or convert the model anew"
        ) from error
