"""Every architecture that must run: its capture computes what transformers' eager model computes, and is raised."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.verify import verify
from compilerllm.kernels.launch.weights import execute
from compilerllm.kernels.reference.interpreter import Interpreter

from .tiny import EXPERTS, MORE, TINY, captured, tiny_model

TOKENS = 23


class StateDict:
    """A model's own tensors as a source, so that captures are checked before any file is read."""

    def __init__(self, model: Any) -> None:
        self.tensors: dict[str, Tensor] = dict(model.state_dict())

    def names(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return {torch.float32: "f32", torch.bfloat16: "bf16"}[self.tensors[name].dtype], tuple(
            self.tensors[name].shape
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.tensors[name][start:stop]


def run(module: Module, model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    source = StateDict(model)
    params = {p.name: execute(p.recipe, source, name=p.name) for p in module.param_instances()}
    return Interpreter(module, params).run(ids, positions)[0]


def distinct_tokens() -> Tensor:
    return torch.randperm(97, generator=torch.Generator().manual_seed(1))[:TOKENS][None]


def operators(module: Module) -> Counter[str]:
    """Operators of the whole model, each layer's counted."""
    nodes = [*module.main.nodes, *(node for _, graph in module.calls() for node in graph.nodes)]
    return Counter(node.op for node in nodes)


@pytest.mark.parametrize("name", [*TINY, *MORE])
def test_logits_match_eager(name: str) -> None:
    model, module = tiny_model(name), captured(name).module
    ids = distinct_tokens()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    got = run(module, model, ids, torch.arange(TOKENS)[None])
    assert want.std() > 0.05, "a model whose logits hardly differ proves nothing"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2", "gpt_oss"])
def test_bfloat16_rounds_as_eager_does(name: str) -> None:
    """Swapped norms and rotary functions are bit-equal, so what differs is a sum's order at most."""
    model, module = tiny_model(name).to(torch.bfloat16), captured(name, torch.bfloat16).module
    unrounded = dict(tiny_model(name).named_buffers())  # .to() has rounded the frequencies too
    for path, buffer in model.named_buffers():
        if "inv_freq" in path:
            buffer.data = unrounded[path]
    ids = distinct_tokens()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    got = run(module, model, ids, torch.arange(TOKENS)[None])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", TINY)
def test_everything_known_is_raised(name: str) -> None:
    expected, capture = TINY[name], captured(name)
    found = operators(capture.module)
    layers = len(capture.plan.kind_of)
    assert found[expected.norm_op] == expected.norms
    assert found["rope"] == expected.ropes
    assert found["attention"] == layers
    assert found["experts"] == EXPERTS.get(name, 0)
    assert found["aten"] == 0 and not capture.opaque and not capture.swaps.left
    assert len(capture.module.functions) - 1 == expected.kinds
    attention = [n for g in capture.module.functions.values() for n in g.nodes if n.op == "attention"]
    for key, value in expected.attrs.items():
        assert value in [n.attrs.get(key) for n in attention]


@pytest.mark.parametrize("name", TINY)
def test_module_is_well_formed_and_reads_back(name: str) -> None:
    module = captured(name).module
    verify(module)
    text = print_module(module)
    assert print_module(parse_module(text)) == text


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_moe"])
def test_layers_of_several_kinds_are_stitched_in_order(name: str) -> None:
    """Each call names its own layer, and windows fall on the layers whose type says so."""
    capture = captured(name)
    config = capture.skeleton.config
    for index, (call, graph) in enumerate(capture.module.calls()):
        assert (call.text("params"), call.text("states")) == (f"model.layers.{index}", str(index))
        window = next(n.integer("window", 0) for n in graph.nodes if n.op == "attention")
        if name != "qwen3_moe":
            assert window == (6 if config.layer_types[index] == "sliding_attention" else 0)


def test_two_captures_give_the_same_text() -> None:
    from compilerllm.models.capture import capture

    from .tiny import tiny_config

    again = capture(tiny_config("gemma3_text"), torch.float32)
    assert print_module(again.module) == print_module(captured("gemma3_text").module)


def test_tied_head_reads_the_embedding() -> None:
    params = {p.name: p for p in captured("llama").module.main.params}
    from compilerllm.ir.recipe import Read

    assert params["lm_head.weight"].recipe == Read("model.embed_tokens.weight")


def test_positions_count_from_anywhere() -> None:
    """Rotary positions are an input: shifting all of them changes nothing for relative attention."""
    model, module = tiny_model("qwen3"), captured("qwen3").module
    ids = distinct_tokens()
    first = run(module, model, ids, torch.arange(TOKENS)[None])
    shifted = run(module, model, ids, torch.arange(TOKENS)[None] + 50)
    torch.testing.assert_close(first, shifted, atol=1e-3, rtol=1e-3)
