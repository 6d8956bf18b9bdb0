"""GGUF files: a tiny one written here, and the two real models."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from compilerllm.ir.recipe import Convert, Read
from compilerllm.kernels.launch.files import GgufFile
from compilerllm.kernels.launch.weights import execute, open_gguf
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.models.model import CapturedModel, capture_checkpoint
from compilerllm.models.resolve import resolve

from .test_architectures import TOKENS, distinct_tokens
from .tiny import tiny_model


def reordered(weight: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp's converter stores them for q and k: the halves of each head interleaved."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def write_llama(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType,
    others: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    """A tiny llama as a GGUF file, matrices in ``kind`` (``others`` by stored name), norms in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name:
            tensor = reordered(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = reordered(tensor, config.num_key_value_heads)
        stored = str(names.get_name(name, try_suffixes=(".weight",)))
        chosen = (others or {}).get(stored.removesuffix(".weight"), kind)
        packed = chosen if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.numpy(), packed)
        writer.add_tensor(stored, data, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parameters(loaded: CapturedModel) -> dict[str, Tensor]:
    source = loaded.weights.open()
    bound = loaded.names.bind_all(loaded.module)
    return {p.name: execute(p.recipe, source, shape=tuple(p.type.shape), name=p.name) for p in bound}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_tiny_llama(kind: str, tmp_path: Path) -> None:
    """The file's weights, put into the eager model, give the logits of the capture; unquantised ones are equal."""
    model = tiny_model("llama")
    path = tmp_path / "tiny.gguf"
    write_llama(path, model, gguf.GGMLQuantizationType[kind])
    loaded = capture_checkpoint(resolve(path, dtype="float32"))
    got = parameters(loaded)
    state = model.state_dict()
    for name, tensor in got.items():
        if name in state:
            close = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(kind, 0.3)
            assert torch.allclose(tensor, state[name], atol=close, rtol=0), name
    model.load_state_dict({k: v for k, v in got.items() if k in state})
    ids = distinct_tokens()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    logits = Interpreter(loaded.module, got).run(ids, torch.arange(TOKENS)[None])[0]
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert loaded.facts.eos_token_ids == (2,) and loaded.facts.max_positions == 128


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_stay_packed(kind: str, tmp_path: Path) -> None:
    """Blocks reach the graph as they are, q and k with their rows put back in order, and give the same logits."""
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_model("llama"), gguf.GGMLQuantizationType[kind])
    packed = capture_checkpoint(resolve(path, dtype="float32"), keep_packed=True)
    dense = capture_checkpoint(resolve(path, dtype="float32"))
    types = {p.name: p.type.dtype for p in packed.module.param_instances()}
    assert types["model.layers.1.self_attn.q_proj.weight"] == kind.lower()
    assert types["lm_head.weight"] == types["model.embed_tokens.weight"] == kind.lower()
    assert types["model.norm.weight"] == "f32"
    ids, positions = distinct_tokens(), torch.arange(TOKENS)[None]
    got = Interpreter(packed.module, parameters(packed)).run(ids, positions)[0]
    want = Interpreter(dense.module, parameters(dense)).run(ids, positions)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_layers_stored_differently_are_kinds_of_their_own(tmp_path: Path) -> None:
    """Files mix block types; a layer function has one type per parameter."""
    path = tmp_path / "tiny.gguf"
    write_llama(
        path,
        tiny_model("llama"),
        gguf.GGMLQuantizationType.Q4_1,
        {"blk.1.ffn_down": gguf.GGMLQuantizationType.Q8_0},
    )
    loaded = capture_checkpoint(resolve(path, dtype="float32"), keep_packed=True)
    assert [call.fn for call, _ in loaded.module.calls()] == ["layer_0", "layer_1", "layer_0"]
    types = {p.name: p.type.dtype for p in loaded.module.param_instances()}
    assert [types[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(3)] == ["q4_1", "q8_0", "q4_1"]


def test_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_model("llama"), gguf.GGMLQuantizationType.Q8_0)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.array("tokenizer.ggml.tokens")[:2] == ["token0", "token1"]
    assert ours.metadata["llama.context_length"] == 128
    source = open_gguf(path)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(int(d) for d in tensor.shape[::-1])
        raw = source.read(tensor.name)
        assert np.array_equal(raw.numpy(), tensor.data)


def transformers_tensors(path: Path, loaded: CapturedModel) -> dict[str, Tensor]:
    from transformers import modeling_gguf_pytorch_utils as theirs

    load: Any = theirs.load_gguf_checkpoint
    found: dict[str, Tensor] = load(str(path), return_tensors=True, model_to_load=loaded.captured.skeleton)[
        "tensors"
    ]
    return found


def stored_tensor(path: Path, name: str) -> Tensor:
    """One tensor, found by our header reader and dequantised by the gguf package."""
    source = open_gguf(path)
    dtype, shape = source.describe(name)
    raw = source.read(name)
    if dtype == "f32":
        return raw
    wide = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[dtype.upper()])
    return torch.from_numpy(wide).view(shape)


@pytest.mark.weights
@pytest.mark.slow
def test_every_parameter_equals_transformers_reading(smollm2_gguf: Path, gemma3_gguf: Path) -> None:
    for path in (smollm2_gguf, gemma3_gguf):
        loaded = capture_checkpoint(resolve(path, dtype="float32"))
        want = transformers_tensors(path, loaded)
        source = loaded.weights.open()
        checked = set()
        for param in loaded.names.bind_all(loaded.module):
            if param.name in want:
                got = execute(param.recipe, source, name=param.name)
                assert torch.equal(got, want[param.name].float()), param.name
                checked.add(param.name)
        assert checked == set(want)


@pytest.mark.weights
def test_smollm2(smollm2_gguf: Path) -> None:
    loaded = capture_checkpoint(resolve(smollm2_gguf, dtype="float32"))
    assert loaded.facts.eos_token_ids == (2,) and loaded.facts.num_layers == 30
    params = parameters(loaded)
    key = stored_tensor(smollm2_gguf, "blk.29.attn_k.weight")
    assert torch.equal(reordered(params["model.layers.29.self_attn.k_proj.weight"], 3), key)
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])  # The capital of France is
    logits = Interpreter(loaded.module, params).run(ids, torch.arange(5)[None])[0]
    assert int(logits[0, -1].argmax()) == 7042  # Paris


@pytest.mark.weights
def test_gemma3(gemma3_gguf: Path) -> None:
    """Q5_0, Q4_K, Q6_K and Q8_0 in one file; only Q8_0 can stay packed."""
    loaded = capture_checkpoint(resolve(gemma3_gguf, dtype="float32"), keep_packed=True)
    assert loaded.facts.windows == (512,) and 1 in loaded.facts.eos_token_ids
    source = loaded.weights.open()
    bound = {p.name: p for p in loaded.names.bind_all(loaded.module)}
    assert bound["model.embed_tokens.weight"].type.dtype == "q8_0"
    layer = "model.layers.0."
    for name, stored in {
        "self_attn.q_proj.weight": "attn_q", "self_attn.o_proj.weight": "attn_output", "mlp.down_proj.weight": "ffn_down",
        "mlp.up_proj.weight": "ffn_up",
    }.items():  # fmt: skip
        got = execute(bound[layer + name].recipe, source)
        assert bound[layer + name].type.dtype == "f32"
        assert torch.equal(got, stored_tensor(gemma3_gguf, f"blk.0.{stored}.weight")), name
    for name, stored in {
        "input_layernorm": "attn_norm",
        "self_attn.q_norm": "attn_q_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }.items():
        got = execute(bound[f"{layer}{name}.weight"].recipe, source)
        assert torch.equal(got, stored_tensor(gemma3_gguf, f"blk.0.{stored}.weight") - 1), name


def test_gemma_norms_lose_the_one_the_file_adds() -> None:
    from compilerllm.ir.recipe import Shift
    from compilerllm.ir.types import TensorType
    from compilerllm.models.gguf_names import gguf_table

    class Source:
        def names(self) -> list[str]:
            return ["output_norm.weight", "token_embd.weight"]

    types = {
        "model.norm.weight": TensorType("bf16", (8,)),
        "model.embed_tokens.weight": TensorType("bf16", (9, 8)),
    }
    config = type("Config", (), {"num_hidden_layers": 1})()
    table = gguf_table("gemma3", config, types, Source())  # type: ignore[arg-type]
    assert table == {
        "model.norm.weight": Shift(Read("output_norm.weight"), -1.0),
        "model.embed_tokens.weight": Read("token_embd.weight"),
    }
    assert Convert(table["model.norm.weight"], "bf16")
